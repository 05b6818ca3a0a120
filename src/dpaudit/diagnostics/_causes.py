"""What may have gone wrong, guessed from the numbers that it leaves: hints for a developer, no proof.

Three sources: how much noise there is, which tests have a finding, and how much of a canary arrives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

NO_NOISE = 1e-3  # of the claim; less is called none
_NO_SIGNAL = 1e-5  # of the clipping norm
_RATIO_TOLERANCE = 0.02  # how far a ratio of noise may be off where no interval is given
_SIGNAL_TOLERANCE = 0.1
_WIDE = 1.1  # the ends of an interval that any number of workers would fit into
_WORKERS = (*range(2, 13), 16, 20, 24, 32, 48, 64, 128)
_JOINT_CLIP = "is the mean or the sum of the batch clipped, and not each gradient?"

LOCALIZING = frozenset({"step-noise", "leaf-noise", "coordinate-noise", "repeated-noise"})
"""Findings that say where noise is missing or comes again: its amount in all only follows from that."""

_CAUSE_OF_FINDING = {
    "step-noise": "is a step released without noise, such as one with an empty batch, or a micro-step?",
    "leaf-noise": "is a parameter left out when noise is added, or scaled by itself?",
    "coordinate-noise": "are some coordinates, such as a mask or a sparse update, released without noise?",
    "noise-shape": "is noise of another distribution, or cut off?",
    "repeated-noise": "is the generator seeded anew, from a constant or from few seeds, during the training?",
    "step-correlation": "is noise of earlier steps used again, or is the sum that was taken off not the one "
    "that was released?",
    "leaf-correlation": "does every parameter get the same PRNG key or seed?",
    "coordinate-correlation": "is noise of a smaller shape broadcast, is its mean not zero, or is the sum "
    "that was taken off not the one that was released?",
    "sample-rate": "is the rate, or the size of the data set, not the one that was accounted for?",
    "batch-sizes": "are batches of a fixed size accounted as Poisson sampling?",
    "participation-counts": "are shuffled epochs, or weighted draws, accounted as Poisson sampling?",
    "favoured-example": "is an example more than once in the data, or drawn with a weight of its own?",
    "batch-overlap": "are shuffled epochs, or weighted draws, accounted as Poisson sampling?",
    "repeated-batches": "is the sampler seeded anew in every epoch, or is the data never shuffled?",
    "duplicate-examples": "are examples drawn with replacement?",
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
) -> tuple[str, ...]:
    """Return guesses, the nearest first; hints for a developer, no part of any proof.

    ``noise_ratio`` is the noise over the claim, in ``interval``; ``signal`` is how much more a present canary
    scores, 1 if it was clipped, ``canary_scale`` if not, and ``spread_signal`` the same of canaries that are
    spread over many coordinates, if the others are not. ``is_crowded`` says that it depends on how many are
    present. ``findings`` are names of findings: if one of them says where noise is missing, or that it comes
    again, the ratio is no cause of its own.

    >>> likely_causes(0.7071)
    ('effective noise is 0.707 of the claim = 1/sqrt(2): added by each of 2 workers, then averaged?',)
    """
    names, causes = list(findings), list[str]()
    if signal is not None:
        causes += _signal_causes(signal, spread_signal, is_crowded, canary_scale, batch_size)
    is_silent = noise_ratio is not None and noise_ratio < NO_NOISE
    if not is_silent:  # where there is no noise, there is nothing else to say of it
        causes += [_CAUSE_OF_FINDING[name] for name in names if name in _CAUSE_OF_FINDING]
    if noise_ratio is not None and (is_silent or not LOCALIZING.intersection(names)):
        low, high = interval or (noise_ratio * (1 - _RATIO_TOLERANCE), noise_ratio * (1 + _RATIO_TOLERANCE))
        own = _own_ratios(batch_size, noise_multiplier, max_grad_norm)
        causes += _noise_causes(noise_ratio, low, high, own)
    return tuple(dict.fromkeys(causes))  # each once


def _noise_causes(ratio: float, low: float, high: float, own: Iterable[tuple[float, str]]) -> list[str]:
    if low <= 1 <= high:
        return []
    text = f"effective noise is {ratio:.3g} of the claim"
    is_wide = high > _WIDE * low
    # an interval of many observations is narrow, and a training's own numbers are rounded
    low, high = min(low, ratio * (1 - _RATIO_TOLERANCE / 4)), max(high, ratio * (1 + _RATIO_TOLERANCE / 4))
    # what the training's own numbers explain is likelier than a number of workers that happens to fit
    near = _nearest(own, ratio, low, high)
    near += [] if is_wide else _nearest(_common_ratios(), ratio, low, high)[:1]
    if near:
        return [f"{text} = {why}" for why in near]
    if ratio < NO_NOISE:
        return [
            "no noise: was the private step called, or are gradients computed anew after noise was added?"
        ]
    return [f"{text}: is the noise multiplier that is used the one that was accounted for?"]


def _nearest(known: Iterable[tuple[float, str]], ratio: float, low: float, high: float) -> list[str]:
    """Return the sentences of those numbers that are in the interval, the nearest first."""
    inside = [(abs(value - ratio), why) for value, why in known if low <= value <= high]
    return [why for _, why in sorted(inside, key=lambda pair: pair[0])]


def _common_ratios() -> Iterator[tuple[float, str]]:
    """Yield what mistakes that any training may have make of the noise, each with its sentence."""
    for workers in _WORKERS:
        averaged = f"1/sqrt({workers}): added by each of {workers} workers, then averaged?"
        if workers == 4:
            averaged += " Or is the sensitivity halved?"
        yield 1 / math.sqrt(workers), averaged
        yield (
            math.sqrt(workers),
            f"sqrt({workers}): added by each of {workers} workers or micro-steps, then summed?",
        )


def _own_ratios(
    batch_size: float | None, noise_multiplier: float | None, max_grad_norm: float | None
) -> Iterator[tuple[float, str]]:
    """Yield the same for mistakes with numbers of this training."""
    if max_grad_norm and max_grad_norm != 1:
        yield 1 / max_grad_norm, "1/max_grad_norm: noise not scaled by the clipping norm?"
        yield max_grad_norm, "max_grad_norm: noise scaled by the clipping norm twice?"
    if batch_size and batch_size != 1:
        yield 1 / batch_size, "1/batch size: noise for the mean added to the sum?"
        yield batch_size, "batch size: noise for the sum added to the mean?"
        yield 1 / math.sqrt(batch_size), "1/sqrt(batch size): noise added to each example, then averaged?"
    if noise_multiplier and noise_multiplier != 1:
        yield 1 / noise_multiplier, "1/noise_multiplier: noise of the clipping norm alone?"
        std = noise_multiplier * (max_grad_norm or 1.0)
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
    """Return guesses by what arrives of a canary; none if that is the clipping norm."""
    if spread is not None and _near(signal, 1) and spread > 1 + _SIGNAL_TOLERANCE:
        return [
            f"a canary on one coordinate is clipped, and one on many arrives with {spread:.3g} times the "
            "clipping norm: is each coordinate, or each parameter, clipped by itself?"
        ]
    if _near(signal, 1):
        return []
    if is_crowded:
        return [f"how much of a canary arrives depends on how many others are in the batch: {_JOINT_CLIP}"]
    known = _own_signal_causes(signal, canary_scale, batch_size)
    return known or (_large_signal_causes(signal) if signal > 1 else _small_signal_causes(signal))


def _own_signal_causes(signal: float, canary_scale: float | None, batch_size: float | None) -> list[str]:
    """Return what the numbers of this audit explain."""
    causes = []
    if canary_scale and canary_scale > 1 and _near(signal, canary_scale):
        causes.append("the canary arrives unclipped: is each gradient clipped, before the sum?")
    if batch_size and batch_size > 1 and _near(signal, batch_size):
        causes.append("the canary arrives batch_size times: is a sum released, and not the mean?")
    if batch_size and canary_scale and _near(signal, canary_scale / batch_size):
        causes.append(f"the canary arrives with its length over the batch size: {_JOINT_CLIP}")
    return causes


def _large_signal_causes(signal: float) -> list[str]:
    arrives = f"the canary arrives with {signal:.3g} times the clipping norm"
    return [f"{arrives}: is another norm used to clip?", f"{arrives}: {_JOINT_CLIP}"]


def _small_signal_causes(signal: float) -> list[str]:
    """Return causes of too small a signal, which is no leak by itself, but may hide one."""
    if signal < _NO_SIGNAL:
        return ["nothing arrives of the canary: are examples left out, or is another batch released?"]
    arrives = f"the canary arrives with {signal:.3g} clipping norms"
    if signal <= 0.5:
        return [
            f"{arrives}, which is 1/{1 / signal:.3g}: if a mean is released, give batch_size=...",
            f"{arrives}: {_JOINT_CLIP}",
        ]
    return []


def _near(value: float, other: float) -> bool:
    return abs(value / other - 1) < _SIGNAL_TOLERANCE
