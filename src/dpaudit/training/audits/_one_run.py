"""Many canaries a step, each present by a fair coin, in the one training that is run anyway."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from dpaudit.training._step import Step
from dpaudit.training._training import Training
from dpaudit.training.audits._of_steps import AuditOfSteps
from dpaudit.training.gradients._rows import Rows

__all__ = ["OneRun"]


class OneRun(AuditOfSteps):
    """Audits every step of a training, which stays what it was: the weights are those without audit.

    ``num_canaries`` a step is by default 512, or the number of the model's parameters if that is less. Of
    input canaries there are 16: each costs as much as one or two examples of the batch.
    """

    usual_num_canaries: ClassVar[int] = 512
    usual_num_inputs: ClassVar[int] = 16

    def attach(self, training: Training) -> None:
        super().attach(training)
        self.recorder = self._record(training, shares_noise=self._inserted.shares_noise)

    def _join(self, index: int) -> Iterable[Rows]:
        return self._inserted.rows(index, np.flatnonzero(self._inserted.coins(index)))

    def _look(self, step: Step) -> None:
        self.recorder.record(self._inserted.scores(step), self._inserted.coins(step.index), tell=False)
