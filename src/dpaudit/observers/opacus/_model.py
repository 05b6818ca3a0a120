"""Gradients of examples, found apart from the library: what canaries are made with, and looked for along."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from dpaudit._torch.crafting import Examples
from dpaudit.errors import InputError

__all__ = ["Model"]

_CHUNK = 16  # canaries whose gradients are found together
_HOOKS = ("_forward_hooks", "_backward_hooks")


class Model:
    """The model inside of what ``make_private`` returned, and the loss of each example."""

    def __init__(self, optimizer: DPOptimizer, module: nn.Module, criterion: Callable[..., Any]) -> None:
        self.module = module._module if isinstance(module, AbstractGradSampleModule) else module
        self._criterion = getattr(criterion, "criterion", criterion)  # ghost clipping has it inside
        self._names = _names(self.module, optimizer)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Of each example by itself, so that it does not matter whether the loss is a mean or a sum."""
        pairs = zip(outputs.split(1), targets.split(1), strict=True)  # type: ignore[no-untyped-call]
        return torch.stack([self._criterion(*pair).reshape(()) for pair in pairs])

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """In here the library does not see what the model does."""
        before = [(part, name, getattr(part, name)) for part in self.module.modules() for name in _HOOKS]
        for part, name, _ in before:
            setattr(part, name, OrderedDict())
        try:
            yield
        finally:
            for part, name, hooks in before:
                setattr(part, name, hooks)

    def gradients(self, examples: Examples) -> list[Tensor]:
        """For each parameter of the optimizer: examples x its numbers."""
        values = dict(self.module.named_parameters())
        parameters = {name: values[name].detach() for name in self._names}
        each: Any = vmap(
            grad(self._loss_of_one), in_dims=(None, 0, 0), randomness="different", chunk_size=_CHUNK
        )
        with self.without_hooks(), torch.random.fork_rng(devices=[]):
            found = each(parameters, examples.inputs, examples.targets)
        return [found[name].flatten(1) for name in self._names]

    def _loss_of_one(self, parameters: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        outputs = functional_call(self.module, parameters, (one[None],))
        return self.loss(outputs, target[None])[0]


def _names(module: nn.Module, optimizer: DPOptimizer) -> list[str]:
    """The names of the optimizer's parameters, in its order."""
    known = {id(value): name for name, value in module.named_parameters()}
    missing = sum(id(parameter) not in known for parameter in optimizer.params)
    if missing:
        raise InputError(
            f"Expected module to be the model of the optimizer, but {missing} of the optimizer's "
            f"{len(optimizer.params)} parameters are not in it."
        )
    return [known[id(parameter)] for parameter in optimizer.params]
