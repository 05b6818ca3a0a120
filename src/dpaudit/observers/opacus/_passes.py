"""Examples of an audit in the library's own passes: from the model to the clipped sum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor

from dpaudit._torch.crafting import Examples
from dpaudit.errors import InputError
from dpaudit.observers.opacus._clips import RowClip, attribute_kept, kept

__all__ = ["GhostPass", "Pass", "RowPass"]

_OWN = ("grad", "grad_sample", "summed_grad", "_norm_sample")  # what a pass leaves on parameters


class Pass(ABC):
    """Finds gradients of examples, clips them and adds them to ``p.summed_grad`` by the library's code.

    All else is put back as it was, torch's chance too.
    """

    def __init__(self, optimizer: DPOptimizer, module: Any, criterion: Callable[..., Any]) -> None:
        self._optimizer, self._module, self._criterion = optimizer, module, criterion

    @abstractmethod
    def join(self, examples: Examples) -> Tensor:
        """Add all of them; returns what each adds alone, examples x parameters."""

    def _backward(self, examples: Examples) -> None:
        with torch.enable_grad():
            self._criterion(self._module(examples.inputs), examples.targets).backward()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """A pass in here leaves no trace, neither on parameters nor in counters nor in chance."""
        parameters = self._optimizer.params
        with ExitStack() as undo:
            undo.enter_context(torch.random.fork_rng(devices=[]))
            for owner in (self._optimizer, self._module):
                undo.enter_context(kept(owner))
            for name in _OWN:
                undo.enter_context(attribute_kept(parameters, name))
            for parameter in parameters:
                parameter.grad = parameter.grad_sample = parameter.summed_grad = None
            yield


class RowPass(Pass):
    """The model finds a gradient for each example, and the optimizer clips them: hooks, functorch, ew."""

    def join(self, examples: Examples) -> Tensor:
        clip, rows = RowClip(self._optimizer), self._rows(examples)
        with self._aside():
            alone = [self._alone(clip, row) for row in rows.split(1)]  # type: ignore[no-untyped-call]
        clip.add(rows)
        return torch.stack(alone)

    def _rows(self, examples: Examples) -> Tensor:
        with self._aside():
            self._backward(examples)
            parts: list[Any] = [getattr(one, "grad_sample", None) for one in self._optimizer.params]
        if any(part is None or len(part) != len(examples) for part in parts):
            raise InputError(
                "Expected module to find a gradient for each example and each parameter of the optimizer; it "
                "did not: pass the model that make_private returned, in training mode."
            )
        return torch.cat([part.detach().flatten(1) for part in parts], dim=1)

    def _alone(self, clip: RowClip, row: Tensor) -> Tensor:
        for parameter in self._optimizer.params:
            parameter.summed_grad = None
        clip.add(row)
        return _flat([parameter.summed_grad for parameter in self._optimizer.params])


class GhostPass(Pass):
    """The loss finds norms and clips in two backward passes, as it does for a batch."""

    def join(self, examples: Examples) -> Tensor:
        ones = zip(examples.inputs.split(1), examples.targets.split(1), strict=True)  # type: ignore[no-untyped-call]
        alone = [_flat(self._sum(Examples(*one))) for one in ones]
        total = self._sum(examples)
        with attribute_kept(self._optimizer.params, "grad"):
            for parameter, part in zip(self._optimizer.params, total, strict=True):
                parameter.grad = part
            self._optimizer.accumulate()
        return torch.stack(alone)

    def _sum(self, examples: Examples) -> list[Tensor]:
        with self._aside():
            self._backward(examples)
            return [parameter.grad for parameter in self._optimizer.params]


def _flat(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.detach().reshape(-1) for part in parts])
