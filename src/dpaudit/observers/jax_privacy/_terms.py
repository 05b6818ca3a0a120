"""What a privatizer and a sampler of batches say of the training."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import optax
from jax_privacy.batch_selection import CyclicPoissonSampling
from jax_privacy.matrix_factorization.streaming_matrix import StreamingMatrix

from dpaudit.errors import InputError
from dpaudit.observers.jax_privacy._mark import require_unmarked

__all__ = ["noise_of", "rate_of"]

_ENOUGH = 16  # steps in which noise that steps share shows


def noise_of(privatizer: Any) -> float | None:
    """The standard deviation of the noise of each step, if it is one of the library's privatizers."""
    if not isinstance(privatizer, optax.GradientTransformation):
        raise InputError(
            f"Expected a privatizer of jax_privacy.noise_addition, got a {type(privatizer).__name__}."
        )
    update = privatizer.update
    require_unmarked(update, "privatizer")
    if getattr(update, "__module__", "").startswith("optax"):
        raise InputError(
            f"Expected the privatizer alone, got a transformation of {update.__module__}: give the "
            "privatizer to observe(), and chain what it returns."
        )
    known = inspect.getclosurevars(update).nonlocals if inspect.isfunction(update) else {}
    if not {"stddev", "noising_matrix"} <= set(known):  # one that somebody wrote: it may use any names
        return None
    return float(known["stddev"]) * _factor(known["noising_matrix"])


def _factor(matrix: Any) -> float:
    """What multiplies the noise of every step alike."""
    dense = np.asarray(matrix.materialize(_ENOUGH) if isinstance(matrix, StreamingMatrix) else matrix)
    if not np.allclose(dense, dense[0, 0] * np.eye(len(dense))):
        raise InputError(
            "Expected noise that is independent in each step, as of gaussian_privatizer, got noise of a "
            "matrix factorization: a claim of DP-SGD does not describe it."
        )
    return float(dense[0, 0])


def rate_of(sampling: Any) -> float:
    """The sample rate of a strategy of ``jax_privacy.batch_selection``."""
    plain = isinstance(sampling, CyclicPoissonSampling) and sampling.cycle_length == 1
    if not plain or sampling.truncated_batch_size is not None:
        raise InputError(
            f"Expected Poisson sampling in one cycle without truncation, got {sampling!r}: pass "
            "sample_rate=... instead."
        )
    return float(sampling.sampling_prob)
