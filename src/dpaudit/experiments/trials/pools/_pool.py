"""The one seam between trials and whoever makes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from dpaudit.experiments.trials._task import Finished, Task
from dpaudit.experiments.trials._trial import Group

__all__ = ["Pool"]


class Pool(Protocol):
    """Anything with this ``map``.

    It gives what ``task(group)`` gives for every group, in any order, once each. The task can be pickled and
    called in any process. What it gives has errors of trainings in it; it raises only what would be wrong for
    every group, such as a function that cannot be imported. If what ``map`` returns has a ``close``, as a
    generator has, it is called at the end and after an interrupt.

    A pool of your own, with the standard library's::

        class Spawned:
            def map(self, task, groups):
                with multiprocessing.get_context("spawn").Pool(4) as pool:
                    yield from pool.imap_unordered(task, groups)
    """

    def map(self, task: Task, groups: Sequence[Group]) -> Iterable[tuple[Group, Finished]]:
        """What became of every group."""
        ...
