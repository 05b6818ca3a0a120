"""Estimates beside the bound: the effective noise, its epsilon, and the attack's ROC, with intervals.

A bound says what is refuted, whatever the scores look like. An estimate says how much noise there is, if the
scores are normal, with an interval on both sides. No verdict rests on one. Where canaries share steps, only
steps are taken as independent: variances are those of sums over steps, with quantiles of Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
from scipy import special

from dpaudit import _validate
from dpaudit._types import FloatArray, IntArray, ScoreArray
from dpaudit.stats._bound import LARGEST, number, plain, restoring, text
from dpaudit.stats._observations import Observations, chunks
from dpaudit.stats._roc_band import COLUMNS, RATES, RocBand, attack_roc
from dpaudit.stats.tradeoffs import Gaussian, TradeOff

_MIN_STEPS = 10  # from which intervals are computed if canaries share steps
_MOST_GROUPS = 1 << 10  # of consecutive steps, whose sums are in memory
# If the scores of a step share one draw, the error of the deviation follows from squares of few draws, which
# have heavy tails. With a fifth of the degrees of freedom, intervals missed in at most 5.4 % of 4,000 runs.
_HEAVY = 5
_PIECE = 1 << 15  # scores whose powers fit into the second-level cache
_INTERVALS = "noise_multiplier", "noise_ratio", "epsilon"
# Notes on scores that are not normalized: the material difference, and how unlikely it must be by chance.
_MATERIAL, _STANDARD_ERRORS, _NOTE_RATE = 0.1, 6.0, 1e-7
_NO_SCORES = "The scores are not part of this result."


@dataclass(frozen=True)
class Interval:
    """A number that was estimated, with the two ends of its interval."""

    value: float
    low: float
    high: float

    def mapped(self, function: Callable[[float], float]) -> Interval:
        """Return the interval of a monotone function of the number."""
        ends = sorted((function(self.low), function(self.high)))
        return Interval(function(self.value), *ends)

    def text(self, unit: str = "") -> str:
        """Return number and interval in words, or only the lower end if there is no upper one."""
        if math.isinf(self.high):
            return f"at least {self.low:.3g}{unit}"
        digits = 3 if self.high - self.low > 0.01 * self.value else 4
        return f"{self.value:.{digits}g}{unit} [{self.low:.{digits}g}, {self.high:.{digits}g}]"


@dataclass(frozen=True)
class Shape:
    """Skewness and excess kurtosis of the scores around the mean of their side; both are 0 if normal."""

    skewness: float
    kurtosis: float
    is_normal: bool


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The effective noise of the attack's scores, and its ROC; an estimate, never the basis of a verdict.

    ``noise_multiplier`` is the pooled standard deviation of the scores over the difference of their means
    with and without the canary, so it is in units of the sensitivity; ``noise_ratio`` is its ratio to the
    claim; ``epsilon`` is the claim's epsilon with this noise. Each has a two-sided interval with the
    confidence of the audit, *if the scores are normal* and, where canaries share steps, the steps are
    independent. Without a clear difference of the means, the upper end of the noise is infinite. The three
    are None if they cannot be estimated or the scores do not look normal: ``missing`` then says why.

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
    roc_source: Callable[[], RocBand] | RocBand | None = field(default=None, repr=False, compare=False)

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
        sums = ScoreSums.of(observations)
        roc = partial(
            attack_roc,
            list(step_sides(observations)),
            center=sums.center,
            deviation=sums.deviation,
            fnr=partial(tradeoff.fnr, min(claimed, LARGEST)),
            confidence=confidence,
        )
        source = None if sums.has_few_steps else roc
        estimate = partial(cls, confidence=confidence, is_stepped=sums.is_stepped, roc_source=source)
        missing = (
            sums.missing
            if isinstance(tradeoff, Gaussian)
            else "The effective noise is estimated only for observations of Gaussian noise."
        )
        if missing is not None:
            return estimate(missing=missing)
        shape = sums.shape()
        if not shape.is_normal:
            moments = f"skewness {shape.skewness:.2g}, excess kurtosis {shape.kurtosis:.2g}"
            missing = f"The noise is not estimated, as the scores do not look normal ({moments})."
            return estimate(shape=shape, missing=missing)
        separation = sums.separation(confidence).mapped(lambda mu: max(mu, 0.0))
        noise = separation.mapped(lambda mu: 1 / mu if mu > 0 else math.inf)
        return estimate(
            noise_multiplier=noise,
            noise_ratio=noise.mapped(lambda sigma: sigma * claimed) if 0 < claimed < math.inf else None,
            epsilon=separation.mapped(epsilon),
            shape=shape,
        )

    @cached_property
    def roc(self) -> RocBand | None:
        """The attack's ROC with intervals, which takes longer than the noise; None for few steps."""
        return self.roc_source() if callable(self.roc_source) else self.roc_source

    @property
    def noise(self) -> str | None:
        """The effective noise in words, such as "effective noise 0.71 of the claim [0.69, 0.73]"."""
        if self.noise_ratio is not None:
            return f"effective noise {self.noise_ratio.text(' of the claim')}"
        if self.noise_multiplier is not None:
            return f"effective noise multiplier {self.noise_multiplier.text()}"
        return None

    @property
    def assumes(self) -> str:
        """What the intervals of noise and epsilon assume."""
        if self.is_stepped:
            return "normal scores, independent steps and no early stopping"
        return "independent, normally distributed scores and a sample size fixed in advance"

    @property
    def statement(self) -> str:
        """The estimates of noise and epsilon in one sentence, or why there are none."""
        if self.noise is None or self.epsilon is None:
            return self.missing or _NO_SCORES
        estimates = f"{self.noise}, epsilon {self.epsilon.text()}"
        return f"{estimates}: an estimate for this attack, not a bound, that assumes {self.assumes}"

    @property
    def rates(self) -> str | None:
        """The true positive rates at three false positive rates, in one sentence; None without a ROC."""
        if self.roc is None:
            return None
        places = np.searchsorted(self.roc.fpr, RATES)
        rows = np.stack([getattr(self.roc, name)[places] for name in COLUMNS], axis=1).tolist()
        texts = [
            f"of {100 * fpr:g} %, {reached:.3g} [{low:.3g}, {high:.3g}] (claimed: at most {claimed:.3g})"
            for fpr, claimed, reached, low, high in rows
        ]
        level, units = _validate.percent(self.roc.confidence), "steps" if self.is_stepped else "scores"
        texts.append(f"each interval has {level} confidence, if {units} are independent")
        return f"true positive rate of this attack at a false positive rate {'; '.join(texts)}"

    def lines(self, *, brief: bool) -> list[tuple[str, str]]:
        """Return the labeled lines to print; ``brief`` omits the rates if the noise is estimated."""
        lines = [("estimate", self.statement)] if self.noise is not None else []
        if (not brief or not lines) and self.rates is not None:
            lines.append(("rates", self.rates))
        return lines

    def __str__(self) -> str:
        return "\n".join([self.statement, *([] if self.rates is None else [f"  {self.rates}"])])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, from which :meth:`from_dict` restores an equal estimate."""
        numbers = {name: getattr(self, name) for name in (*_INTERVALS, "shape")}
        return {
            "kind": self.kind,
            "statement": self.statement,
            "confidence": self.confidence,
            **{
                name: None if fields is None else {key: plain(value) for key, value in vars(fields).items()}
                for name, fields in numbers.items()
            },
            "assumes": self.assumes,
            "is_stepped": self.is_stepped,
            "missing": self.missing,
            "roc": None if self.roc is None else self.roc.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Estimate:
        """Restore an estimate from :meth:`to_dict`; invalid values raise ``InputError``."""
        with restoring("an estimate", values):
            shape, roc, missing = values["shape"], values["roc"], values["missing"]
            return cls(
                confidence=number(values, "confidence", low=0.5, high=1.0),
                **{name: None if values[name] is None else _interval(values[name]) for name in _INTERVALS},
                shape=None if shape is None else _shape(shape),
                is_stepped=values.get("is_stepped") is True,
                missing=None if missing is None else text(missing),
                roc_source=None if roc is None else RocBand.from_dict(roc),
            )


def _interval(values: Mapping[str, Any]) -> Interval:
    interval = Interval(*(number(values, end) for end in ("value", "low", "high")))
    if not interval.low <= interval.value <= interval.high:
        raise ValueError("an interval without its value")
    return interval


def _shape(values: Mapping[str, Any]) -> Shape:
    skewness, kurtosis = (number(values, name, low=-LARGEST) for name in ("skewness", "kurtosis"))
    return Shape(skewness, kurtosis, values["is_normal"] is True)


@dataclass(frozen=True, eq=False)
class ScoreSums:
    """What an estimate of the noise needs to know of the scores: sums over groups of consecutive steps.

    ``powers`` are the sums of the powers 0 to 4 of the scores around the mean of their side, and ``gaps`` the
    terms of each group in the difference of the means. Without steps, all scores of a side are one group.
    """

    center: float  # the mean of absent scores
    difference: float  # of the mean of present scores to it
    deviation: float  # pooled
    sizes: tuple[float, float]
    gaps: FloatArray
    powers: FloatArray
    is_stepped: bool

    @classmethod
    def of(cls, observations: Observations) -> ScoreSums:
        """Read the scores once, in chunks."""
        with np.errstate(over="ignore", invalid="ignore"):  # checked by ``missing``
            (center, absent), (mean, present) = (_power_sums(*side) for side in step_sides(observations))
            sizes, powers = (float(absent[0].sum()), float(present[0].sum())), absent + present
            gaps = present[1] / sizes[1] - absent[1] / sizes[0]
            deviation = math.sqrt(max(float(powers[2].sum()), 0.0) / max(sum(sizes) - 2, 1.0))
            return cls(center, mean - center, deviation, sizes, gaps, powers, observations.is_stepped)

    @property
    def has_few_steps(self) -> bool:
        """Whether canaries share steps that are too few to show how scores vary over steps."""
        return self.is_stepped and self.gaps.size < _MIN_STEPS

    @property
    def missing(self) -> str | None:
        """The reason why there is no interval, as a sentence; None if there is one."""
        if min(self.sizes) < 2:
            return "An estimate of the noise needs at least 2 scores on each side."
        if self.has_few_steps:
            return (
                "Canaries share steps, so scores may depend on each other: an estimate of the noise needs at "
                f"least {_MIN_STEPS} steps, got {self.gaps.size}."
            )
        # a smaller deviation is rounding error
        has_spread = self.deviation > 1e-9 * abs(self.difference)
        if not (has_spread and 0 < float(self.powers[4].sum()) < math.inf):
            return "The scores do not spread like noise: they are all alike, or too large or small."
        return None

    def separation(self, confidence: float) -> Interval:
        """Return mu, the mean difference over the standard deviation, with its two-sided interval.

        By the delta method, its variance is signal - 2 mu cross + mu^2 scale, from the variances of the
        difference, in units of the deviation, and of ln(deviation), and their covariance. asinh makes it
        constant: on its scale, the ends are a quantile of standard errors away.
        """
        ratio, level = self.difference / self.deviation, (1 + confidence) / 2
        size, degrees = sum(self.sizes), sum(self.sizes) - 2
        signal, cross, scale = size / math.prod(self.sizes), 0.0, 0.5 / degrees
        quantile = float(special.stdtrit(degrees, level))
        if self.is_stepped:
            steps = self.gaps.size
            quantile, heavy = (float(special.stdtrit((steps - 1) / k, level)) for k in (1, _HEAVY))
            logs = (self.powers[2] / self.deviation**2 / degrees - self.powers[0] / size) / 2
            varied = steps * np.cov(self.gaps / self.deviation, logs)
            signal, cross = max(signal, float(varied[0, 0])), float(varied[0, 1])
            scale = max(scale, float(varied[1, 1]) * (heavy / quantile) ** 2)
        # the hyperbolic sine of 300 is finite
        reach, shift = min(quantile * math.sqrt(scale), 300.0), cross / scale
        error = math.sqrt(max(signal - 2 * cross * ratio + scale * ratio**2, 0.0) / scale)
        middle, half = shift + (ratio - shift) * math.cosh(reach), error * math.sinh(reach)
        return Interval(ratio, middle - half, middle + half)

    def shape(self) -> Shape:
        """Return the shape of the scores, and whether it differs from normal by more than its error."""
        size, deviation = sum(self.sizes), self.deviation
        counts, first, second, third, fourth = (row / deviation**k for k, row in enumerate(self.powers))
        skewness, kurtosis = float(third.sum()) / size, float(fourth.sum()) / size - 3
        # Hermite polynomials: the first-order effect of a normal score on skewness and kurtosis
        effects = (skewness, third - 3 * first, 6), (kurtosis, fourth - 6 * second + 3 * counts, 24)
        is_normal = True
        for moment, effect, variance in effects:
            squares = max(variance * size, float(effect @ effect) if self.is_stepped else 0.0)
            # moments that change intervals by less than 3 %, or that randomness explains once in a thousand
            is_normal &= abs(moment) <= max(0.1, 3.3 * math.sqrt(squares) / size)
        return Shape(skewness, kurtosis, is_normal)


def step_sides(observations: Observations) -> Iterator[tuple[ScoreArray, IntArray]]:
    """Yield absent and present scores, each with the flat positions at which its groups of steps end."""
    for name in ("without_canary", "with_canary"):
        scores, steps = getattr(observations, name), getattr(observations.steps, name, None)
        if steps is not None:
            ends = np.searchsorted(steps, np.arange(observations.num_steps), side="right")
        else:
            width = scores.shape[1] if scores.ndim == 2 else scores.size
            ends = np.arange(width, scores.size + 1, width)
        yield scores, ends[:: -math.ceil(ends.size / _MOST_GROUPS)][::-1]


def _power_sums(scores: ScoreArray, ends: IntArray, highest: int = 4) -> tuple[float, FloatArray]:
    """Return the mean of one side, and the sums of powers up to ``highest`` around it in each group."""
    counts = np.diff(ends, prepend=0)
    filled = np.flatnonzero(counts)
    starts = ends[filled] - counts[filled]
    center, sums = 0.0, np.stack([counts, *np.zeros((highest, counts.size))])
    for position, chunk in chunks(scores):
        for start in range(position, position + chunk.size, _PIECE):
            piece = chunk[start - position : start - position + _PIECE]
            center = center if start else float(np.mean(piece, dtype=np.float64))
            first = int(np.searchsorted(starts, start, side="right")) - 1
            last = int(np.searchsorted(starts, start + piece.size))
            cuts = np.maximum(starts[first:last] - start, 0)
            distance = np.subtract(piece, center, dtype=np.float64)
            power = distance.copy()
            for row in sums[1:]:
                row[filled[first:last]] += np.add.reduceat(power, cuts)
                power *= distance
    shift = sums[1].sum() / scores.size  # from the center to the mean
    rows = [
        sum(math.comb(k, j) * (-shift) ** (k - j) * sums[j] for j in range(k + 1)) for k in range(highest + 1)
    ]
    return center + float(shift), np.stack(rows)


def scale_notes(observations: Observations, expected: float = 1.0) -> tuple[str, ...]:
    """Return a sentence if scores declared as normalized certainly have other means than 0 and ``expected``.

    Correct scores get one with a probability below 1e-6. Steps are clusters: their scores may be dependent.
    """
    if not observations.normalized:
        return ()
    with np.errstate(over="ignore", invalid="ignore"):  # of scores at the end of the range of floats
        (absent, absent_error), (present, present_error) = (
            _mean_and_error(*side, is_stepped=observations.is_stepped) for side in step_sides(observations)
        )
    is_off = abs(absent) > max(_MATERIAL * expected, absent_error)
    if not is_off and not abs(present - expected) > max(_MATERIAL * expected, present_error):
        return ()
    cause = _likely_cause(present - absent, max(absent_error, present_error), expected)
    return (
        f"Normalized scores have a mean of 0 without the canary and of {expected:.3g} with it, but these "
        f"have {absent:.3g} and {present:.3g}: {cause}.",
    )


def _likely_cause(gap: float, error: float, expected: float) -> str:
    if abs(gap - expected) <= _MATERIAL * expected:
        return "subtract what the release contains without the canary"
    if gap <= error:
        return "check that canaries reach the release, and that a higher score means present"
    factor = f"a missing factor of {expected / gap:.3g}"
    if gap > expected:
        return f"check whether canaries are clipped to the claimed norm, or for {factor} in the scores"
    return f"check for {factor} in the scores, such as the batch size"


def _mean_and_error(scores: ScoreArray, ends: IntArray, *, is_stepped: bool) -> tuple[float, float]:
    """Return the mean, and by how much it may differ from its expectation; infinity for few scores."""
    mean, (sizes, sums, squares) = _power_sums(scores, ends, highest=2)
    number = int(np.count_nonzero(sizes)) if is_stepped else scores.size
    total = float((sums**2).sum() if is_stepped else squares.sum())
    if number < 10 or not math.isfinite(total):
        return mean, math.inf
    deviations = max(_STANDARD_ERRORS, -float(special.stdtrit(number - 1, _NOTE_RATE)))
    return mean, deviations * math.sqrt(total * number / (number - 1)) / scores.size
