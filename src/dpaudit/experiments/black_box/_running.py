"""Where many trainings are, with what their scores say so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from dpaudit.experiments.black_box._verdict import Judge
from dpaudit.experiments.trials import TrialProgress

__all__ = ["Running"]

_PAUSE = 5.0  # seconds between two bounds
_SHARE = 20  # and so many times as long as a bound takes: meanwhile nobody gives work to the workers
_FEW = 20  # scores; of fewer nothing is said


@dataclass(frozen=True, kw_only=True)
class Running:
    """Progress, and the bound that the scores so far would give if they were all.

    It is an estimate: who looks at every moment and stops at the best errs more often than the bound says.
    """

    progress: TrialProgress
    epsilon: float | None
    claimed: float | None

    @staticmethod
    def watching(judge: Judge, watch: Callable[[Running], None]) -> Callable[[TrialProgress], None]:
        """What makes such values from progress, and finds a new bound every few seconds."""
        newest: list[float] = []
        due = [time.monotonic() + _PAUSE]

        def told(progress: TrialProgress) -> None:
            now = time.monotonic()
            if now >= due[0] and progress.num_done >= _FEW and progress.num_left > 0:
                observations = progress.observations
                if observations is not None:
                    newest[:] = [judge.bound(observations).epsilon]
                ended = time.monotonic()
                due[0] = ended + max(_PAUSE, _SHARE * (ended - now))
            watch(
                Running(
                    progress=progress, epsilon=newest[0] if newest else None, claimed=judge.claimed_epsilon
                )
            )

        return told
