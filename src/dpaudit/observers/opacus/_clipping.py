"""The places of Opacus where a per-example gradient is clipped and added.

Which of the optimizers of Opacus can be observed, and where each of them clips.
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

_NOT_THERE = object()


class Clip(ABC):
    """Clips rows and adds them to ``p.summed_grad`` with the library's own code.

    All else that this code changes is put back as it was.
    """

    not_covered: tuple[str, ...] = ()

    def __init__(self, optimizer: DPOptimizer) -> None:
        self._optimizer = optimizer

    @abstractmethod
    def add(self, rows: Tensor) -> None:
        """``rows`` are gradients x parameters, not clipped yet."""

    @abstractmethod
    def passes(self) -> list[int]:
        """How many examples each of the backward passes had that the optimizer clips now."""

    def pending(self) -> list[int]:
        """The same between steps, if there are passes that it is yet to clip."""
        return self.passes()

    def _pieces(self, flat: Tensor) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
        """Each parameter with its part of the last dimension, in the parameter's shape."""
        parameters = self._optimizer.params
        parts = torch.split_with_sizes(flat, [parameter.numel() for parameter in parameters], dim=-1)
        for parameter, part in zip(parameters, parts, strict=True):
            yield parameter, part.reshape(*flat.shape[:-1], *parameter.shape).to(parameter.dtype)


class RowClip(Clip):
    """Per-example gradients exist, and the optimizer clips them: hooks, functorch, ew."""

    def add(self, rows: Tensor) -> None:
        with kept(self._optimizer), attribute_kept(self._optimizer.params, "grad_sample"):
            for parameter, part in self._pieces(rows):
                parameter.grad_sample = part  # type: ignore[attr-defined]  # a name of Opacus
            self._optimizer.clip_and_accumulate()

    def passes(self) -> list[int]:
        samples = getattr(self._optimizer.params[0], "grad_sample", None)
        parts = samples if isinstance(samples, list) else [] if samples is None else [samples]
        return [len(part) for part in parts if not hasattr(part, "_processed")]


class GhostClip(Clip):
    """The model finds norms without gradients and weighs the loss: canaries join after the norms."""

    not_covered = (
        "ghost clipping finds the norms of examples from activations, which canaries that are gradients do "
        "not have: a wrong norm of a layer does not show",
    )

    def __init__(self, optimizer: DPOptimizer, module: Any) -> None:
        super().__init__(optimizer)
        self._module = module

    def add(self, rows: Tensor) -> None:
        parameters = self._module.trainable_parameters
        with kept(self._module), attribute_kept(parameters, "_norm_sample"):
            for parameter in parameters:
                parameter._norm_sample = rows.new_zeros(len(rows))
            for parameter, part in self._pieces(rows):
                parameter._norm_sample = part.flatten(1).norm(dim=1)  # type: ignore[attr-defined]
            weights = self._module.get_clipping_coef()
        with attribute_kept(self._optimizer.params, "grad"):
            for parameter, part in self._pieces(weights.to(rows.dtype) @ rows):
                parameter.grad = part
            self._optimizer.accumulate()

    def passes(self) -> list[int]:
        norms = self._module._per_sample_gradient_norms
        return [] if norms is None else [len(norms)]

    def pending(self) -> list[int]:
        return []  # norms stay after they were used


@contextmanager
def kept(owner: Any) -> Iterator[None]:
    """Counters of ``owner``, such as how many examples were not clipped, stay as they are."""
    before = {name: _copied(value) for name, value in vars(owner).items()}
    try:
        yield
    finally:
        vars(owner).update(before)


def _copied(value: Any) -> Any:
    """Only tensors are changed in place by what is called here."""
    return value.clone() if isinstance(value, Tensor) else value


@contextmanager
def attribute_kept(owners: Sequence[Any], name: str) -> Iterator[None]:
    """What each of them has by this name, or that it has nothing, comes back at the end."""
    before = [getattr(owner, name, _NOT_THERE) for owner in owners]
    try:
        yield
    finally:
        for owner, value in zip(owners, before, strict=True):
            if value is not _NOT_THERE:
                setattr(owner, name, value)
            elif hasattr(owner, name):
                delattr(owner, name)


_NO_PLACE: dict[type, str] = {
    DistributedPerLayerOptimizer: "it clips and adds noise inside of the backward pass, a layer at a time; "
    "make_private gives a SimpleDistributedPerLayerOptimizer, which can be observed",
    FSDPOptimizerFastGradientClipping: "no process has a whole gradient; observe the same training with "
    'grad_sample_mode="ghost" on a smaller model',
}


def clip_of(optimizer: Any, module: Any) -> Clip:
    """The place where canaries join, or a sentence that says why there is none."""
    if not isinstance(optimizer, DPOptimizer):
        raise InputError(
            "Expected the optimizer that PrivacyEngine.make_private returned, got a "
            f"{type(optimizer).__name__}, which is not private."
        )
    for kind, reason in _NO_PLACE.items():
        if isinstance(optimizer, kind):
            raise InputError(
                f"Expected an optimizer that can be observed, got a {type(optimizer).__name__}: {reason}."
            )
    if not isinstance(optimizer, DPOptimizerFastGradientClipping):
        return RowClip(optimizer)
    if not hasattr(module, "get_clipping_coef"):
        raise InputError(
            "Expected module=..., the model that PrivacyEngine.make_private returned: with ghost clipping "
            f"it clips, and not the optimizer; got {type(module).__name__}."
        )
    return GhostClip(optimizer, module)
