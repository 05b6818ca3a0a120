"""What may have gone wrong with the clipping, from what arrives of a canary."""

from __future__ import annotations

__all__ = ["of_signal"]

_NEAR = 0.1
_NOTHING = 1e-5
_TOGETHER = "is the mean or the sum of the batch clipped, and not each gradient?"


def of_signal(
    signal: float,
    spread: float | None,
    is_crowded: bool,
    canary_scale: float | None,
    batch_size: float | None,
) -> list[str]:
    """Guesses; none if canaries arrive with the clipping norm."""
    if spread is not None and _near(signal, 1) and spread > 1 + _NEAR:
        return [
            f"a canary on one coordinate is clipped, and one on many arrives with {spread:.3g} times the "
            "clipping norm: is each coordinate, or each parameter, clipped by itself?"
        ]
    if _near(signal, 1):
        return []
    if is_crowded:
        return [f"how much of a canary arrives depends on how many others are in the batch: {_TOGETHER}"]
    known = _of_own_numbers(signal, canary_scale, batch_size)
    return known or (_of_more(signal) if signal > 1 else _of_less(signal))


def _of_own_numbers(signal: float, canary_scale: float | None, batch_size: float | None) -> list[str]:
    """What the numbers of the audit itself explain."""
    causes = []
    if canary_scale and canary_scale > 1 and _near(signal, canary_scale):
        causes.append("the canary arrives unclipped: is each gradient clipped, before the sum?")
    if batch_size and batch_size > 1 and _near(signal, batch_size):
        causes.append("the canary arrives batch_size times: is a sum released, and not the mean?")
    if batch_size and canary_scale and _near(signal, canary_scale / batch_size):
        causes.append(f"the canary arrives with its length over the batch size: {_TOGETHER}")
    return causes


def _of_more(signal: float) -> list[str]:
    arrives = f"the canary arrives with {signal:.3g} times the clipping norm"
    return [f"{arrives}: is another norm used to clip?", f"{arrives}: {_TOGETHER}"]


def _of_less(signal: float) -> list[str]:
    """Too little is no leak by itself; it may hide one."""
    if signal < _NOTHING:
        return ["nothing arrives of the canary: are examples left out, or is another batch released?"]
    arrives = f"the canary arrives with {signal:.3g} clipping norms"
    if signal <= 0.5:
        return [
            f"{arrives}, which is 1/{1 / signal:.3g}: if a mean is released, give batch_size=...",
            f"{arrives}: {_TOGETHER}",
        ]
    return []


def _near(value: float, other: float) -> bool:
    return abs(value / other - 1) < _NEAR
