"""Many canaries a step, each present by a fair coin, in the one training that is run anyway."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np

from dpaudit.recording import Recorder
from dpaudit.training._step import Step
from dpaudit.training._training import Training
from dpaudit.training.audits._base import GradientAudit
from dpaudit.training.gradients._rows import Rows

__all__ = ["OneRun"]


class OneRun(GradientAudit):
    """Audits every step of a training, which stays what it was: the weights are those without audit.

    ``num_canaries`` a step is by default 512, or the number of the model's parameters if that is less.
    """

    recorder: Recorder
    usual_num_canaries: ClassVar[int] = 512

    def attach(self, training: Training) -> None:
        super().attach(training)
        self.recorder = Recorder(
            claim=self._claim(training),
            num_steps=training.settings.num_steps,
            confidence=self.confidence,
            callbacks=self._callbacks,
        )

    def joining(self, index: int, entries: Sequence[int]) -> Iterable[Rows]:  # noqa: ARG002
        return self._inserted.rows(index, np.flatnonzero(self._inserted.coins(index)))

    def observe(self, step: Step) -> None:
        self.recorder.record(self._inserted.scores(step), self._inserted.coins(step.index), tell=False)

    def after(self, step: Step) -> None:  # noqa: ARG002
        self.recorder.tell()
