"""Canaries that are entries of the data set: one observation of the whole training from each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from dpaudit.canaries import InputCanary
from dpaudit.errors import InputError
from dpaudit.recording import WholeRunRecorder
from dpaudit.training._step import Step
from dpaudit.training._training import Training
from dpaudit.training.audits._base import CanaryAudit
from dpaudit.training.gradients._rows import Rows

__all__ = ["EndToEnd"]


class EndToEnd(CanaryAudit):
    """Audits sampling, clipping and noise together, against the curve of the whole training.

    Each canary is in the data set or not, by a fair coin before the first step. Those that are in it are
    drawn by the training's own sampling, like any example. They are kept out of the update, but they use up
    chance of the sampling, so that the batches are others than without audit. ``num_canaries`` is by
    default 8,192, or the number of the model's parameters if that is less.
    """

    recorder: WholeRunRecorder
    usual_num_canaries: ClassVar[int] = 8192

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        if isinstance(self.canary, InputCanary):
            raise InputError(f"Expected a gradient canary such as Dirac() end to end, got {self.canary!r}.")
        if self._callbacks:
            raise InputError("Expected no callbacks end to end: there is no bound before the last step.")

    def attach(self, training: Training) -> None:
        super().attach(training)
        settings = training.settings
        present = self._inserted.in_data()
        self._entries = np.flatnonzero(present)
        self.recorder = WholeRunRecorder(
            present,
            noise_multiplier=settings.noise_multiplier,
            sample_rate=settings.sample_rate,
            num_steps=settings.num_steps,
            delta=self.delta,
            confidence=self.confidence,
        )

    @property
    def num_entries(self) -> int:
        return len(self._entries)

    def joining(self, index: int, entries: Sequence[int]) -> Iterable[Rows]:
        return self._inserted.rows(index, self._entries[list(entries)])

    def observe(self, step: Step) -> None:
        self.recorder.record(self._inserted.scores(step))
