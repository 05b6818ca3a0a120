"""One group after another, in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dpaudit.experiments.trials._task import Finished, Task, perform
from dpaudit.experiments.trials._trial import Group

__all__ = ["Serial"]


@dataclass(frozen=True)
class Serial:
    """No other processes: for few trials, and to debug a training function."""

    def map(self, task: Task, groups: Sequence[Group]) -> Iterator[tuple[Group, Finished]]:
        """What became of every group, in their order."""
        scorer = task.build()
        for group in groups:
            yield group, perform(scorer, group)
