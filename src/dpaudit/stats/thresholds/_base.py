"""The interface of a threshold rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from dpaudit.errors import InputError
from dpaudit.stats._observations import Observations
from dpaudit.stats._question import Finding, Question
from dpaudit.stats.inference import Inference

__all__ = ["ThresholdRule", "wants"]


class ThresholdRule(ABC):
    """Where to call a score "present", and what may be counted there."""

    # Whether a bound under this rule is a statement with an error rate.
    valid: ClassVar[bool] = True

    @abstractmethod
    def apply(self, observations: Observations, inference: Inference, question: Question) -> Finding:
        """Place the threshold, count, infer."""

    def counted(self, size: int) -> int:
        """How many of ``size`` scores of a side (or of steps, where canaries share them) are counted."""
        return size

    def error(self, error: float, num_absent: int) -> float:
        """The error left for one threshold."""
        del num_absent
        return error

    def operating_point(self, question: Question, parameter: float, normalized: bool) -> tuple[float, float]:
        """The fpr and fnr at which an ideal attack would be counted: its balanced point."""
        del normalized
        error = question.tradeoff.balanced_error(parameter)
        return error, error


def wants(rule: ThresholdRule, inference: Inference, *kinds: type) -> None:
    """Refuse an inference that the rule has no meaning with."""
    if not isinstance(inference, kinds):
        names = " or ".join(f"{kind.__name__}()" for kind in kinds)
        raise InputError(f"{rule!r} works with {names}, got {inference!r}.")
