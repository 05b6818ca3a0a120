"""A recorder that gives no verdict on canaries that never arrived."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from dpaudit.diagnostics import Diagnosis
from dpaudit.observers._arrival import Side, require_arrival
from dpaudit.observers._facts import Facts
from dpaudit.recording import Recorder
from dpaudit.stats import Result

__all__ = ["ArrivingRecorder"]


class ArrivingRecorder(Recorder, ABC):
    """A :class:`dpaudit.Recorder` of canaries that score ``signal`` or more where they are present.

    ``facts`` are what is known of the training when somebody asks.
    """

    def __init__(
        self, *, signal: float = 1.0, facts: Callable[[], Facts] | None = None, **options: Any
    ) -> None:
        self._signal, self._facts = signal, facts
        super().__init__(**options)

    @property
    def facts(self) -> Facts | None:
        """What is known of the training besides its claim."""
        return None if self._facts is None else self._facts()

    def audit(self, **method: Any) -> Result:
        seen = self.observations
        require_arrival(Side(seen.with_canary), Side(seen.without_canary), self._signal)
        return super().audit(**method)

    @abstractmethod
    def diagnose(self, *, noise_multiplier: float | None = None, confidence: float = 0.95) -> Diagnosis:
        """Tests of the noise of all steps against a noise multiplier; refused where they cannot be made."""
