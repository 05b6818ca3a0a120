"""Likely causes of a failed audit or diagnosis: hints for a developer, not proof.

They are guessed from the amount of noise, the findings and the strength of a canary in the release.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from dpaudit.diagnostics._registry import in_group, kind_of, root_findings

NO_NOISE = 1e-3  # fraction of the claim below which noise counts as absent
_RATIO_TOLERANCE = 0.02  # relative error of a noise ratio that is given without an interval
_SIGNAL_TOLERANCE = 0.1
_WORKERS = (*range(2, 13), 16, 20, 24, 32, 48, 64, 128)
_JOINT_CLIP = "is the mean or the sum of the batch clipped instead of each gradient?"

ALSO_ABSENT = "absent canaries score"
"""How the cause of an arrival begins that is not the clipping: something is added to the release."""
CORRELATED_BY_DESIGN = "correlated noise (DP-FTRL, matrix factorization)? A DP-SGD claim does not describe it"
"""The cause if the noise is a causal filter of white noise of the claimed level."""


def likely_causes(
    noise_ratio: float | None = None,
    *,
    interval: tuple[float, float] | None = None,
    signal: float | None = None,
    spread_signal: float | None = None,
    is_crowded: bool = False,
    canary_scale: float | None = None,
    batch_size: float | None = None,
    noise_multiplier: float | None = None,
    max_grad_norm: float | None = None,
    findings: Iterable[str] = (),
    own_causes: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Return likely causes, best first: hints for a developer, not part of any proof.

    ``noise_ratio`` is the noise divided by the claimed noise, and ``interval`` its confidence interval.
    ``signal`` is the difference between the scores of present and absent canaries: 1 if canaries are clipped,
    ``canary_scale`` if not. ``spread_signal`` is the same for canaries that are spread over many coordinates,
    if ``signal`` is not. ``is_crowded`` means that the signal depends on the number of canaries present.
    ``findings`` are names of findings, and ``own_causes`` the causes that tests found themselves, by name; if
    a finding locates missing or repeated noise, no cause is derived from the ratio.

    >>> print(*likely_causes(0.7071))
    the noise is 0.707 of the claimed level, about 1/sqrt(2): is it added by each of 2 workers, then averaged?
    """
    own_causes = dict(own_causes or {})
    names, causes = _without_consequences(list(findings), own_causes), list[str]()
    if own_causes.get("step-correlation") == CORRELATED_BY_DESIGN:  # or by accident: both are named
        causes.append(own_causes.pop("step-correlation"))
    if signal is not None:
        causes += _signal_causes(signal, spread_signal, is_crowded, canary_scale, batch_size)
    is_silent = noise_ratio is not None and noise_ratio < NO_NOISE
    if not is_silent:  # without noise, findings about the noise add nothing
        causes += [own_causes.get(name, kind_of(name).question) for name in root_findings(names)]
    if noise_ratio is not None and (is_silent or not in_group(names, "located")):
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
    text = f"the noise is {ratio:.3g} of the claimed level"
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
    for workers in _WORKERS:
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
    signal: float,
    spread: float | None,
    is_crowded: bool,
    canary_scale: float | None,
    batch_size: float | None,
) -> list[str]:
    """Return causes for a canary whose norm in the release is not the clipping norm."""
    if spread is not None and _near(signal, 1) and spread > 1 + _SIGNAL_TOLERANCE:
        return [
            "a canary on one coordinate is clipped, but one spread over many reaches the release at "
            f"{spread:.3g} times the clipping norm: is each coordinate or parameter clipped separately?"
        ]
    if _near(signal, 1):
        return []
    if is_crowded:
        return [f"the strength of a canary depends on the number of others in the batch: {_JOINT_CLIP}"]
    matching = _matching_signal_causes(signal, canary_scale, batch_size)
    return matching or (_large_signal_causes(signal) if signal > 1 else _small_signal_causes(signal))


def _matching_signal_causes(signal: float, canary_scale: float | None, batch_size: float | None) -> list[str]:
    """Return causes that the parameters of this audit explain."""
    causes = []
    if canary_scale and canary_scale > 1 and _near(signal, canary_scale):
        causes.append("the canary reaches the release unclipped: is each gradient clipped before the sum?")
    if batch_size and batch_size > 1 and _near(signal, batch_size):
        causes.append("the canary is multiplied by batch_size: is the sum released instead of the mean?")
    if batch_size and canary_scale and _near(signal, canary_scale / batch_size):
        causes.append(
            f"the canary reaches the release unclipped and divided by the batch size: {_JOINT_CLIP}"
        )
    return causes


def _large_signal_causes(signal: float) -> list[str]:
    strength = f"the canary reaches the release at {signal:.3g} times the clipping norm"
    return [f"{strength}: is another norm used for clipping?", f"{strength}: {_JOINT_CLIP}"]


def _small_signal_causes(signal: float) -> list[str]:
    """Return causes of a signal that is too small: not a leak, but it may hide one."""
    no_signal = 1e-5  # fraction of the clipping norm
    if signal < no_signal:
        return ["the canary does not reach the release: are examples dropped, or is another batch released?"]
    strength = f"the canary reaches the release at {signal:.3g} times the clipping norm"
    if signal <= 0.5:
        return [
            f"{strength}, which is 1/{1 / signal:.3g}: if a mean is released, pass batch_size=...",
            f"{strength}: {_JOINT_CLIP}",
        ]
    return []


def _near(value: float, other: float) -> bool:
    return abs(value / other - 1) < _SIGNAL_TOLERANCE
