"""Clipping with Opacus' own code, which clips per-example gradients and adds them to ``p.summed_grad``.

:func:`clip_for` returns an adapter for the clipping of an optimizer, or raises if it cannot be observed. The
row of a canary takes the same path as the rows of examples, and changes nothing but the sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping, FSDPOptimizerFastGradientClipping
from opacus.optimizers.ddp_perlayeroptimizer import DistributedPerLayerOptimizer
from torch import Tensor

from dpaudit.errors import InputError
from dpaudit.observers._patching import attribute_restored

_UNSUPPORTED: dict[type, str] = {
    DistributedPerLayerOptimizer: "it clips and adds noise during the backward pass, one layer at a time; "
    "make_private returns a SimpleDistributedPerLayerOptimizer, which can be observed",
    FSDPOptimizerFastGradientClipping: "no process holds a whole gradient; observe the same training code "
    'with grad_sample_mode="ghost" on a smaller model',
}


class OpacusClip(ABC):
    """A way to add clipped rows to ``p.summed_grad`` with the library's own code.

    Everything else that this code changes is restored.
    """

    not_covered: tuple[str, ...] = ()

    @abstractmethod
    def add_to_sum(self, rows: Tensor) -> None:
        """Clip and add ``rows`` (gradients x parameters)."""

    @abstractmethod
    def batch_sizes(self) -> list[int]:
        """Return the number of examples in each backward pass that the optimizer is about to clip."""

    @abstractmethod
    def pending_batch_sizes(self) -> list[int]:
        """Return the same between steps, for the passes that have not been clipped yet."""


class PerSampleClip(OpacusClip):
    """Clipping of materialized per-example gradients by the optimizer: hooks, functorch, ew."""

    def __init__(self, optimizer: DPOptimizer) -> None:
        self._optimizer = optimizer

    def add_to_sum(self, rows: Tensor) -> None:
        parameters = self._optimizer.params
        with restored(self._optimizer), attribute_restored(parameters, "grad_sample"):
            for parameter, part in split_like(rows, parameters):
                parameter.grad_sample = part.to(parameter.dtype)
            self._optimizer.clip_and_accumulate()

    def batch_sizes(self) -> list[int]:
        samples = getattr(self._optimizer.params[0], "grad_sample", None)
        parts = samples if isinstance(samples, list) else [] if samples is None else [samples]
        return [len(part) for part in parts if not hasattr(part, "_processed")]

    def pending_batch_sizes(self) -> list[int]:
        return self.batch_sizes()


class GhostClip(OpacusClip):
    """Ghost clipping: the model computes norms and reweights the loss; canaries are added after the norms."""

    not_covered = (
        "ghost clipping computes norms from activations, which gradient canaries do not have: a layer whose "
        "norm is computed incorrectly is not detected",
    )

    def __init__(self, optimizer: DPOptimizer, module: Any) -> None:
        self._optimizer, self._module = optimizer, module

    def add_to_sum(self, rows: Tensor) -> None:
        own, trainable = self._optimizer.params, self._module.trainable_parameters
        with restored(self._module), attribute_restored(trainable, "_norm_sample"):
            for parameter in trainable:
                parameter._norm_sample = rows.new_zeros(len(rows))
            for parameter, part in split_like(rows, own):
                parameter._norm_sample = part.to(parameter.dtype).flatten(1).norm(dim=1)
            weights = self._module.get_clipping_coef()
        with attribute_restored(own, "grad"):
            for parameter, part in split_like(weights.to(rows.dtype) @ rows, own):
                parameter.grad = part.to(parameter.dtype)
            self._optimizer.accumulate()

    def batch_sizes(self) -> list[int]:
        norms = self._module._per_sample_gradient_norms
        return [] if norms is None else [len(norms)]

    def pending_batch_sizes(self) -> list[int]:
        return []  # norms remain after use


def clip_for(optimizer: Any, module: Any) -> OpacusClip:
    """Return an adapter for the clipping of ``optimizer``, or raise an error if it cannot be observed."""
    if not isinstance(optimizer, DPOptimizer):
        raise InputError(
            "Expected the optimizer that PrivacyEngine.make_private returned, got a "
            f"{type(optimizer).__name__}, which is not private."
        )
    for kind, reason in _UNSUPPORTED.items():
        if isinstance(optimizer, kind):
            raise InputError(
                f"Expected an optimizer that can be observed, got a {type(optimizer).__name__}: {reason}."
            )
    if not isinstance(optimizer, DPOptimizerFastGradientClipping):
        return PerSampleClip(optimizer)
    if not hasattr(module, "get_clipping_coef"):
        raise InputError(
            "Expected module=..., the model that PrivacyEngine.make_private returned, which does the ghost "
            f"clipping; got {type(module).__name__}."
        )
    return GhostClip(optimizer, module)


def flat(parts: Sequence[Tensor]) -> Tensor:
    """Return the concatenation of all parts as one vector."""
    return torch.cat([part.detach().reshape(-1) for part in parts])


def summed(optimizer: DPOptimizer) -> Tensor:
    """Return the sum of the clipped gradients as one vector."""
    return flat([parameter.summed_grad for parameter in optimizer.params])


def split_like(vectors: Tensor, parameters: Sequence[Any]) -> Iterator[tuple[Any, Tensor]]:
    """Yield each parameter with its slice of the last dimension, in the parameter's shape."""
    parts = torch.split_with_sizes(vectors, [parameter.numel() for parameter in parameters], dim=-1)
    for parameter, part in zip(parameters, parts, strict=True):
        yield parameter, part.reshape(*vectors.shape[:-1], *parameter.shape)


@contextmanager
def restored(owner: Any) -> Iterator[None]:
    """Restore all attributes of ``owner`` at the end, such as counters of unclipped examples."""
    # the code called inside changes only tensors in place
    before = {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in vars(owner).items()
    }
    try:
        yield
    finally:
        vars(owner).update(before)
