"""What a private optimizer says of its noise."""

from __future__ import annotations

import math

from dpaudit.observers._terms import Terms
from dpaudit.observers.tensorflow._clips import Clip

__all__ = ["Noise"]


class Noise:
    """The noise of a step that ``calls_each`` calls make together; ``note`` is to be called in every one."""

    def __init__(self, clip: Clip, calls_each: int) -> None:
        self._clip, self._calls_each = clip, calls_each
        self._noted = {clip.noise_multiplier}

    def note(self) -> None:
        """The noise of this call, or of all calls of the graph that is being traced."""
        self._noted.add(self._clip.noise_multiplier)

    def terms(self) -> Terms:
        """What of a claim is known; of a noise that changes there is no claim of equal steps."""
        if len(self._noted) > 1:
            return Terms()
        return Terms(noise_multiplier=math.sqrt(self._calls_each) * next(iter(self._noted)))
