"""All tests of one training run with a joint error rate, which a bound on the same run may share.

``Diagnostics`` collects data during training. Its ``diagnose()`` returns a ``Diagnosis``: the tests that
were run, and the findings that remain after Holm's correction. Likely causes are hints for a developer, not
proof: they are guessed from the amount of noise, the findings and the strength of a canary in the release.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dpaudit import _validate
from dpaudit._types import ArrayLike, FloatArray
from dpaudit.diagnostics._findings import FINDINGS, FindingKind
from dpaudit.diagnostics._p_values import SMALLEST_P_VALUE, Amount, Check, CheckResults, Finding
from dpaudit.errors import FindingError

_MOST_CAUSES = 4  # more of them do not help

NO_NOISE = 1e-3  # fraction of the claim below which noise counts as absent
_RATIO_TOLERANCE = 0.02  # relative error of a noise ratio that is given without an interval
_SIGNAL_TOLERANCE = 0.1
_JOINT_CLIP = "is the mean or the sum of the batch clipped instead of each gradient?"

ALSO_ABSENT = "absent canaries score"
"""How the cause of an arrival begins that is not the clipping: something is added to the release."""
CORRELATED_BY_DESIGN = "correlated noise (DP-FTRL, matrix factorization)? A DP-SGD claim does not describe it"
"""The cause if the noise is a causal filter of white noise of the claimed level."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All tests that were run, and their findings.

    A correct training run, with independent normal noise and Poisson sampling as claimed, has any finding
    with probability at most 1 - confidence. A finding concerns the code, not epsilon: the accounting does not
    describe the mechanism that ran. ``notes`` list unusual results that are not leaks.
    """

    confidence: float
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]
    to_check: tuple[Finding, ...] = ()
    """Facts that a correct training run may have; no verdict rests on them."""
    notes: tuple[str, ...] = ()
    noise: Amount | None = None
    """The amount of noise; None if no noise was observed."""
    not_covered: tuple[str, ...] = ()
    """Sentences that name what could not be checked, and why."""
    assumptions: tuple[str, ...] = ()
    """What the tests rest on besides the claim, and cannot check."""

    @classmethod
    def of(
        cls, checks: Sequence[Check], *, confidence: float, certain: Sequence[Finding] = (), **fields: Any
    ) -> Diagnosis:
        """Return the diagnosis of these tests, with Holm's correction, and of findings that need no test."""
        adjusted = holm([check.p_value for check in checks])
        findings = [
            Finding(adjusted=float(level), **vars(check))
            for check, level in zip(checks, adjusted, strict=True)
            if level <= 1 - confidence
        ]
        ordered = (*certain, *sorted(findings, key=_by_certainty))
        return cls(confidence=confidence, checks=tuple(checks), findings=ordered, **fields)

    def joined(self, *others: CheckResults) -> Diagnosis:
        """Return the diagnosis with more checks of the same run, at the same joint confidence."""
        tested = {check.name for check in self.checks}
        certain = [finding for finding in self.findings if finding.name not in tested]

        def collect(name: str) -> tuple[Any, ...]:
            return tuple(item for results in (self, *others) for item in getattr(results, name))

        return Diagnosis.of(
            collect("checks"),
            confidence=self.confidence,
            certain=[*certain, *(finding for other in others for finding in other.certain)],
            noise=next((other.noise for other in others if other.noise is not None), self.noise),
            **{name: collect(name) for name in ("to_check", "notes", "not_covered", "assumptions")},
        )

    def likely_causes(self, **clues: Any) -> tuple[str, ...]:
        """Return likely causes of the findings; keywords are as in :func:`likely_causes`."""
        names = [finding.name for finding in self.findings]
        causes = {finding.name: finding.cause for finding in self.findings if finding.cause}
        mean = next((finding for finding in self.findings if finding.name == "coordinate-correlation"), None)
        if mean is not None and mean.p_value > SMALLEST_P_VALUE > self.findings[0].p_value:
            causes.pop(mean.name, None)  # less certain than what may have caused it
        if self.noise is not None and "noise-variance" in names and "noise-variance" not in causes:
            clues = {"noise_ratio": self.noise.ratio, "interval": (self.noise.low, self.noise.high), **clues}
        return likely_causes(findings=names, own_causes=causes, **clues)

    @property
    def tests_sampling(self) -> bool:
        """Whether any of the tests is about how batches are drawn."""
        return _in_group((check.name for check in self.checks), "sampling")

    def raise_for_findings(self) -> None:
        """Raise :class:`dpaudit.FindingError` if there are findings."""
        if self.findings:
            raise FindingError(str(self))

    def __str__(self) -> str:
        lines = [findings_sentence(self), *(f"  {finding}" for finding in self.findings)]
        if len(self.findings) > 1:
            lines.append("  The first finding is the most certain; the others may follow from it.")
        lines += [f"  possible cause: {cause}" for cause in self.likely_causes()]
        lines += [f"  to check: {finding}" for finding in self.to_check]
        lines += [f"  assumes: {text}" for text in self.assumptions]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    def table(self) -> str:
        """Return a table of all tests and their p-values, one per line."""
        failed = {finding.name for finding in self.findings}
        width = max((len(check.name) for check in self.checks), default=0)
        lines = [
            f"{check.name:<{width}}  {check.p_value:8.2g}  {'FOUND' if check.name in failed else ''}".rstrip()
            for check in self.checks
        ]
        return "\n".join(lines)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Diagnosis:
        """Restore tests and findings; a test without a finding has no stored sentence."""

        def tested(row: Mapping[str, Any]) -> dict[str, Any]:
            estimate = math.nan if row.get("estimate") is None else float(row["estimate"])
            return {"name": str(row["name"]), "p_value": float(row["p_value"]), "estimate": estimate}

        def finding(row: Mapping[str, Any]) -> Finding:
            return Finding(adjusted=float(row["adjusted"]), sentence=str(row["sentence"]), **tested(row))

        return cls(
            confidence=float(values["confidence"]),
            checks=tuple(Check(sentence="", **tested(row)) for row in values["tests"]),
            findings=tuple(map(finding, values["findings"])),
            to_check=tuple(map(finding, values.get("to_check", ()))),
            notes=tuple(map(str, values.get("notes", ()))),
            assumptions=tuple(map(str, values.get("assumptions", ()))),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        noise = self.noise
        return {
            "confidence": self.confidence,
            "findings": list(map(_plain, self.findings)),
            "to_check": list(map(_plain, self.to_check)),
            "tests": [
                {"name": check.name, "p_value": check.p_value, "estimate": _finite(check.estimate)}
                for check in self.checks
            ],
            "notes": list(self.notes),
            "not_covered": list(self.not_covered),
            "assumptions": list(self.assumptions),
            "likely_causes": list(self.likely_causes()),
            "noise": None if noise is None else dict(vars(noise)),
        }


def _plain(finding: Finding) -> dict[str, Any]:
    return {**vars(finding), "estimate": _finite(finding.estimate)}


def _finite(estimate: float) -> float | None:
    """Return the estimate for JSON, which has no number for a finding without one."""
    return estimate if math.isfinite(estimate) else None


def findings_sentence(diagnosis: Diagnosis) -> str:
    """Return the numbers of findings and of tests, with their joint confidence."""
    findings, tests = len(diagnosis.findings), len(diagnosis.checks)
    count = f"{findings or 'No'} {'finding' if findings == 1 else 'findings'}"
    run = f"{tests} {'test' if tests == 1 else 'tests'}"
    return f"{count} in {run}, at {_validate.percent(diagnosis.confidence)} joint confidence."


def joint_causes(diagnosis: Diagnosis | None, clues: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a few likely causes, best first, from the findings and from ``clues`` of the scores.

    ``clues`` are keywords of :func:`likely_causes`. The total amount of noise adds nothing once it is known
    where noise is missing, and scores show the noise of some coordinates only.
    """
    if diagnosis is None:
        return likely_causes(**clues)[:_MOST_CAUSES]
    names = [finding.name for finding in diagnosis.findings]
    amount = next((finding for finding in diagnosis.findings if finding.name == "noise-variance"), None)
    is_located = _in_group(names, "located")
    if is_located or (amount is not None and (amount.cause or diagnosis.noise is not None)):
        clues = {name: clue for name, clue in clues.items() if name not in ("noise_ratio", "interval")}
    if is_located:
        located = tuple(finding for finding in diagnosis.findings if finding.name != "noise-variance")
        diagnosis = replace(diagnosis, findings=located)
    return diagnosis.likely_causes(**clues)[:_MOST_CAUSES]


def share_error(error_rate: float, *, has_bound: bool, has_tests: bool) -> tuple[float, float]:
    """Return the confidence of a bound and of the tests, for a joint error rate of at most ``error_rate``.

    This is a union bound, valid under any dependence; a bound or tests alone get the entire error rate.
    """
    share = 0.2  # of the error rate for the tests; the rest is for the bound
    bound, tests = 1 - share if has_tests else 1.0, share if has_bound else 1.0
    return 1 - bound * error_rate, 1 - tests * error_rate


def holm(p_values: ArrayLike) -> FloatArray:
    """Return the smallest level at which each hypothesis would be rejected, under any dependence.

    Holm 1979, "A simple sequentially rejective multiple test procedure".

    >>> holm([0.01, 0.04, 0.03])
    array([0.03, 0.06, 0.06])
    """
    values = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    stepped = values[order] * np.arange(values.size, 0, -1)
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(np.maximum.accumulate(stepped), 1.0)
    return adjusted


def _by_certainty(finding: Finding) -> tuple[float, float, float]:
    """Return the sort key of a finding: most certain first; among the certain, causes before consequences.

    Among parts that lack noise, those with the least noise come first.
    """
    rank, least, size = kind_of(finding.name).rank, 0.0, abs(finding.estimate)
    if finding.name in {"step-noise", "leaf-noise", "coordinate-noise"}:
        rank = kind_of("step-noise").rank
        # by accident, the least noise of a coordinate is below that of its leaf, but not by more
        scatter = 1.5 if finding.name == "coordinate-noise" else 1.0
        least = scatter * max(finding.estimate, NO_NOISE)
    same = 0.95  # correlation above which noise counts as repeated, not merely correlated
    is_merely_correlated = finding.name == "repeated-noise" and size < same
    weak = 0.1  # correlation below which noise of low rank is a likelier cause
    is_weak = finding.name in {"step-correlation", "shifted-noise"} and size < weak
    if is_merely_correlated or is_weak:
        rank = kind_of("low-rank-noise").rank + 0.5
    shared = 16.0  # squared sums over a leaf are never this many times too large because of repeated noise
    if finding.name == "coordinate-correlation" and finding.estimate > shared:
        rank = -1.0
    return max(finding.p_value, SMALLEST_P_VALUE), rank, least


def kind_of(name: str) -> FindingKind:
    """Return the declaration of a finding; an empty one for a name that is not declared."""
    return FINDINGS.get(name, FindingKind(name=name, topic="settings", tests="", matters=""))


def _in_group(names: Iterable[str], group: str) -> bool:
    """Return whether any of these findings belongs to the group."""
    return any(group in kind_of(name).groups for name in names)


def root_findings(names: list[str]) -> Iterator[str]:
    """Yield the findings, given with the most certain first, that do not follow from others."""
    kinds = [kind_of(name) for name in names]
    for number, kind in enumerate(kinds):
        is_consequence = any(other.is_among(kind.follows) for other in kinds) or any(
            other.is_among(kind.may_follow) for other in kinds[:number]
        )
        if not is_consequence:
            yield kind.name


def likely_causes(
    noise_ratio: float | None = None,
    *,
    interval: tuple[float, float] | None = None,
    signal: float | None = None,
    is_crowded: bool = False,
    canary_scale: float | None = None,
    batch_size: float | None = None,
    noise_multiplier: float | None = None,
    max_grad_norm: float | None = None,
    findings: Iterable[str] = (),
    own_causes: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Return likely causes, best first: hints for a developer, not part of any proof.

    Args:
        noise_ratio: The noise divided by the claimed noise.
        interval: The confidence interval of that ratio.
        signal: The difference between the scores of present and absent canaries, 1 if canaries are clipped.
        is_crowded: Whether that difference depends on the number of canaries present.
        canary_scale: The norm of a canary before clipping, in clipping norms.
        batch_size: The expected batch size.
        noise_multiplier: The claimed one.
        max_grad_norm: The clipping norm.
        findings: Names of findings. If one locates missing noise, no cause is derived from the ratio.
        own_causes: The causes that tests have found themselves, by the names of their findings.

    Returns:
        Questions to a developer, each in one sentence.

    >>> print(*likely_causes(0.7071))
    the noise is 71 % of the claimed level, about 1/sqrt(2): is it added by each of 2 workers, then averaged?

    """
    own_causes = dict(own_causes or {})
    names, causes = _without_consequences(list(findings), own_causes), list[str]()
    if own_causes.get("step-correlation") == CORRELATED_BY_DESIGN:  # or by accident: both are named
        causes.append(own_causes.pop("step-correlation"))
    if signal is not None:
        causes += _signal_causes(signal, is_crowded, canary_scale, batch_size)
    is_silent = noise_ratio is not None and noise_ratio < NO_NOISE
    if not is_silent:  # without noise, findings about the noise add nothing
        causes += [own_causes.get(name, kind_of(name).question) for name in root_findings(names)]
    if noise_ratio is not None and (is_silent or not _in_group(names, "located")):
        settings = _ratios_of_settings(batch_size, noise_multiplier, max_grad_norm)
        causes += _noise_causes(noise_ratio, interval, settings)
    return tuple(dict.fromkeys(cause for cause in causes if cause))  # each once


def _without_consequences(names: list[str], own_causes: Mapping[str, str]) -> list[str]:
    """Return the findings without those that follow from a cause that a test found itself."""
    redundant = set[str]()
    if own_causes.get("clipping", "").startswith(ALSO_ABSENT) and "noise-by-sum" in names:
        redundant.add("clipping")
        if "tied-noise" not in names:  # what is added makes steps alike, but no numbers equal
            redundant.add("repeated-noise")
    for name in own_causes:
        # a common mean makes steps alike, but no numbers equal
        has_equal_numbers = {"repeated-noise", "tied-noise"} <= set(names)
        is_mean = name == "coordinate-correlation"
        redundant |= {name} if is_mean and has_equal_numbers else kind_of(name).explains
    return [name for name in names if not kind_of(name).is_among(redundant)]


def _noise_causes(
    ratio: float, interval: tuple[float, float] | None, settings: Iterable[tuple[float, str]]
) -> list[str]:
    low, high = interval or (ratio * (1 - _RATIO_TOLERANCE), ratio * (1 + _RATIO_TOLERANCE))
    if low <= 1 <= high:
        return []
    text = f"the noise is {_validate.percent(ratio, 2)} of the claimed level"
    wide = 1.1  # ratio of the ends of an interval that is wide enough to fit some number of workers
    is_wide = high > wide * low
    # an interval from many observations is narrow, and the numbers of a training run are rounded
    low, high = min(low, ratio * (1 - _RATIO_TOLERANCE / 4)), max(high, ratio * (1 + _RATIO_TOLERANCE / 4))
    # a ratio that this run's parameters explain is likelier than a number of workers that happens to fit
    near = _nearest(settings, ratio, low, high)
    near += [] if is_wide else _nearest(_common_ratios(), ratio, low, high)[:1]
    if near:
        return [f"{text}, about {why}" for why in near]
    if ratio < NO_NOISE:
        return ["no noise: was the private step called, or are gradients recomputed after noise was added?"]
    return [f"{text}: does the noise multiplier in use differ from the one in the accounting?"]


def _nearest(explanations: Iterable[tuple[float, str]], ratio: float, low: float, high: float) -> list[str]:
    """Return the explanations of the values inside the interval, nearest first."""
    inside = [(abs(value - ratio), why) for value, why in explanations if low <= value <= high]
    return [why for _, why in sorted(inside, key=lambda pair: pair[0])]


def _common_ratios() -> Iterator[tuple[float, str]]:
    """Yield the noise ratio that each generic mistake leads to, with its explanation."""
    for workers in (*range(2, 13), 16, 20, 24, 32, 48, 64, 128):
        averaged = f"1/sqrt({workers}): is it added by each of {workers} workers, then averaged?"
        if workers == 4:
            averaged += " Or is the sensitivity halved?"
        yield 1 / math.sqrt(workers), averaged
        yield (
            math.sqrt(workers),
            f"sqrt({workers}): is it added by each of {workers} workers or micro-steps, then summed?",
        )


def _ratios_of_settings(
    batch_size: float | None, noise_multiplier: float | None, max_grad_norm: float | None
) -> Iterator[tuple[float, str]]:
    """Yield the same for mistakes that involve the parameters of this training run."""
    if max_grad_norm and max_grad_norm != 1:
        yield 1 / max_grad_norm, "1/max_grad_norm: is it not scaled by the clipping norm?"
        yield max_grad_norm, "max_grad_norm: is it scaled by the clipping norm twice?"
    if batch_size and batch_size != 1:
        yield 1 / batch_size, "1/batch size: is noise for the mean added to the sum?"
        yield batch_size, "batch size: is noise for the sum added to the mean?"
        yield 1 / math.sqrt(batch_size), "1/sqrt(batch size): is it added to each example, then averaged?"
    if noise_multiplier and noise_multiplier != 1:
        yield 1 / noise_multiplier, "1/noise_multiplier: is it scaled by the clipping norm alone?"
    std = (noise_multiplier or 1.0) * (max_grad_norm or 1.0)
    if std != 1:
        yield 1 / math.sqrt(std), "1/sqrt(std): is the square root of the standard deviation used?"
        yield std, "std: is the variance used as a standard deviation?"


def _signal_causes(
    signal: float, is_crowded: bool, canary_scale: float | None, batch_size: float | None
) -> list[str]:
    """Return causes for a canary whose norm in the release is not the clipping norm.

    A signal that is too small is not a leak, but it may hide one.
    """
    if _near(signal, 1):
        return []
    if is_crowded:
        return [f"the strength of a canary depends on the number of others in the batch: {_JOINT_CLIP}"]
    strength = f"the canary reaches the release at {signal:.3g} times the clipping norm"
    no_signal = 1e-5  # fraction of the clipping norm
    causes = [f"{strength}: is another norm used for clipping?", f"{strength}: {_JOINT_CLIP}"]
    if signal < no_signal:
        causes = [
            "the canary does not reach the release: are examples dropped, or is another batch released?"
        ]
    elif signal <= 0.5:
        mean = f"{strength}, which is 1/{1 / signal:.3g}: if a mean is released, pass batch_size=..."
        causes = [mean, f"{strength}: {_JOINT_CLIP}"]
    elif signal < 1:
        causes = []
    return _matching_signal_causes(signal, canary_scale, batch_size) or causes


def _matching_signal_causes(signal: float, canary_scale: float | None, batch_size: float | None) -> list[str]:
    """Return causes that the parameters of this audit explain."""
    scale, size = canary_scale or math.nan, batch_size or math.nan
    if signal > 1e3 * scale:  # as the mean of canaries of 1.5 to 1e6 clipping norms
        scale = signal
    explained = (
        (
            scale if scale > 1 else math.nan,
            "the canary reaches the release unclipped: is each gradient clipped before the sum?",
        ),
        (
            size if size > 1 else math.nan,
            "the canary is multiplied by batch_size: is the sum released instead of the mean?",
        ),
        (
            scale / size,
            f"the canary reaches the release unclipped and divided by the batch size: {_JOINT_CLIP}",
        ),
    )
    return [cause for value, cause in explained if _near(signal, value)]


def _near(value: float, other: float) -> bool:
    return abs(value / other - 1) < _SIGNAL_TOLERANCE
