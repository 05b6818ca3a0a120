"""Faults of DP training as values: each is a correct run with one part replaced, for every library.

A part is a function of arrays (NumPy, or JAX through ``xp``), written as a developer might get it wrong. An
:class:`Injection` applies the parts of one :class:`Fault` to one training run, and its ``step`` is a complete
step in NumPy. A *leaf* is the gradient of one parameter; a row belongs to one example. Faulty mechanisms for
the native engine are in :mod:`dpaudit.training.broken`.

>>> less_noise, rng = fault_named("less-noise"), np.random.default_rng(0)
>>> injection = Injection(less_noise, 0.5, std=1.0, num_steps=1, rng=rng, leaves=[(3,), (2,)])
>>> injection.step([np.ones((4, 3)), np.ones((4, 2))], max_grad_norm=1.0).shape
(5,)
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from scipy import special

from dpaudit._io import packaged
from dpaudit.errors import InputError
from dpaudit.zoo._injection import (
    OBSERVERS,
    Array,
    BatchFacts,
    Fault,
    Injection,
    NoiseDraw,
    clip_factors,
    clipped_sum,
    flat_norms,
    scaled,
    split_leaves,
)

__all__ = [
    "FAULTS",
    "OBSERVERS",
    "STEP_FAULTS",
    "TWINS",
    "BatchFacts",
    "Fault",
    "Injection",
    "NoiseDraw",
    "clip_factors",
    "clipped_sum",
    "fault_named",
    "flat_norms",
    "scaled",
    "split_leaves",
]


# --- noise on a lattice or from a pool


def half_precision(draw: NoiseDraw, dtype: str) -> Array:
    """Draw noise in half precision, for a sum in single precision."""
    return draw.normal().astype(_bfloat16() if dtype == "bf16" else np.float16).astype(np.float32)


def _bfloat16() -> Any:
    from ml_dtypes import bfloat16  # noqa: PLC0415  # comes with JAX

    return bfloat16


def fixed_point(draw: NoiseDraw, fraction: int) -> Array:
    """Round the noise, but not the sum, to a grid."""
    return draw.std / fraction * np.rint(draw.normal() / (draw.std / fraction))


def table(draw: NoiseDraw, size: int) -> Array:
    """Draw noise from a table of numbers."""
    pool = draw.std * draw.rng.standard_normal(size)
    return pool[draw.rng.integers(size, size=draw.shape)]


def box_muller(draw: NoiseDraw, bits: int) -> Array:
    """Transform uniform numbers of few bits, two at a time."""
    num_steps, size = draw.shape
    first, second = draw.rng.integers(1, 2**bits, size=(2, num_steps, size // 2)) / 2**bits
    radius, angle = np.sqrt(-2 * np.log(first)), 2 * np.pi * second
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=2)
    return draw.std * pairs.reshape(draw.shape)


# --- noise with no tails, or of another distribution


def cut(draw: NoiseDraw, at: float) -> Array:
    """Redraw what lies beyond ``at`` standard deviations; the variance is restored."""
    uniform = draw.rng.uniform(special.ndtr(-at), special.ndtr(at), draw.shape)
    density = np.exp(-(at**2) / 2) / np.sqrt(2 * np.pi)
    variance = 1 - 2 * at * density / (1 - 2 * special.ndtr(-at))
    return np.asarray(draw.std * special.ndtri(uniform) / np.sqrt(variance))


def sum_of_uniforms(draw: NoiseDraw, count: int) -> Array:
    """Add uniform numbers, which are almost normal, but never far from zero."""
    total = sum(draw.rng.random(draw.shape) for _ in range(count))
    return np.asarray(draw.std * (total - count / 2) / np.sqrt(count / 12))


# --- noise that is shared


def rolled(draw: NoiseDraw, shift: int) -> Array:
    """Use the noise of the first step in all steps, shifted further in each."""
    first = draw.normal()[0]
    return np.stack([np.roll(first, shift * step) for step in range(draw.num_steps)])


def shifted(draw: NoiseDraw, shift: int) -> Array:
    """Fill each weight matrix from the same stream, which starts ``shift`` numbers later in the second."""
    leaves = draw.leaves()
    first, second = leaves[0], leaves[2]
    second[:] = first[:, shift : shift + second.shape[1]]
    return np.concatenate(leaves, axis=1)


def shared(draw: NoiseDraw, correlation: float) -> Array:
    """Give two matrices noise with this correlation."""
    leaves = draw.leaves()
    first, second = leaves[0][:, : leaves[2].shape[1]], leaves[2]
    second[:] = correlation * first + np.sqrt(1 - correlation**2) * second
    return np.concatenate(leaves, axis=1)


def low_rank(draw: NoiseDraw, rank: int) -> Array:
    """Draw the noise in a random subspace, while the sum has all dimensions."""
    mixing = draw.rng.standard_normal((rank, draw.shape[1]))
    mixing /= np.linalg.norm(mixing, axis=0)
    return np.asarray(draw.std * draw.rng.standard_normal((draw.num_steps, rank)) @ mixing)


def forked(draw: NoiseDraw, _: Any) -> Array:
    """Draw the noise of two halves in two workers that inherited the same state."""
    half = draw.std * draw.rng.standard_normal((draw.num_steps, draw.shape[1] // 2))
    return np.concatenate([half, half], axis=1)


def seed_plus_index(draw: NoiseDraw, _: Any) -> Array:
    """Seed the noise of each leaf with the sum of a seed, the step and the number of the leaf."""
    seed = 1 + int(draw.rng.integers(2**32))

    def noise(step: int) -> Array:
        rngs = [np.random.default_rng(seed + step + leaf) for leaf in range(len(draw.sizes))]
        return np.concatenate([rng.standard_normal(size) for rng, size in zip(rngs, draw.sizes, strict=True)])

    return draw.std * np.stack([noise(step) for step in range(draw.num_steps)])


# --- noise that depends on the data


def by_size(batch: BatchFacts, power: float) -> Any:
    """Scale the noise by a power of the number of examples that were drawn."""
    return (batch.size / batch.expected) ** power


def by_longest(batch: BatchFacts, share: float) -> Any:
    """Scale the noise to the longest clipped gradient instead of the clipping norm."""
    shortened = batch.max_row_norm + (1 - batch.max_row_norm) * (batch.max_row_norm > 1)
    return 1 - share + share * shortened


# --- clipping of another norm or another thing


def by_value(leaves: list[Any], limit: Any, _: Any, xp: Any) -> list[Any]:
    """Limit each number of a gradient instead of its norm."""
    return [xp.clip(leaf, -limit, limit) for leaf in leaves]


def by_largest(leaves: list[Any], limit: Any, _: Any, xp: Any) -> list[Any]:
    """Scale a gradient by its largest number instead of its norm."""
    largest = xp.stack([abs(leaf).reshape(len(leaf), -1).max(1) for leaf in leaves]).max(0)
    return scaled(leaves, clip_factors(largest, limit, xp))


def by_axis(leaves: list[Any], limit: Any, _: Any, xp: Any, *, axis: int) -> list[Any]:
    """Clip the rows or the columns of a matrix separately."""
    norms = [xp.sqrt((leaf * leaf).sum(axis, keepdims=True)) for leaf in leaves]
    return [leaf * clip_factors(norm, limit, xp) for leaf, norm in zip(leaves, norms, strict=True)]


def by_leaf(leaves: list[Any], limit: Any, _: Any, xp: Any) -> list[Any]:
    """Clip every leaf to the full norm, with noise for one leaf."""
    norms = [xp.sqrt((leaf * leaf).reshape(len(leaf), -1).sum(1)) for leaf in leaves]
    return [
        scaled([leaf], clip_factors(norm, limit, xp))[0] for leaf, norm in zip(leaves, norms, strict=True)
    ]


def capped(norms: Any, limit: Any, most: float, xp: Any) -> Any:
    """Limit the norm before the factor is computed from it."""
    return clip_factors(xp.minimum(flat_norms(norms, xp), most * limit), limit, xp)


def overflowing(norms: Any, limit: Any, _: Any, xp: Any) -> Any:
    """Square in half precision, in which 256 * 256 is infinite, and treat that as no norm at all."""
    with np.errstate(over="ignore", invalid="ignore"):
        norm = xp.sqrt((norms.astype(xp.float16) ** 2).sum(0)).astype(xp.float32)
    return clip_factors(xp.where(xp.isfinite(norm), norm, 0.0), limit, xp)


def without_leaves(norms: Any, limit: Any, _: Any, xp: Any, *, keep: Any) -> Any:
    """Leave leaves out of the norm, which are scaled like the rest; a gradient in them is not clipped."""
    return clip_factors(flat_norms(norms[keep], xp), limit, xp)


def short_times(norms: Any, limit: Any, factor: float, xp: Any) -> Any:
    """Multiply gradients that need no clipping, as if they had to be brought to a common scale."""
    norm = flat_norms(norms, xp)
    return xp.where(norm < limit, factor, limit / (norm + 1e-6))


def larger_limit(norms: Any, limit: Any, factor: float, xp: Any) -> Any:
    """Clip at a multiple of the norm that the noise is calibrated to."""
    return clip_factors(flat_norms(norms, xp), factor * limit, xp)


# --- sampling: n examples, each of which should be drawn with probability q in each step


def poisson(rng: np.random.Generator, n: int, q: float, num_steps: int) -> list[Array]:
    """Draw each example independently, which is correct."""
    return [np.flatnonzero(rng.random(n) < q) for _ in range(num_steps)]


def shuffled(rng: np.random.Generator, n: int, q: float, num_steps: int) -> list[Array]:
    """Cut shuffled epochs into batches of one size."""
    size, batches = round(n * q), list[Array]()
    while len(batches) < num_steps:
        batches += np.split(rng.permutation(n), n // size)
    return batches[:num_steps]


def same_epochs(rng: np.random.Generator, n: int, q: float, num_steps: int) -> list[Array]:
    """Reseed the sampler in every epoch."""
    epoch = poisson(rng, n, q, round(1 / q))
    return [epoch[step % len(epoch)] for step in range(num_steps)]


def with_replacement(rng: np.random.Generator, n: int, q: float, num_steps: int) -> list[Array]:
    """Draw examples with replacement."""
    return [rng.integers(n, size=rng.binomial(n, q)) for _ in range(num_steps)]


def duplicates(rng: np.random.Generator, n: int, q: float, num_steps: int) -> list[Array]:
    """Draw each batch correctly, and take its first example twice."""
    return [np.concatenate([batch, batch[:1]]) for batch in poisson(rng, n, q, num_steps)]


def weighted(rng: np.random.Generator, n: int, q: float, num_steps: int) -> list[Array]:
    """Draw rare classes more often: a fifth of the examples with three times the weight of the others."""
    weight = np.where(np.arange(n) % 5 == 0, 3.0, 1.0)
    return [np.flatnonzero(rng.random(n) < q * weight / weight.mean()) for _ in range(num_steps)]


PARTS: Mapping[str, Mapping[str, Any]] = {
    "less-noise": {"noise": lambda draw, factor: factor * draw.normal()},
    "half-precision": {"noise": half_precision},
    "fixed-point": {"noise": fixed_point},
    "table": {"noise": table},
    "box-muller": {"noise": box_muller},
    "cut": {"noise": cut},
    "irwin-hall": {"noise": sum_of_uniforms},
    "uniform": {"noise": lambda draw, _: draw.std * draw.rng.random(draw.shape)},
    "laplace": {"noise": lambda draw, _: draw.rng.laplace(scale=draw.std * np.sqrt(0.5), size=draw.shape)},
    "rolled": {"noise": rolled},
    "shifted": {"noise": shifted},
    "shared": {"noise": shared},
    "low-rank": {"noise": low_rank},
    "forked": {"noise": forked},
    "seed-plus-index": {"noise": seed_plus_index},
    "std-by-size": {"std": by_size},
    "std-by-norm": {"std": by_longest},
    "by-value": {"clip": by_value},
    "by-largest": {"clip": by_largest},
    "by-row": {"clip": partial(by_axis, axis=-1)},
    "by-leaf": {"clip": by_leaf},
    "leaves-noised-twice": {"clip": by_leaf, "noise": lambda draw, _: draw.normal() + draw.normal()},
    "capped": {"factor": capped},
    "overflow": {"factor": overflowing},
    "forgotten-bias": {"factor": partial(without_leaves, keep=slice(-1))},
    "left-out": {"factor": lambda norms, limit, keep, xp: without_leaves(norms, limit, None, xp, keep=keep)},
    "short-scaled": {"factor": short_times},
    "larger-limit": {"factor": larger_limit},
    "shortcut": {
        "factor": lambda norms, limit, share, xp: (1 + share) * clip_factors(flat_norms(norms, xp), limit, xp)
    },
    "left-over": {"after": lambda last_sum, _, share: share * last_sum},
    "raw-added": {"after": lambda _, raw_sum, share: share * raw_sum},
    "shuffled": {"batches": shuffled},
    "same-epochs": {"batches": same_epochs},
    "replacement": {"batches": with_replacement},
    "duplicates": {"batches": duplicates},
    "weighted": {"batches": weighted},
    "bf16-release": {"rounded": lambda release: release.astype(_bfloat16()).astype(np.float32)},
    "more-noise": {"noise": lambda draw, _: 1.3 * draw.normal()},
}
"""What faults and twins replace; the others change the training loop, or nothing."""


def _fault(name: str, *, sizes: Iterable[Any] = (None,), **values: Any) -> Fault:
    return Fault(name, sizes=tuple(sizes), **values, **PARTS.get(name, {}))


_CATALOGUE = tomllib.loads(packaged("zoo", "faults.toml"))
FAULTS, TWINS, STEP_FAULTS = (
    tuple(_fault(**values) for values in _CATALOGUE[group]) for group in ("faults", "twins", "step_faults")
)
"""Faults of any training run; correct runs, of which nothing may be reported; more faults of NumPy steps."""

_BY_NAME = {fault.name: fault for fault in (*FAULTS, *TWINS, *STEP_FAULTS)}


def fault_named(name: str) -> Fault:
    """Return the fault, or the correct twin, with this name."""
    if name not in _BY_NAME:
        raise InputError(f"There is no fault {name!r}; choose from {', '.join(_BY_NAME)}.")
    return _BY_NAME[name]
