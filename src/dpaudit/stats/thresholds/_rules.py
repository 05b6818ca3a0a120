"""The interface of threshold rules, and rules that need no scores: fixed thresholds, the best of several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dpaudit import _validate
from dpaudit._types import FloatArray, IntArray
from dpaudit.errors import InputError
from dpaudit.stats._counts import ErrorCounts
from dpaudit.stats._observations import Observations
from dpaudit.stats._serialization import NamedPart, Serializable
from dpaudit.stats.inference import BoundQuery, ExactInference, Inference, ThresholdResult
from dpaudit.stats.tradeoffs import Attack, Gaussian

if TYPE_CHECKING:
    from dpaudit.stats._power import AuditDesign


class ThresholdRule(Serializable, ABC):
    """A rule for the threshold above which a score is called "present", and for the scores to count."""

    # Whether a bound under this rule has a known error rate.
    valid: ClassVar[bool] = True
    # What a bound under this rule assumes beyond the inference.
    assumption: ClassVar[str | None] = None

    @abstractmethod
    def apply(self, observations: Observations, inference: Inference, query: BoundQuery) -> ThresholdResult:
        """Choose the threshold, count errors and return the result of the inference."""

    def counted(self, size: int) -> int:
        """Return how many of ``size`` scores per side, or of ``size`` shared steps, are counted."""
        return size

    def error(self, error: float, num_absent: int) -> float:
        """Return the share of ``error`` available to one threshold."""
        del num_absent
        return error

    def largest_bound(self, inference: ExactInference, counts: ErrorCounts, query: BoundQuery) -> float:
        """Return the bound of an attack without errors; ``query`` has the error rate of one threshold."""
        return inference.parameter(counts, query)

    def operating_points(self, attack: Attack, design: AuditDesign) -> tuple[FloatArray, FloatArray]:
        """Return equally likely pairs of fpr and fnr at which the rule may put the threshold.

        The default is the point with the smallest balanced error.
        """
        del design
        return as_points(attack.balanced())

    def refuting_limits(
        self, claimed: float, sizes: ErrorCounts, inference: ExactInference, query: BoundQuery
    ) -> tuple[IntArray, ...]:
        """Return the most errors with which each threshold of a rule with several refutes ``claimed``.

        The result is empty if the rule has one threshold. ``query`` has the error rate of one of several.
        """
        del claimed, sizes, inference, query
        return ()

    def detection_rate(self, attack: Attack, limits: tuple[IntArray, ...], sizes: ErrorCounts) -> float:
        """Return how often any of several thresholds refutes, given :meth:`refuting_limits`."""
        raise NotImplementedError  # only called if there are limits


def as_points(rates: tuple[float, float]) -> tuple[FloatArray, FloatArray]:
    """Return a single point."""
    return np.asarray(rates[:1]), np.asarray(rates[1:])


def unsupported(rule: ThresholdRule, inference: Inference, *expected: type) -> InputError:
    """Return the error for an inference that the rule does not support."""
    names = " or ".join(kind.__name__ for kind in expected)
    return InputError(f"{rule!r} needs an inference of type {names}, got {inference!r}.")


@dataclass(frozen=True)
class Fixed(ThresholdRule):
    """A threshold chosen before seeing the data; 1/2 is the midpoint of normalized white-box scores."""

    threshold: float = 0.5

    def __post_init__(self) -> None:
        _validate.finite("threshold", self.threshold)

    @property
    def label(self) -> str:
        return f"fixed {self.threshold:.4g}"

    def apply(self, observations: Observations, inference: Inference, query: BoundQuery) -> ThresholdResult:
        return inference.at_threshold(observations, self.threshold, query)

    def operating_points(self, attack: Attack, design: AuditDesign) -> tuple[FloatArray, FloatArray]:
        if design.normalized and attack.rates_at is not None:
            return as_points(attack.rates_at(self.threshold))
        return super().operating_points(attack, design)


@dataclass(frozen=True)
class Optimal(ThresholdRule):
    """The best threshold for (eps, delta)-DP on normalized scores with this noise (appendix C.1).

    By the paper's condition, the log-likelihood ratio at the threshold equals the Gaussian's epsilon at
    delta, so the threshold is 1/2 + noise^2 epsilon.
    """

    noise: float

    def __post_init__(self) -> None:
        _validate.positive("noise", self.noise)

    label = "optimal"

    def threshold(self, delta: float) -> float:
        """Return the threshold, w in the paper."""
        if delta == 0:
            raise InputError("delta must be positive with Optimal(), got 0: its threshold would be infinite.")
        return 0.5 + self.noise**2 * Gaussian().epsilon(1 / self.noise, delta)

    def apply(self, observations: Observations, inference: Inference, query: BoundQuery) -> ThresholdResult:
        return inference.at_threshold(observations, self.threshold(query.delta), query)

    def operating_points(self, attack: Attack, design: AuditDesign) -> tuple[FloatArray, FloatArray]:
        fixed = Fixed(self.threshold(design.query.delta))
        # this rule is meaningful for normalized scores only
        return fixed.operating_points(attack, replace(design, normalized=True))


@dataclass(frozen=True, repr=False)
class BestOf(ThresholdRule):
    """The largest bound of several rules that share the error probability: a union bound.

    The first rule is the main one, whose power is stated. ``chosen`` is the rule with the largest bound, in
    results.

    >>> BestOf((Fixed(0.5), Optimal(2.0)), (0.9, 0.1)).label
    'best of fixed 0.5, optimal'
    """

    rules: tuple[ThresholdRule | NamedPart, ...]
    shares: tuple[float, ...]
    chosen: ThresholdRule | NamedPart | None = None

    def __post_init__(self) -> None:
        if not self.rules or len(self.rules) != len(self.shares):
            raise InputError(
                f"BestOf() needs one share of the error for each rule, got {len(self.rules)} rules and "
                f"{len(self.shares)} shares."
            )
        if min(self.shares) <= 0 or sum(self.shares) > 1 + 1e-9:
            raise InputError(f"shares must be positive and sum to at most 1, got {self.shares}.")
        for rule in self.rules:
            if isinstance(rule, ThresholdRule) and not rule.valid:
                raise InputError(f"BestOf() needs rules with a known error rate, got {rule!r}.")

    def __repr__(self) -> str:
        if self.chosen is None:
            return f"BestOf(rules={self.rules!r}, shares={self.shares!r})"
        shared = zip(self.rules, self.shares, strict=True)
        shares = " and ".join(f"{rule!r} with {share:g} of the error" for rule, share in shared)
        return f"{self.chosen!r}, the better of {shares}"

    @property
    def label(self) -> str:
        if self.chosen is None:
            return "best of " + ", ".join(rule.label for rule in self.rules)
        return self.chosen.label

    @property
    def known_rules(self) -> list[ThresholdRule]:
        """All rules; one that was read from a file and is not known raises an ``InputError``."""
        return [_known(rule) for rule in self.rules]

    def apply(self, observations: Observations, inference: Inference, query: BoundQuery) -> ThresholdResult:
        rules = self.known_rules
        results = [
            rule.apply(observations, inference, replace(query, error_rate=share * query.error_rate))
            for rule, share in zip(rules, self.shares, strict=True)
        ]
        best = max(range(len(results)), key=lambda index: results[index].parameter)
        p_value = partial(self._p_value, results)
        return replace(results[best], rule=replace(self, chosen=rules[best]), p_value=p_value)

    def _p_value(self, results: Sequence[ThresholdResult], claimed: float) -> float:
        """Return the smallest p-value of the rules, each divided by its share of the error."""
        shared = zip(results, self.shares, strict=True)
        p_values = (result.p_value(claimed) / share for result, share in shared if result.p_value is not None)
        return min([1.0, *p_values])


def _known(rule: ThresholdRule | NamedPart) -> ThresholdRule:
    if isinstance(rule, NamedPart):
        raise InputError(f"{rule!r} does not choose a threshold; pass a rule such as Fixed(0.5).")
    return rule
