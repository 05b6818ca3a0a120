"""What may have gone wrong, from the numbers that it leaves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

__all__ = ["likely_causes"]

_NEAR = 0.02  # how far a ratio may be off where no interval is given
_NOTHING = 1e-3
_WORKERS = (2, 3, 4, 6, 8, 16, 32, 64)

_OF_FINDING = {
    "step-noise": "is a step released without noise, such as one with an empty batch, or a micro-step?",
    "leaf-noise": "is a parameter left out when noise is added, or scaled by itself?",
    "coordinate-noise": "are some coordinates, such as a mask or a sparse update, released without noise?",
    "noise-shape": "is noise of another distribution, cut off, or of unequal size in its coordinates?",
    "repeated-noise": "is the generator seeded anew, from a constant or from few seeds, during the training?",
    "step-correlation": "is noise of earlier steps used again, or is the sum that was taken off not the one "
    "that was released?",
    "leaf-correlation": "does every parameter get the same PRNG key or seed?",
    "coordinate-correlation": "is noise of a smaller shape broadcast, or is the sum that was taken off not "
    "the one that was released?",
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
    canary_scale: float | None = None,
    batch_size: float | None = None,
    noise_multiplier: float | None = None,
    max_grad_norm: float | None = None,
    findings: Iterable[str] = (),
) -> tuple[str, ...]:
    """Guesses, the nearest first; hints for a developer, no part of any proof.

    ``noise_ratio`` is the noise over the claim, in ``interval``; ``signal`` is the mean score of a present
    canary, 1 if it was clipped, ``canary_scale`` if not; ``findings`` are names of findings.

    >>> likely_causes(0.7071)
    ('effective noise is 0.707 of the claim = 1/sqrt(2): added by each of 2 workers, then averaged?',)
    """
    causes: list[str] = []
    if noise_ratio is not None:
        low, high = interval or (noise_ratio * (1 - _NEAR), noise_ratio * (1 + _NEAR))
        known = _ratios(batch_size, noise_multiplier, max_grad_norm)
        causes += _of_noise(noise_ratio, low, high, known)
    if signal is not None:
        causes += _of_signal(signal, canary_scale, batch_size)
    causes += [_OF_FINDING[name] for name in findings if name in _OF_FINDING]
    return tuple(dict.fromkeys(causes))  # each once


def _of_noise(ratio: float, low: float, high: float, known: Iterable[tuple[float, str]]) -> list[str]:
    if low <= 1 <= high:
        return []
    text = f"effective noise is {ratio:.3g} of the claim"
    # an interval of many observations is narrow, and a training's own numbers are rounded
    low, high = min(low, ratio * (1 - _NEAR / 4)), max(high, ratio * (1 + _NEAR / 4))
    near = [(abs(value - ratio), f"{text} = {why}") for value, why in known if low <= value <= high]
    if near:
        return [sentence for _, sentence in sorted(near)]
    if ratio < _NOTHING:
        return [
            "no noise: was the private step called, or are gradients computed anew after noise was added?"
        ]
    return [f"{text}: is the noise multiplier that is used the one that was accounted for?"]


def _ratios(
    batch_size: float | None, noise_multiplier: float | None, max_grad_norm: float | None
) -> Iterator[tuple[float, str]]:
    """Each known mistake: what it makes of the noise, and its sentence."""
    for workers in _WORKERS:
        yield 1 / math.sqrt(workers), f"1/sqrt({workers}): added by each of {workers} workers, then averaged?"
        yield (
            math.sqrt(workers),
            f"sqrt({workers}): added by each of {workers} workers or micro-steps, then summed?",
        )
    yield 0.5, "1/2: is the sensitivity halved, or the sum divided by two workers?"
    if batch_size and batch_size != 1:
        yield 1 / batch_size, "1/batch size: noise for the mean added to the sum?"
        yield batch_size, "batch size: noise for the sum added to the mean?"
        yield 1 / math.sqrt(batch_size), "1/sqrt(batch size): noise added to each example, then averaged?"
    if max_grad_norm and max_grad_norm != 1:
        yield 1 / max_grad_norm, "1/max_grad_norm: noise not scaled by the clipping norm?"
        yield max_grad_norm, "max_grad_norm: noise scaled by the clipping norm twice?"
    if noise_multiplier and noise_multiplier != 1:
        yield 1 / noise_multiplier, "1/noise_multiplier: noise of the clipping norm alone?"
        std = noise_multiplier * (max_grad_norm or 1.0)
        yield 1 / math.sqrt(std), "1/sqrt(std): is the square root of the standard deviation used?"
        yield std, "std: is the variance used as a standard deviation?"


def _of_signal(signal: float, canary_scale: float | None, batch_size: float | None) -> list[str]:
    if batch_size and canary_scale and abs(signal * batch_size / canary_scale - 1) < 0.1:
        return ["the mean of the batch is clipped, and not each gradient?"]
    if canary_scale and canary_scale > 1 and abs(signal / canary_scale - 1) < 0.1:
        return ["the canary arrives unclipped: is each gradient clipped, before the sum?"]
    if signal > 1.1:
        return [
            f"the canary arrives with {signal:.3g} times the clipping norm: is another norm used to clip?"
        ]
    return []
