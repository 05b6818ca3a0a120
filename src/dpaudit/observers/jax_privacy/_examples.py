"""What input canaries start from, as arrays."""

from __future__ import annotations

import numpy as np

from dpaudit.canaries import Adversarial, Blank, Crafted, InputCanary, Mislabelled
from dpaudit.errors import InputError
from dpaudit.observers.jax_privacy._domain import Domain
from dpaudit.observers.jax_privacy._held_out import Given, HeldOutArrays

__all__ = ["first_examples", "require_examples"]


def require_examples(canary: InputCanary, data: object) -> None:
    """Whether canaries of this kind can be made from these data."""
    if isinstance(canary, Given):
        if data is not None:
            raise InputError("Expected no held_out with Given(...), which has examples of its own.")
        return
    if not isinstance(canary, Blank | Mislabelled | Adversarial | Crafted):
        raise InputError(
            "Expected canary to be Blank(), Mislabelled(), Adversarial(), Crafted() or Given(...), "
            f"got {canary!r}."
        )
    if not isinstance(data, HeldOutArrays):
        raise InputError(
            f"Expected held_out, the examples that hold_out() splits off, for {canary!r} to be made from, "
            f"got {data if data is None else type(data).__name__}."
        )
    if canary.looks_at_weights and not np.issubdtype(data.inputs.dtype, np.floating):
        raise InputError(
            f"Expected inputs of floating-point numbers for {canary!r}, which needs how the loss changes "
            f"with them, got {data.inputs.dtype}: use Mislabelled()."
        )


def first_examples(
    canary: InputCanary, data: HeldOutArrays | None, num_canaries: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """So many inputs and their classes, each from an example of its own while there are enough."""
    if isinstance(canary, Given):
        return np.asarray(canary.inputs), np.asarray(canary.targets)
    assert data is not None  # as required
    places = rng.choice(len(data), num_canaries, replace=num_canaries > len(data))
    inputs, targets = data.inputs[places], data.targets[places]
    if isinstance(canary, Blank):
        zeros = Domain.of(data.inputs).nearest(np.zeros_like(inputs))
        return zeros, rng.integers(0, data.num_classes, num_canaries).astype(targets.dtype)
    if isinstance(canary, Mislabelled):
        others = rng.integers(1, data.num_classes, num_canaries)
        return inputs, ((targets + others) % data.num_classes).astype(targets.dtype)
    return inputs, targets
