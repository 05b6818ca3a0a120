"""Faulty mechanisms for tools/pages/detection.py: each is a correct training run with one part replaced.

A part is a function of arrays (NumPy, or JAX through ``xp``), written as a developer might get it wrong.
``_detection_runs`` inserts it into the training loop of every library in which the fault can exist. All
gradients have names and shapes; a *leaf* is the gradient of one parameter, a row belongs to one example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from scipy import special

__all__ = ["FAULTS", "LEAVES", "OBSERVERS", "TWINS", "Batch", "Draw", "Fault", "flat_norms"]

OBSERVERS = ("step", "func", "hooks", "ghost", "layer", "jax")
"""NumPy step, torch.func step, Opacus with hooks, ghost and per-layer clipping, JAX Privacy."""
LEAVES = {
    "fc1.weight": (16, 20),
    "fc1.bias": (16,),
    "fc2.weight": (16, 16),
    "fc2.bias": (16,),
    "out.weight": (3, 16),
    "out.bias": (3,),
}
_LOOPS = ("hooks", "ghost", "layer", "jax")  # training loops, which draw batches
_ROWS = ("step", "func", "hooks", "layer", "jax")  # where clipping has rows: ghost clipping has norms only
_FLAT = ("step", "func", "hooks", "jax")  # where all leaves are clipped together, and have rows


@dataclass(frozen=True)
class Draw:
    """The noise of a whole run: ``num_steps`` vectors with standard deviation ``std``."""

    rng: np.random.Generator
    num_steps: int
    std: float

    @property
    def sizes(self) -> list[int]:
        return [int(np.prod(shape)) for shape in LEAVES.values()]

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_steps, sum(self.sizes)

    def normal(self) -> np.ndarray:
        """Return what a correct run adds: steps x parameters."""
        return self.std * self.rng.standard_normal(self.shape)

    def leaves(self) -> list[np.ndarray]:
        """Return the same, one array per leaf."""
        return np.split(self.normal(), np.cumsum(self.sizes)[:-1], axis=1)


@dataclass(frozen=True)
class Batch:
    """What a step knows besides its sum; all of it is private."""

    size: float
    expected: float
    longest: float  # largest norm of a gradient before clipping, in clipping norms


@dataclass(frozen=True)
class Fault:
    """A fault: the parts that it replaces, and the sizes at which it is tried, largest first.

    ``noise`` returns the noise of all steps, ``std`` a factor of its standard deviation. ``factor`` returns
    clipping factors from the norms of each leaf (leaves x rows), ``clip`` clips rows in any other way.
    ``after`` returns what is added to a release, from the sum of the last step and the raw gradient;
    ``rounded`` rounds the release. ``batches`` returns the examples of each step, ``loop`` names a change of
    the training loop.
    """

    name: str
    family: str
    text: str
    sizes: tuple[Any, ...] = (None,)
    observers: Sequence[str] = OBSERVERS
    required: Any = None  # the size that must be caught, if sizes go beyond it
    noise: Callable[[Draw, Any], np.ndarray] | None = None
    std: Callable[[Batch, Any], Any] | None = None
    factor: Callable[[Any, Any, Any, Any], Any] | None = None
    clip: Callable[[list[Any], Any, Any, Any], list[Any]] | None = None
    after: Callable[[Any, Any, Any], Any] | None = None
    rounded: Callable[[Any], Any] | None = None
    batches: Callable[[np.random.Generator, int, float, int], list[np.ndarray]] | None = None
    loop: str | None = None


# --- noise on a lattice or from a pool


def half_precision(draw: Draw, dtype: Any) -> np.ndarray:
    return draw.normal().astype({"bf16": ml_dtypes.bfloat16, "fp16": np.float16}[dtype]).astype(np.float32)


def fixed_point(draw: Draw, parts: int) -> np.ndarray:
    unit = draw.std / parts
    return unit * np.rint(draw.normal() / unit)


def table(draw: Draw, size: int) -> np.ndarray:
    pool = draw.std * draw.rng.standard_normal(size)
    return pool[draw.rng.integers(size, size=draw.shape)]


# --- noise with no tails


def cut(draw: Draw, at: float) -> np.ndarray:
    """Redraw what lies beyond ``at`` standard deviations; the variance is restored."""
    uniform = draw.rng.uniform(special.ndtr(-at), special.ndtr(at), draw.shape)
    density = np.exp(-(at**2) / 2) / np.sqrt(2 * np.pi)
    variance = 1 - 2 * at * density / (1 - 2 * special.ndtr(-at))
    return draw.std * special.ndtri(uniform) / np.sqrt(variance)


def sum_of_uniforms(draw: Draw, count: int) -> np.ndarray:
    total = sum(draw.rng.random(draw.shape) for _ in range(count))
    return draw.std * (total - count / 2) / np.sqrt(count / 12)


# --- noise that is shared


def rolled(draw: Draw, shift: int) -> np.ndarray:
    """Use the noise of the first step in all steps, shifted further in each."""
    first = draw.normal()[0]
    return np.stack([np.roll(first, shift * step) for step in range(draw.num_steps)])


def shifted(draw: Draw, shift: int) -> np.ndarray:
    """Fill each weight matrix from the same stream, which starts ``shift`` numbers later in the second."""
    leaves = draw.leaves()
    first, second = leaves[0], leaves[2]
    second[:] = first[:, shift : shift + second.shape[1]]
    return np.concatenate(leaves, axis=1)


def shared(draw: Draw, correlation: float) -> np.ndarray:
    """Give two matrices noise with this correlation."""
    leaves = draw.leaves()
    first, second = leaves[0][:, : leaves[2].shape[1]], leaves[2]
    second[:] = correlation * first + np.sqrt(1 - correlation**2) * second
    return np.concatenate(leaves, axis=1)


def low_rank(draw: Draw, rank: int) -> np.ndarray:
    mixing = draw.rng.standard_normal((rank, draw.shape[1]))
    mixing /= np.linalg.norm(mixing, axis=0)
    return draw.std * draw.rng.standard_normal((draw.num_steps, rank)) @ mixing


# --- noise that depends on the data


def by_size(batch: Batch, power: float) -> Any:
    return (batch.size / batch.expected) ** power


def by_longest(batch: Batch, share: float) -> Any:
    """Scale the noise to the longest clipped gradient instead of the clipping norm."""
    shortened = batch.longest + (1 - batch.longest) * (batch.longest > 1)
    return 1 - share + share * shortened


# --- clipping of another norm or another thing


def flat_norms(norms: Any, xp: Any) -> Any:
    return xp.sqrt((norms * norms).sum(0))


def _shrink(norm: Any, limit: Any, xp: Any) -> Any:
    return xp.minimum(1.0, limit / (norm + 1e-6))


def _scaled(leaves: list[Any], factor: Any) -> list[Any]:
    return [leaf * factor.reshape(-1, *[1] * (leaf.ndim - 1)) for leaf in leaves]


def by_value(leaves: list[Any], limit: Any, _: Any, xp: Any) -> list[Any]:
    return [xp.clip(leaf, -limit, limit) for leaf in leaves]


def by_largest(leaves: list[Any], limit: Any, _: Any, xp: Any) -> list[Any]:
    largest = xp.stack([abs(leaf).reshape(len(leaf), -1).max(1) for leaf in leaves]).max(0)
    return _scaled(leaves, _shrink(largest, limit, xp))


def by_row(leaves: list[Any], limit: Any, _: Any, xp: Any) -> list[Any]:
    norms = [xp.sqrt((leaf * leaf).sum(-1, keepdims=True)) for leaf in leaves]
    return [leaf * _shrink(norm, limit, xp) for leaf, norm in zip(leaves, norms, strict=True)]


def by_leaf(leaves: list[Any], limit: Any, _: Any, xp: Any) -> list[Any]:
    norms = [xp.sqrt((leaf * leaf).reshape(len(leaf), -1).sum(1)) for leaf in leaves]
    return [_scaled([leaf], _shrink(norm, limit, xp))[0] for leaf, norm in zip(leaves, norms, strict=True)]


def capped(norms: Any, limit: Any, most: float, xp: Any) -> Any:
    return _shrink(xp.minimum(flat_norms(norms, xp), most * limit), limit, xp)


def overflowing(norms: Any, limit: Any, _: Any, xp: Any) -> Any:
    """Square in half precision, in which 256 * 256 is infinite, and treat that as no norm at all."""
    with np.errstate(over="ignore", invalid="ignore"):
        norm = xp.sqrt((norms.astype(xp.float16) ** 2).sum(0)).astype(xp.float32)
    return _shrink(xp.where(xp.isfinite(norm), norm, 0.0), limit, xp)


def without_last(norms: Any, limit: Any, _: Any, xp: Any) -> Any:
    """Leave the last leaf, a bias of three numbers, out of the norm; clipped alone, it is not clipped."""
    return _shrink(flat_norms(norms[:-1], xp), limit, xp)


def short_times(norms: Any, limit: Any, factor: float, xp: Any) -> Any:
    """Multiply gradients that need no clipping, as if they had to be brought to a common scale."""
    norm = flat_norms(norms, xp)
    return xp.where(norm < limit, factor, limit / (norm + 1e-6))


def larger_limit(norms: Any, limit: Any, factor: float, xp: Any) -> Any:
    return _shrink(flat_norms(norms, xp), factor * limit, xp)


# --- sums that are not sums of clipped rows


def left_over(last: Any, _: Any, share: float) -> Any:
    return share * last


def raw_added(_: Any, raw: Any, share: float) -> Any:
    return share * raw


# --- sampling: n examples, each of which should be drawn with probability q in each step


def shuffled(rng: np.random.Generator, n: int, q: float, num_steps: int) -> list[np.ndarray]:
    size, found = round(n * q), list[np.ndarray]()
    while len(found) < num_steps:
        found += np.split(rng.permutation(n), n // size)
    return found[:num_steps]


def same_epochs(rng: np.random.Generator, n: int, q: float, num_steps: int) -> list[np.ndarray]:
    """Reseed the sampler in every epoch."""
    epoch = [np.flatnonzero(rng.random(n) < q) for _ in range(round(1 / q))]
    return [epoch[step % len(epoch)] for step in range(num_steps)]


def with_replacement(rng: np.random.Generator, n: int, q: float, num_steps: int) -> list[np.ndarray]:
    return [rng.integers(n, size=rng.binomial(n, q)) for _ in range(num_steps)]


def duplicates(rng: np.random.Generator, n: int, q: float, num_steps: int) -> list[np.ndarray]:
    """Draw each batch correctly, and take its first example twice."""
    drawn = [np.flatnonzero(rng.random(n) < q) for _ in range(num_steps)]
    return [np.concatenate([batch, batch[:1]]) for batch in drawn]


def weighted(rng: np.random.Generator, n: int, q: float, num_steps: int) -> list[np.ndarray]:
    """Draw rare classes more often: a fifth of the examples with three times the weight of the others."""
    weight = np.where(np.arange(n) % 5 == 0, 3.0, 1.0)
    return [np.flatnonzero(rng.random(n) < q * weight / weight.mean()) for _ in range(num_steps)]


_LATTICE, _TAILS, _SHARED = "Noise on a lattice or from a pool", "Noise with no tails", "Shared noise"
_DATA, _CLIPPING = "Noise that depends on the data", "Clipping of another norm or another thing"
_SUMS, _SAMPLING, _AMOUNT = "Sums that are not sums of clipped rows", "Sampling", "Amount of noise"

FAULTS = (
    Fault(
        "less-noise",
        _AMOUNT,
        "noise is a fraction of the claim",
        sizes=(0.9, 0.95, 0.97, 0.99),
        required=0.9,
        noise=lambda draw, factor: factor * draw.normal(),
    ),
    Fault(
        "half-precision",
        _LATTICE,
        "noise drawn in half precision",
        sizes=("bf16", "fp16"),
        required="fp16",
        noise=half_precision,
    ),
    Fault(
        "fixed-point",
        _LATTICE,
        "noise rounded to a fraction of its standard deviation: 1 / size",
        sizes=(512, 4096, 65536, 2**20),
        required=512,
        noise=fixed_point,
    ),
    Fault(
        "table",
        _LATTICE,
        "noise from a table of this size",
        sizes=(4096, 2**17, 10**6),
        required=4096,
        noise=table,
    ),
    Fault(
        "cut",
        _TAILS,
        "noise cut at this number of standard deviations, with its variance restored",
        sizes=(2.0, 3.0, 4.0, 4.5),
        required=4.0,
        noise=cut,
    ),
    Fault(
        "irwin-hall",
        _TAILS,
        "sum of this number of uniform numbers",
        sizes=(4, 12, 24),
        required=12,
        noise=sum_of_uniforms,
    ),
    Fault(
        "rolled",
        _SHARED,
        "noise of the first step, rolled by this number per step",
        sizes=(7, 101),
        required=101,
        noise=rolled,
    ),
    Fault(
        "shifted",
        _SHARED,
        "two matrices read the same stream, the second this much later",
        sizes=(5, 50),
        required=50,
        noise=shifted,
    ),
    Fault(
        "shared",
        _SHARED,
        "two matrices have noise with this correlation",
        sizes=(1.0, 0.3, 0.1, 0.05, 0.02),
        required=1.0,
        noise=shared,
    ),
    Fault(
        "low-rank",
        _SHARED,
        "noise of this rank",
        sizes=(50, 300, 500),
        required=50,
        noise=low_rank,
    ),
    Fault(
        "std-by-size",
        _DATA,
        "standard deviation times (batch size / expected) to this power",
        sizes=(1.0, 0.5, 0.25),
        required=0.5,
        std=by_size,
    ),
    Fault(
        "std-by-norm",
        _DATA,
        "this share of the standard deviation follows the longest clipped gradient",
        sizes=(1.0, 0.5, 0.2),
        required=1.0,
        std=by_longest,
    ),
    Fault("by-value", _CLIPPING, "clipped by value", observers=_ROWS, clip=by_value),
    Fault("by-largest", _CLIPPING, "clipped by the largest number", observers=_ROWS, clip=by_largest),
    Fault("by-row", _CLIPPING, "each row of a matrix clipped alone", observers=_ROWS, clip=by_row),
    Fault("by-leaf", _CLIPPING, "each leaf clipped alone", observers=_FLAT, clip=by_leaf),
    Fault(
        "capped",
        _CLIPPING,
        "norm capped at this number of clipping norms",
        sizes=(20.0, 100.0, 1000.0),
        required=20.0,
        factor=capped,
    ),
    Fault("overflow", _CLIPPING, "norm overflows in half precision", factor=overflowing),
    Fault("forgotten-bias", _CLIPPING, "norm without a bias of three numbers", factor=without_last),
    Fault(
        "short-scaled",
        _CLIPPING,
        "gradients shorter than the clipping norm multiplied by this factor",
        sizes=(8.0, 3.0, 1.8),
        required=8.0,
        factor=short_times,
    ),
    Fault(
        "larger-limit",
        _CLIPPING,
        "clipped at this number of clipping norms",
        sizes=(1.5, 1.2, 1.1, 1.05),
        required=1.5,
        factor=larger_limit,
    ),
    Fault(
        "left-over",
        _SUMS,
        "this share of the last sum is left over",
        sizes=(1.0, 0.5, 0.2, 0.1),
        required=0.2,
        after=left_over,
    ),
    Fault(
        "raw-added",
        _SUMS,
        "this share of the raw gradient is added after the noise",
        sizes=(0.3, 0.1, 0.05),
        required=0.1,
        observers=("step", "hooks", "ghost", "layer", "jax"),
        after=raw_added,
    ),
    Fault(
        "bypass",
        _SUMS,
        "backward pass without the private criterion",
        observers=("ghost",),
        loop="bypass",
    ),
    Fault("doubled", _SUMS, "each batch is accumulated twice", loop="doubled"),
    Fault("two-rows", _SUMS, "two rows per example, each clipped alone", loop="two rows"),
    Fault("padding", _SUMS, "batches are filled up with copies", observers=_LOOPS, loop="padding"),
    Fault("shuffled", _SAMPLING, "shuffled batches of a fixed size", observers=_LOOPS, batches=shuffled),
    Fault("same-epochs", _SAMPLING, "the same batches in every epoch", observers=_LOOPS, batches=same_epochs),
    Fault(
        "replacement",
        _SAMPLING,
        "examples drawn with replacement",
        observers=_LOOPS,
        batches=with_replacement,
    ),
    Fault("duplicates", _SAMPLING, "an example twice in a batch", observers=_LOOPS, batches=duplicates),
    Fault("two-batches", _SAMPLING, "two Poisson batches per step", observers=_LOOPS, loop="two batches"),
    Fault("weighted", _SAMPLING, "weighted sampling", observers=_LOOPS, batches=weighted),
)

TWINS = (
    Fault("correct", "", "the library's own code (steps: correct code of a developer)"),
    Fault(
        "bf16-release",
        "",
        "the release is stored in bfloat16",
        rounded=lambda release: release.astype(ml_dtypes.bfloat16).astype(np.float32),
    ),
    Fault(
        "more-noise",
        "",
        "noise 1.3 times the claim",
        noise=lambda draw, _: 1.3 * draw.normal(),
    ),
)
"""Correct training runs, of which nothing may be reported."""
