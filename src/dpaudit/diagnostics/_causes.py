"""Likely causes of a failed audit or diagnosis: hints for a developer, not proof.

They are guessed from the amount of noise, the findings and the strength of a canary in the release.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

NO_NOISE = 1e-3  # fraction of the claim below which noise counts as absent
_NO_SIGNAL = 1e-5  # fraction of the clipping norm
_RATIO_TOLERANCE = 0.02  # relative error of a noise ratio that is given without an interval
_SIGNAL_TOLERANCE = 0.1
_WIDE = 1.1  # ratio of the ends of an interval that is wide enough to fit some number of workers
_WORKERS = (*range(2, 13), 16, 20, 24, 32, 48, 64, 128)
_JOINT_CLIP = "is the mean or the sum of the batch clipped instead of each gradient?"

LOCALIZING = frozenset({"step-noise", "leaf-noise", "coordinate-noise", "repeated-noise"})
"""Findings that locate missing or repeated noise, and so explain a wrong total amount."""
_SHARED = frozenset({"repeated-noise", "leaf-correlation", "shifted-noise", "step-correlation"})
_TAILS = ("missing-tail", "noise-tails", "noise-shape")
# Findings that follow from others: numbers that are used twice are equal, even if that is more certain.
_ALWAYS_FOLLOW = {
    "tied-noise": _SHARED,
    "tied-pairs": _SHARED | {"tied-noise"},
    "common-noise": {"coordinate-noise", "leaf-noise"},
    "sum-norm": {"canary-arrival"},
    "sample-rate": {"duplicate-examples"},  # several batches for one step
    "noise-by-sum": {"canary-arrival"},  # the sum is known only if it is clipped correctly
    "noise-by-canaries": {"canary-arrival"},
    "missing-direction": _SHARED | LOCALIZING | {"low-rank-noise", "balanced-noise", "noise-by-batch"},
    "balanced-noise": LOCALIZING,
    # numbers of several scales together have other tails
    "missing-tail": {"step-noise"},
    "noise-tails": {"step-noise"},
}
# The same, if the others are more certain.
_FOLLOW = {
    "low-rank-noise": _SHARED | {"noise-by-sum"},
    "common-noise": _SHARED | {"noise-by-sum", "low-rank-noise"},
    "step-correlation": {"noise-by-sum", "low-rank-noise"},
    "shifted-noise": {"noise-by-sum", "low-rank-noise"},
    "repeated-noise": {"low-rank-noise"},
    "balanced-noise": _SHARED | {"low-rank-noise", "noise-variance"},
    "constant-norm": _SHARED | {"low-rank-noise", "balanced-noise", *_TAILS},
    "missing-direction": {"noise-variance"},
    "step-noise": {"noise-by-batch", "low-rank-noise"},
    "coordinate-noise": {"low-rank-noise", *_TAILS},
    "missing-tail": _SHARED | {"tied-noise", "noise-by-batch", "noise-by-sum", "low-rank-noise"},
    "noise-tails": _SHARED
    | {"tied-noise", "noise-by-batch", "noise-by-sum", "low-rank-noise", "missing-tail"},
    "noise-shape": _SHARED | {"tied-noise", "noise-by-batch", "noise-by-sum", "low-rank-noise", *_TAILS},
}

_OF_MEAN = _SHARED | {"low-rank-noise", "common-noise", "noise-by-sum"}
_OF_CORRELATION = (
    *("low-rank-noise", "common-noise", "repeated-noise", "balanced-noise", "noise-shape", "shifted-noise"),
    *("noise-by-batch", "noise-by-canaries", "noise-by-sum", "missing-direction", "step-noise"),
)
_SAME_NUMBERS = {"repeated-noise", "tied-noise"}  # a common mean makes steps alike, but no numbers equal
ALSO_ABSENT = "absent canaries score"
"""How the cause of an arrival begins that is not the clipping: something is added to the release."""
CORRELATED_BY_DESIGN = "correlated noise (DP-FTRL, matrix factorization)? A DP-SGD claim does not describe it"
"""The cause if the noise is a causal filter of white noise of the claimed level."""

SAMPLING = frozenset({"sample-rate", "batch-sizes", "participation-counts", "batch-overlap"})
"""Findings about how batches are drawn."""

_CAUSE_OF_FINDING = {
    "canary-arrival": "is the whole gradient of each example clipped by its L2 norm, before the sum?",
    "noise-by-canaries": "is the noise scaled by the gradients of the batch, such as their largest norm?",
    "step-noise": "is a step released without noise, such as one with an empty batch, or a micro-step?",
    "leaf-noise": "is a parameter skipped when noise is added, or scaled separately?",
    "coordinate-noise": "are some coordinates, such as a mask or a sparse update, released without noise?",
    "noise-shape": "is the noise drawn from another distribution, or truncated?",
    "missing-tail": "is the noise truncated, clamped, or a sum of a few uniform numbers?",
    "noise-tails": "is the noise truncated, or drawn from another distribution?",
    "tied-noise": "is the noise drawn in half precision, in fixed point or from a table, or used twice?",
    "tied-pairs": "is the noise computed from few random numbers, such as uniform numbers of few bits in a "
    "Box-Muller transformation, or a pool of numbers that is scaled or permuted?",
    "shifted-noise": "is one stream of random numbers read twice, at different places, or is noise rolled?",
    "low-rank-noise": "is the noise drawn in a smaller space and then projected to all parameters?",
    "common-noise": "do all steps share a part of their noise, or is something else added to the release?",
    "balanced-noise": "is the noise centered, as by subtracting its mean, or stratified, as in a Latin "
    "hypercube or a quasi-random sequence?",
    "constant-norm": "is the noise normalized to a fixed norm, or stratified?",
    "missing-direction": "is the noise projected, so that a direction has none, such as that of the sum or "
    "of an earlier release?",
    "noise-by-batch": "is the standard deviation of the noise computed from the batch?",
    "noise-by-sum": "is a sum or gradient left over from another step, or added again after the noise?",
    "repeated-noise": "is the generator reseeded during training, with a constant or one of a few seeds?",
    "step-correlation": "is noise from earlier steps reused, or is the subtracted sum not the one that was "
    "released?",
    "leaf-correlation": "does every parameter get the same PRNG key or seed?",
    "coordinate-correlation": "is noise of a smaller shape broadcast, is its mean nonzero, or is the "
    "subtracted sum not the one that was released?",
    "sample-rate": "does the sampling rate or the data set size differ from the one in the accounting?",
    "batch-sizes": "are batches of a fixed size accounted for as Poisson sampling?",
    "participation-counts": "are shuffled epochs or weighted draws accounted for as Poisson sampling?",
    "favoured-example": "is an example in the data more than once, or drawn with a larger weight?",
    "batch-overlap": "are shuffled epochs or weighted draws accounted for as Poisson sampling?",
    "repeated-batches": "is the sampler reseeded in every epoch, or is the data never shuffled?",
    "failing-step": "does the step require a fixed number of examples, which sampling does not have?",
    "release-count": "are small, empty or unusual batches skipped?",
    "missing-clipping": "is backward() called on a loss that the private criterion did not compute?",
    "rows-per-example": "does an example become several rows, by augmentation or as padding?",
    "coupled-examples": "is the loss or an input computed from the whole batch, as with class weights, a "
    "weighted mean, a contrastive loss or batch normalization, or are examples selected by comparison?",
    "batch-dependent-noise": "is the noise scaled by the batch size or by norms of its gradients, or is a "
    "gradient added with it?",
    "divisor": "is the sum divided by the number of examples in the batch instead of the expected number?",
    "sensitivity": "is a gradient not clipped, clipped in another norm, added to the sum several times, or "
    "selected by comparison with others?",
    "gradient-after-noise": "is a gradient, such as one of an auxiliary loss, added after the noise?",
    "hyperparameters": "is a setting such as the learning rate computed from the loss, the gradients or "
    "the number of examples?",
    "optimizer-state": "are moments computed from gradients without noise?",
    "buffers": "does the model keep statistics of its inputs, such as running means?",
    "weights": "are weights updated outside of the private optimizer, such as by a second one?",
    "other-state": "does another optimizer, average or counter use the examples or gradients without noise?",
    "next-release": "is a sum, a statistic or a queue of examples carried over to the next batch?",
    "non-finite-example": "is a non-finite gradient multiplied by its clipping factor instead of removed?",
    "noise-multiplier": "was the noise multiplier changed after the accounting, by a scheduler or by hand?",
    "clipping-norm": "was max_grad_norm changed in the optimizer or in the model, but not in both?",
    "loader-rate": "was the loader replaced after make_private, or its sampler changed?",
    "batch-sampler": "was make_private called with poisson_sampling=False, or its loader not used?",
    "repeated-entries": "is a class oversampled by listing its examples several times?",
    "accountant-steps": "was the accountant's step hook replaced by another hook?",
    "accountant-noise": "does a scheduler change the noise without the accountant's knowledge?",
    "mixing-module": "should the layer be replaced, as by ModuleValidator.fix, or keep no averages?",
    "public-parameters": "was only a part of the optimizers passed to make_private?",
    "private-criterion": "is the original loss used instead of the one that make_private returned?",
    "loss-reduction": "should the loss be the plain mean, as loss_reduction states?",
    "noise-seed": "was noise_generator seeded to make experiments reproducible?",
    "duplicate-examples": "are examples drawn with replacement, or several batches for one step?",
    "rows-drawn": "does the loop bypass the private loss, or clip several rows per example, padding, or a "
    "batch again?",
    "sum-norm": "are rows added to the sum that are not clipped, or clipped to another norm?",
    "sum-rebuilt": "is the sum of an earlier step kept, or is something added to the sum after clipping?",
}


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
        known = {**_CAUSE_OF_FINDING, **own_causes}
        causes += [known[name] for name in _root_findings(names) if name in known]
    if noise_ratio is not None and (is_silent or not LOCALIZING.intersection(names)):
        low, high = interval or (noise_ratio * (1 - _RATIO_TOLERANCE), noise_ratio * (1 + _RATIO_TOLERANCE))
        own = _own_ratios(batch_size, noise_multiplier, max_grad_norm)
        causes += _noise_causes(noise_ratio, low, high, own)
    return tuple(dict.fromkeys(causes))  # each once


def _without_consequences(names: list[str], own_causes: Mapping[str, str]) -> list[str]:
    """Return the findings without those that follow from a cause that a test found itself."""
    left_out = set[str]()
    if own_causes.get("canary-arrival", "").startswith(ALSO_ABSENT) and "noise-by-sum" in names:
        left_out.add("canary-arrival")
        if "tied-noise" not in names:  # what is added makes steps alike, but no numbers equal
            left_out.add("repeated-noise")
    if "coordinate-correlation" in own_causes:  # a common mean, from which correlations follow
        left_out |= {"coordinate-correlation"} if set(names) >= _SAME_NUMBERS else _OF_MEAN
    if own_causes.get("step-correlation") == CORRELATED_BY_DESIGN:
        left_out |= set(_OF_CORRELATION)
    if "repeated-batches" in own_causes:  # the same batch, not one that overlaps
        left_out |= set(SAMPLING)
    return [name for name in names if name not in left_out]


def _root_findings(names: list[str]) -> list[str]:
    """Return the findings, most certain first, without those that follow from others."""
    return [
        name
        for number, name in enumerate(names)
        if not any(other in _ALWAYS_FOLLOW.get(name, ()) for other in names)
        and not any(other in _FOLLOW.get(name, ()) for other in names[:number])
    ]


def _noise_causes(ratio: float, low: float, high: float, own: Iterable[tuple[float, str]]) -> list[str]:
    if low <= 1 <= high:
        return []
    text = f"the noise is {ratio:.3g} of the claimed level"
    is_wide = high > _WIDE * low
    # an interval from many observations is narrow, and the numbers of a training run are rounded
    low, high = min(low, ratio * (1 - _RATIO_TOLERANCE / 4)), max(high, ratio * (1 + _RATIO_TOLERANCE / 4))
    # a ratio that this run's parameters explain is likelier than a number of workers that happens to fit
    near = _nearest(own, ratio, low, high)
    near += [] if is_wide else _nearest(_common_ratios(), ratio, low, high)[:1]
    if near:
        return [f"{text}, about {why}" for why in near]
    if ratio < NO_NOISE:
        return ["no noise: was the private step called, or are gradients recomputed after noise was added?"]
    return [f"{text}: does the noise multiplier in use differ from the one in the accounting?"]


def _nearest(known: Iterable[tuple[float, str]], ratio: float, low: float, high: float) -> list[str]:
    """Return the explanations of the values inside the interval, nearest first."""
    inside = [(abs(value - ratio), why) for value, why in known if low <= value <= high]
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


def _own_ratios(
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
    known = _own_signal_causes(signal, canary_scale, batch_size)
    return known or (_large_signal_causes(signal) if signal > 1 else _small_signal_causes(signal))


def _own_signal_causes(signal: float, canary_scale: float | None, batch_size: float | None) -> list[str]:
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
    if signal < _NO_SIGNAL:
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
