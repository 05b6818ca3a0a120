"""A recorder that gives no verdict on canaries that never arrived."""

from __future__ import annotations

from typing import Any

from dpaudit.observers._arrival import Side, require_arrival
from dpaudit.recording import Recorder
from dpaudit.stats import Result

__all__ = ["ArrivingRecorder"]


class ArrivingRecorder(Recorder):
    """A :class:`dpaudit.Recorder` of canaries that score ``signal`` or more where they are present."""

    def __init__(self, *, signal: float = 1.0, **options: Any) -> None:
        self._signal = signal
        super().__init__(**options)

    def audit(self, **method: Any) -> Result:
        seen = self.observations
        require_arrival(Side(seen.with_canary), Side(seen.without_canary), self._signal)
        return super().audit(**method)
