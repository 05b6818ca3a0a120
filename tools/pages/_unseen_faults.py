"""Twenty faults that no likely cause was derived from, and what the first cause printed should say.

The patterns were written before the first run. None of the faults is in the library of clips from which the
cause of an arrival is drawn (``diagnostics/_clipping_causes.py``), but for one that was added to it after its
first run, which counts as wrong from then on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from _detection_runs import LEAVES
from scipy import special

from dpaudit.zoo import faults
from dpaudit.zoo.faults import BatchFacts, Fault, NoiseDraw, clip_factors, flat_norms, scaled

__all__ = ["UNSEEN", "Unseen"]

_BECAME_CAUSE = "last-quarter"


@dataclass(frozen=True)
class Unseen:
    """A fault, the observer it runs in, and a pattern that the first cause must match (case-insensitive)."""

    fault: Fault
    observer: str
    expected: str
    became_cause: bool = False  # a cause was derived from it later


def _decaying(draw: NoiseDraw, _: Any) -> np.ndarray:
    return draw.normal() * np.linspace(1.0, 0.6, draw.num_steps)[:, None]


def _logistic(draw: NoiseDraw, _: Any) -> np.ndarray:
    return draw.std * draw.rng.logistic(size=draw.shape) * np.sqrt(3) / np.pi


def _student(draw: NoiseDraw, _: Any) -> np.ndarray:
    return draw.std * draw.rng.standard_t(4, size=draw.shape) / np.sqrt(2)


def _each_twice(draw: NoiseDraw, _: Any) -> np.ndarray:
    return np.repeat(draw.normal(), 2, axis=0)[: draw.num_steps]


def _antithetic(draw: NoiseDraw, _: Any) -> np.ndarray:
    noise = draw.normal()
    noise[1::2] = -noise[: draw.num_steps - 1 : 2]
    return noise


def _scaled_leaf(name: str, factor: float) -> Any:
    def noise(draw: NoiseDraw, _: Any) -> np.ndarray:
        leaves = dict(zip(LEAVES, draw.leaves(), strict=True))
        leaves[name] = factor * leaves[name]
        return np.concatenate(list(leaves.values()), axis=1)

    return noise


def _ten_bits(draw: NoiseDraw, _: Any) -> np.ndarray:
    mantissa, exponent = np.frexp(draw.normal())
    return np.ldexp(np.rint(mantissa * 2**10) / 2**10, exponent)


def _from_12_bits(draw: NoiseDraw, _: Any) -> np.ndarray:
    uniform = (draw.rng.integers(2**12, size=draw.shape) + 0.5) / 2**12
    return draw.std * special.ndtri(uniform)


def _one_stream_backwards(draw: NoiseDraw, _: Any) -> np.ndarray:
    noise = draw.normal()
    half = noise.shape[1] // 2
    noise[:, -half:] = noise[:, :half][:, ::-1]
    return noise


def _by_crowd(batch: BatchFacts, _: Any) -> Any:
    return 0.75 + 0.25 * (batch.size > batch.expected)


def _by_module(leaves: list[Any], limit: Any, _: Any, xp: Any) -> list[Any]:
    """Clip the weight and the bias of each layer together, and layers apart."""
    clipped = []
    for first in range(0, len(leaves), 2):
        layer = leaves[first : first + 2]
        norms = xp.sqrt(sum((leaf * leaf).reshape(len(leaf), -1).sum(1) for leaf in layer))
        clipped += scaled(layer, clip_factors(norms, limit, xp))
    return clipped


def _largest_leaf(norms: Any, limit: Any, _: Any, xp: Any) -> Any:
    return clip_factors(norms.max(0), limit, xp)


def _soft(norms: Any, limit: Any, _: Any, xp: Any) -> Any:
    """Saturate smoothly, at twice the clipping norm."""
    return xp.minimum(1.0, 2 * limit / (limit + flat_norms(norms, xp)))


def _last_quarter(norms: Any, limit: Any, _: Any, xp: Any) -> Any:
    """Clip in blocks of four rows, of which the last is forgotten."""
    factor = clip_factors(flat_norms(norms, xp), limit, xp)
    return xp.where(xp.arange(len(factor)) % 4 == 3, 1.0, factor)


class _LagThree:
    """Add half of the sum of three steps ago."""

    def __init__(self) -> None:
        self._sums: list[Any] = []

    def __call__(self, last_sum: Any, _raw: Any, _size: Any) -> Any:
        if np.ndim(last_sum) == 0:  # the first step of a run
            self._sums.clear()
        self._sums.append(last_sum)
        return 0.5 * self._sums[-3] if len(self._sums) > 3 else 0.0


def _sliding(_: np.random.Generator, n: int, q: float, num_steps: int) -> list[np.ndarray]:
    size = round(n * q)
    return [np.sort((step * size // 2 + np.arange(size)) % n) for step in range(num_steps)]


def _largest_first(rng: np.random.Generator, n: int, q: float, num_steps: int) -> list[np.ndarray]:
    """Truncate Poisson batches to the expected size."""
    return [np.flatnonzero(rng.random(n) < q)[: round(n * q)] for _ in range(num_steps)]


def _unseen(name: str, text: str, observer: str, expected: str, **parts: Any) -> Unseen:
    fault = Fault(name, text, observers=(observer,), **parts)
    return Unseen(fault, observer, expected, became_cause=name == _BECAME_CAUSE)


_DISTRIBUTION = r"distribution|tails?|normal"
_REUSED = r"reus|repeat|same noise|reseed|earlier"
_LATTICE = r"precision|lattice|grid|table|round|few values|bits"

UNSEEN = (
    _unseen(
        "decaying",
        "noise falls to 0.6 of the claim",
        "hooks",
        r"schedul|over time|trend|later|decreas|falls|first",
        noise=_decaying,
    ),
    _unseen("logistic", "logistic noise", "step", _DISTRIBUTION, noise=_logistic),
    _unseen("student", "Student noise, 4 degrees of freedom", "layer", _DISTRIBUTION, noise=_student),
    _unseen("each-twice", "each noise vector used twice", "ghost", _REUSED, noise=_each_twice),
    _unseen(
        "antithetic",
        "every second noise vector is the negative of the last",
        "hooks",
        _REUSED + r"|negat",
        noise=_antithetic,
    ),
    _unseen(
        "quiet-bias",
        "out.bias released without noise",
        "jax",
        r"out\.bias|parameter|coordinate",
        noise=_scaled_leaf("out.bias", 0.0),
    ),
    _unseen(
        "quiet-layer",
        "fc2.weight gets 0.7 of the noise",
        "ghost",
        r"fc2\.weight|parameter",
        noise=_scaled_leaf("fc2.weight", 0.7),
    ),
    _unseen("ten-bits", "noise with 10 bits of mantissa", "layer", _LATTICE, noise=_ten_bits),
    _unseen("inverse-12-bits", "inverse cdf of 12-bit uniform numbers", "jax", _LATTICE, noise=_from_12_bits),
    _unseen(
        "backwards",
        "half of the coordinates read the stream of the others backwards",
        "hooks",
        r"share|same|key|seed|stream|reus|repeat",
        noise=_one_stream_backwards,
    ),
    _unseen(
        "by-crowd",
        "0.75 of the noise for batches below the expected size",
        "hooks",
        r"batch size|size of the batch|depends? on (?:the )?(?:batch|data)",
        std=_by_crowd,
    ),
    _unseen(
        "by-module", "each layer clipped alone", "func", r"separate|each layer|apart|alone", clip=_by_module
    ),
    _unseen(
        "by-column",
        "each column of a matrix clipped alone",
        "step",
        r"separate|column",
        clip=partial(faults.by_axis, axis=1),
    ),
    _unseen(
        "largest-leaf",
        "norm of the largest leaf only",
        "jax",
        r"each parameter|separate|largest|leaves out|alone",
        factor=_largest_leaf,
    ),
    _unseen(
        "soft",
        "smooth clipping that saturates at 2 C",
        "hooks",
        r"clipped at|another norm|2(?:\.0\d*)? times",
        factor=_soft,
    ),
    _unseen(
        "last-quarter",
        "every fourth row is not clipped",
        "ghost",
        r"not clipped(?! enough)|unclipped",
        factor=_last_quarter,
    ),
    _unseen(
        "lag-three",
        "0.5 of the sum of three steps ago",
        "step",
        r"earlier|previous|last|left over|accumul|zero|cleared",
        after=_LagThree(),
    ),
    _unseen(
        "sliding",
        "a window that slides over the data",
        "hooks",
        r"shuffl|order|Poisson|weight|fixed size",
        batches=_sliding,
    ),
    _unseen(
        "truncated",
        "Poisson batches cut to the expected size",
        "ghost",
        r"size|truncat|Poisson",
        batches=_largest_first,
    ),
    _unseen(
        "three-rows",
        "three augmented rows per example, each clipped",
        "layer",
        r"row|several|example",
        loop="three rows",
    ),
)
