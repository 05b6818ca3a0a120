"""Audits of single steps, which a recorder composes to the whole training."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from dpaudit import _validate
from dpaudit.errors import InputError
from dpaudit.recording import Recorder
from dpaudit.training._step import Step
from dpaudit.training._training import Training
from dpaudit.training.audits._base import CanaryAudit
from dpaudit.training.gradients._rows import Rows

__all__ = ["AuditOfSteps"]


class AuditOfSteps(CanaryAudit):
    """Scores from every step, or from the ``first_steps`` only, where input canaries leak most.

    The claim is that of the whole training all the same.
    """

    recorder: Recorder

    def __init__(self, *, first_steps: int | None = None, **common: Any) -> None:
        super().__init__(**common)
        self._first_steps = None if first_steps is None else _validate.whole("first_steps", first_steps)

    def _record(self, training: Training, **more: Any) -> Recorder:
        """A recorder of the steps that are looked at."""
        return Recorder(
            claim=self._claim(training),
            num_steps=self._num_audited(training),
            confidence=self.confidence,
            callbacks=self._callbacks,
            **more,
        )

    def _num_audited(self, training: Training) -> int:
        planned, first = training.settings.num_steps, self._first_steps
        if first is not None and first > planned:
            raise InputError(
                f"Expected first_steps={first} to be at most {planned}, the number of the training's steps."
            )
        return planned if first is None else first

    def _is_over(self, index: int) -> bool:
        return index >= self.recorder.num_steps

    def joining(self, index: int, entries: Sequence[int]) -> Iterable[Rows]:  # noqa: ARG002
        return () if self._is_over(index) else self._join(index)

    def observe(self, step: Step) -> None:
        if not self._is_over(step.index):
            self._look(step)

    def after(self, step: Step) -> None:
        if not self._is_over(step.index):
            self.recorder.tell()

    def _join(self, index: int) -> Iterable[Rows]:  # noqa: ARG002
        """Gradients that join the training's own batch."""
        return ()

    @abstractmethod
    def _look(self, step: Step) -> None:
        """Record the scores of a step."""
