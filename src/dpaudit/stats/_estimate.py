"""Estimates beside the bound: the effective noise, its epsilon, and the attack's ROC with a band.

A bound says what is refuted, whatever the scores look like. An estimate says how much noise there is, if the
scores are normal, with an interval on both sides. No verdict rests on one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from dpaudit import _validate
from dpaudit.errors import InputError, quoted
from dpaudit.stats._bound import LARGEST, number, plain
from dpaudit.stats._effective_noise import MIN_STEPS, Interval, ScoreSpread, Shape
from dpaudit.stats._observations import Observations
from dpaudit.stats._roc_band import RocBand, RocPoint, attack_band
from dpaudit.stats.tradeoffs import Gaussian, TradeOff

_INTERVALS = "noise_multiplier", "noise_ratio", "epsilon"
_PRECISE = 0.01  # relative width of an interval from which on four digits are shown
_NO_SCORES = "The scores are not part of this result."
_NOT_GAUSSIAN = "The effective noise is estimated only for observations of Gaussian noise."


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The effective noise of the attack's scores, and its ROC; an estimate, never the basis of a verdict.

    ``noise_multiplier`` is the pooled standard deviation of the scores over the difference of their means
    with and without the canary, so it is in units of the sensitivity; ``noise_ratio`` is its ratio to the
    claim; ``epsilon`` is the claim's epsilon with this noise. Each has a two-sided interval with the
    confidence of the audit, *if the scores are normal* (``shape`` says whether they look so) and, where
    canaries share steps, the steps are independent. Without a clear difference of the means, the upper end of
    the noise is infinite. The three are None if they cannot be estimated: ``missing`` then says why.

    The end of an interval at which the leak is largest is about *this attack*: a better one may see more.
    """

    kind: ClassVar[str] = "estimate"
    confidence: float
    noise_multiplier: Interval | None = None
    noise_ratio: Interval | None = None
    epsilon: Interval | None = None
    shape: Shape | None = None
    is_stepped: bool = False
    """Whether canaries share steps, so that only steps are taken as independent."""
    missing: str | None = None
    roc_source: BandSource | RocBand | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        observations: Observations | None,
        *,
        tradeoff: TradeOff,
        claimed: float,
        epsilon: Callable[[float], float],
        confidence: float,
    ) -> Estimate:
        """Estimate noise and ROC, given the claim about one score: a trade-off curve and its parameter.

        ``epsilon`` maps the parameter to an epsilon.
        """
        if observations is None:
            return cls(confidence=confidence, missing=_NO_SCORES)
        stepped = observations.is_stepped
        band = BandSource(observations, tradeoff, claimed, confidence)
        if not isinstance(tradeoff, Gaussian):
            return cls(confidence=confidence, is_stepped=stepped, missing=_NOT_GAUSSIAN, roc_source=band)
        spread = ScoreSpread.of(observations)
        if spread.missing is not None:
            return cls(confidence=confidence, is_stepped=stepped, missing=spread.missing, roc_source=band)
        separation = spread.separation(confidence).mapped(lambda mu: max(mu, 0.0))
        noise = separation.mapped(_inverse)
        return cls(
            confidence=confidence,
            noise_multiplier=noise,
            noise_ratio=noise.mapped(lambda one: one * claimed) if 0 < claimed < math.inf else None,
            epsilon=separation.mapped(epsilon),
            shape=spread.shape(),
            is_stepped=stepped,
            roc_source=band,
        )

    @cached_property
    def roc(self) -> RocBand | None:
        """The attack's ROC with a simultaneous band; None for few steps."""
        return self.roc_source.band() if isinstance(self.roc_source, BandSource) else self.roc_source

    @property
    def noise(self) -> str | None:
        """The effective noise in words, such as "effective noise 0.71 of the claim [0.69, 0.73]"."""
        if self.noise_ratio is not None:
            return f"effective noise {_interval_text(self.noise_ratio, ' of the claim')}"
        if self.noise_multiplier is not None:
            return f"effective noise multiplier {_interval_text(self.noise_multiplier)}"
        return None

    @property
    def assumes(self) -> str:
        """What the intervals of noise and epsilon assume."""
        if self.is_stepped:
            return "normal scores, independent steps and no early stopping"
        return "independent normal scores of a number fixed before"

    @property
    def statement(self) -> str:
        """The estimates of noise and epsilon in one sentence, or why there are none."""
        if self.noise is None or self.epsilon is None or self.shape is None:
            return self.missing or _NO_SCORES
        return (
            f"{self.noise}, epsilon {_interval_text(self.epsilon)}: an estimate for this attack, not a "
            f"bound, that assumes {self.assumes} ({self.shape})"
        )

    @property
    def rates(self) -> str | None:
        """The true positive rates at three false positive rates, in one sentence; None without a ROC."""
        if self.roc is None:
            return None
        first, *others = self.roc.points
        text = f"at a false positive rate of {100 * first.fpr:g} %, this attack has a true positive rate of "
        text += f"{_point_text(first)} (claimed: at most {first.claimed:.3g})"
        rest = [f"of {100 * one.fpr:g} %, {_point_text(one)} ({one.claimed:.3g})" for one in others]
        independent = "steps and no early stopping" if self.is_stepped else "scores of a number fixed before"
        return "; ".join([text, *rest, f"the intervals assume independent {independent}"])

    def lines(self, *, brief: bool) -> list[tuple[str, str]]:
        """Return the labeled lines to print; ``brief`` omits the rates if the noise is estimated."""
        found = [("estimate", self.statement)] if self.noise is not None else []
        if (not brief or not found) and self.rates is not None:
            found.append(("rates", self.rates))
        return found

    def __str__(self) -> str:
        return "\n".join([self.statement, *([] if self.rates is None else [f"  {self.rates}"])])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, from which :meth:`from_dict` restores an equal estimate."""
        shape = self.shape
        return {
            "kind": self.kind,
            "statement": self.statement,
            "confidence": self.confidence,
            **{name: _interval_values(getattr(self, name)) for name in _INTERVALS},
            "shape": None
            if shape is None
            else {"skewness": shape.skewness, "kurtosis": shape.kurtosis, "is_normal": shape.is_normal},
            "assumes": self.assumes,
            "is_stepped": self.is_stepped,
            "missing": self.missing,
            "roc": None if self.roc is None else self.roc.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Estimate:
        """Restore an estimate from :meth:`to_dict`; invalid values raise ``InputError``."""
        _validate.mapping("the values of an estimate", values)
        has_roc, has_gap = values.get("roc") is not None, values.get("missing") is not None
        return cls(
            confidence=number(values, "confidence", low=0.5, high=1.0),
            **{name: _interval(values, name) for name in _INTERVALS},
            shape=_shape(values),
            is_stepped=values.get("is_stepped") is True,
            missing=_text(values, "missing") if has_gap else None,
            roc_source=RocBand.from_dict(_section(values, "roc")) if has_roc else None,
        )


@dataclass(frozen=True, eq=False)
class BandSource:
    """What a band is computed from when it is needed: it takes longer than the estimate of the noise."""

    observations: Observations
    tradeoff: TradeOff
    claimed: float
    confidence: float

    def band(self) -> RocBand | None:
        """Return the band; None if there are too few steps."""
        observations = self.observations
        if observations.is_stepped and observations.num_steps < MIN_STEPS:
            return None
        fpr, reached, low, high = attack_band(observations, self.confidence)
        fnr = self.tradeoff.fnr(min(self.claimed, LARGEST), fpr)
        claimed = np.clip(1 - np.nan_to_num(fnr), 0.0, 1.0)
        return RocBand(
            confidence=self.confidence, fpr=fpr, claimed=claimed, reached=reached, low=low, high=high
        )


def _point_text(point: RocPoint) -> str:
    return f"{point.reached:.3g} [{point.low:.3g}, {point.high:.3g}]"


def _inverse(value: float) -> float:
    return 1 / value if value > 0 else math.inf


def _interval_text(interval: Interval, unit: str = "") -> str:
    """Return a number and its interval, or only its lower end if there is no upper one."""
    if math.isinf(interval.high):
        return f"at least {interval.low:.3g}{unit}"
    digits = 3 if interval.high - interval.low > _PRECISE * interval.value else 4
    value, low, high = (f"{one:.{digits}g}" for one in (interval.value, interval.low, interval.high))
    return f"{value}{unit} [{low}, {high}]"


def _interval_values(interval: Interval | None) -> dict[str, Any] | None:
    if interval is None:
        return None
    return {"value": plain(interval.value), "low": plain(interval.low), "high": plain(interval.high)}


def _interval(values: Mapping[str, Any], name: str) -> Interval | None:
    if values.get(name) is None:
        return None
    found = _section(values, name)
    interval = Interval(*(number(found, part) for part in ("value", "low", "high")))
    if not interval.low <= interval.value <= interval.high:
        raise InputError(f"Expected {name} to have its value between low and high.")
    return interval


def _shape(values: Mapping[str, Any]) -> Shape | None:
    if values.get("shape") is None:
        return None
    found = _section(values, "shape")
    skewness, kurtosis = (
        number(found, part, low=-LARGEST, high=LARGEST) for part in ("skewness", "kurtosis")
    )
    return Shape(skewness, kurtosis, found.get("is_normal") is True)


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    if not isinstance(found, Mapping):
        raise InputError(f"Expected {name} to be an object, got {quoted(found)}.")
    return found


def _text(values: Mapping[str, Any], name: str) -> str:
    found = values.get(name)
    if not isinstance(found, str):
        raise InputError(f"Expected {name} to be a string, got {quoted(found)}.")
    return found
