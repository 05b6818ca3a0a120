"""A fault and its injection into a training run: the parts of a correct run that it replaces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Shapes: TypeAlias = Sequence[tuple[int, ...]]

OBSERVERS = ("step", "func", "hooks", "ghost", "layer", "jax")
"""NumPy step, torch.func step, Opacus with hooks, ghost and per-layer clipping, JAX Privacy."""


@dataclass(frozen=True)
class NoiseDraw:
    """The noise of a whole run: ``num_steps`` vectors with standard deviation ``std``."""

    rng: np.random.Generator
    num_steps: int
    std: float
    sizes: tuple[int, ...]
    """The number of parameters of each leaf."""

    @property
    def shape(self) -> tuple[int, int]:
        """Steps x parameters."""
        return self.num_steps, sum(self.sizes)

    def normal(self) -> Array:
        """Return what a correct run adds: steps x parameters."""
        return self.std * self.rng.standard_normal(self.shape)

    def leaves(self) -> list[Array]:
        """Return the same, one array per leaf."""
        return np.split(self.normal(), np.cumsum(self.sizes)[:-1], axis=1)


@dataclass(frozen=True)
class BatchFacts:
    """What a step knows besides its sum; all of it is private."""

    size: Any
    expected: float
    max_row_norm: Any
    """The largest norm of a gradient before clipping, in clipping norms."""


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
    text: str
    family: str = ""
    sizes: tuple[Any, ...] = (None,)
    observers: Sequence[str] = OBSERVERS
    """The libraries in which the fault can exist."""
    required: Any = None
    """The size that must be caught, if it is not the largest."""
    noise: Callable[[NoiseDraw, Any], Array] | None = None
    std: Callable[[BatchFacts, Any], Any] | None = None
    factor: Callable[[Any, Any, Any, Any], Any] | None = None
    clip: Callable[[list[Any], Any, Any, Any], list[Any]] | None = None
    after: Callable[[Any, Any, Any], Any] | None = None
    rounded: Callable[[Any], Any] | None = None
    batches: Callable[[np.random.Generator, int, float, int], list[Array]] | None = None
    loop: str | None = None


class Injection:
    """A fault of one size in one training run; without a part of its own, it does what is correct.

    ``std`` is the standard deviation of correct noise, and ``leaves`` are the shapes of the parameters.
    """

    def __init__(
        self,
        fault: Fault,
        size: Any,
        *,
        std: float,
        num_steps: int,
        rng: np.random.Generator,
        leaves: Shapes,
    ) -> None:
        self.fault, self.size, self.std, self.num_steps, self.rng = fault, size, std, num_steps, rng
        self.sizes = tuple(int(np.prod(shape)) for shape in leaves)
        self.index = 0
        self.last_sum: Any = 0.0
        self._noise: Array | None = None

    @property
    def replaces_noise(self) -> bool:
        """Whether anything about the release differs, apart from the sum."""
        return any((self.fault.noise, self.fault.std, self.fault.after, self.fault.rounded))

    @property
    def replaces_clipping(self) -> bool:
        """Whether gradients are clipped in another way."""
        return any((self.fault.factor, self.fault.clip))

    def draw_noise(self) -> Array:
        """Return the noise of all steps in single precision: steps x parameters."""
        draw = NoiseDraw(self.rng, self.num_steps, self.std, self.sizes)
        noise = draw.normal() if self.fault.noise is None else self.fault.noise(draw, self.size)
        return noise.astype(np.float32)

    def noise_factor(self, batch: BatchFacts) -> Any:
        """Return the factor of the noise of a step with this batch."""
        return 1.0 if self.fault.std is None else self.fault.std(batch, self.size)

    def added(self, last_sum: Any, raw_sum: Any) -> Any:
        """Return what is added to a release."""
        return 0.0 if self.fault.after is None else self.fault.after(last_sum, raw_sum, self.size)

    def rounded(self, release: Any) -> Any:
        """Return the release as it is stored."""
        return release if self.fault.rounded is None else self.fault.rounded(release)

    def factor(self, norms: Any, limit: Any, xp: Any = np) -> Any:
        """Return clipping factors from the norms of leaves x rows."""
        if self.fault.factor is None:
            return clip_factors(flat_norms(norms, xp), limit, xp)
        return self.fault.factor(norms, limit, self.size, xp)

    def clipped(self, leaves: list[Any], limit: Any, xp: Any = np) -> list[Any]:
        """Return clipped rows, one array per leaf."""
        if self.fault.clip is not None:
            return self.fault.clip(leaves, limit, self.size, xp)
        norms = xp.stack([xp.sqrt((leaf * leaf).reshape(len(leaf), -1).sum(1)) for leaf in leaves])
        return scaled(leaves, self.factor(norms, limit, xp))

    def step(self, leaves: list[Array], *, max_grad_norm: float, expected_batch: float = 1.0) -> Array:
        """Return the release of the next step, as a flat vector: clip, sum, add noise."""
        if self._noise is None:
            self._noise = self.draw_noise()
        if self.fault.loop == "two rows":
            leaves = [np.concatenate([leaf, leaf]) for leaf in leaves]
        rows = _flat(leaves)
        total = _flat(self.clipped(leaves, max_grad_norm)).sum(axis=0)
        if self.fault.loop == "doubled":
            total = total + total
        max_row_norm = float(np.linalg.norm(rows, axis=1).max(initial=0.0)) / max_grad_norm
        noise = self._noise[self.index] * self.noise_factor(
            BatchFacts(len(rows), expected_batch, max_row_norm)
        )
        released = total + noise + self.added(self.last_sum, rows.sum(axis=0))
        self.index, self.last_sum = self.index + 1, total
        return np.asarray(self.rounded(released))


def _flat(leaves: list[Array]) -> Array:
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


def split_leaves(rows: Any, shapes: Shapes) -> list[Any]:
    """Split the last axis into leaves of these shapes."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
    pieces = np.split(rows, ends, axis=-1)
    return [piece.reshape(*rows.shape[:-1], *shape) for piece, shape in zip(pieces, shapes, strict=True)]


def clipped_sum(rows: Array, limit: float) -> Array:
    """Return the sum of rows that are clipped to this norm, which is correct."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray((rows / np.maximum(1.0, norms / limit)).sum(axis=0))


def flat_norms(norms: Any, xp: Any) -> Any:
    """Return the norm of each row from the norms of its leaves."""
    return xp.sqrt((norms * norms).sum(0))


def clip_factors(norms: Any, limit: Any, xp: Any) -> Any:
    """Return the factors that clip rows with these norms."""
    return xp.minimum(1.0, limit / (norms + 1e-6))


def scaled(leaves: list[Any], factors: Any) -> list[Any]:
    """Multiply the rows of each leaf by their factors."""
    return [leaf * factors.reshape(-1, *[1] * (leaf.ndim - 1)) for leaf in leaves]
