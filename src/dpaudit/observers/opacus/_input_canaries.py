"""Input canaries of Opacus: examples that join a step through the model, the loss and the clipping.

:func:`hold_out` splits off the examples that canaries are made from. :meth:`InputCanaries.add_to_sum` is the
place where such a canary joins the sum: a :class:`BackwardPass` runs the library's own code on it. What a
canary is scored along is its gradient, which an :class:`UnwrappedModel` finds apart from the library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils.data import Subset

from dpaudit._torch import HeldOutData, tensor_fingerprints
from dpaudit._torch._crafting import CanarySequence, Crafting, Examples, loss_of_one
from dpaudit._types import IntArray
from dpaudit.canaries import Coins, InputCanary, split_indices
from dpaudit.errors import InputError
from dpaudit.observers._patching import attribute_restored
from dpaudit.observers.opacus._clipping import PerSampleClip, flat, restored, summed
from dpaudit.observers.opacus._gradient_canaries import CanaryProjection, StepCanaries

_CRAFTING = 4  # a purpose of randomness, besides those of Draws and of the positions of entries
_READ_CHUNK = 1_000  # examples of a data set that are in memory together
_GRADIENT_CHUNK = 16  # canaries whose gradients are found together
_MIN_NORM = 1e-12  # in clipping norms: a shorter gradient has no direction to score along
_SUM_TOLERANCE = 1e-3  # of the largest numbers, far above the rounding of sums
_PASS_ATTRIBUTES = ("grad", "grad_sample", "summed_grad", "_norm_sample")  # what a pass leaves on parameters
_HOOKS = ("_forward_hooks", "_backward_hooks")


def hold_out(
    data: Any, num_held_out: int, *, seed: int = 0, num_classes: int | None = None
) -> tuple[Subset[Any], HeldOutData]:
    """Split ``num_held_out`` random examples off; return the rest of the data, and those examples.

    ``data`` has a length and pairs of an input and its class. Train on the first part. Held-out examples that
    it has too, as duplicates, are left out of the second. Classes are those that the data have, unless
    ``num_classes`` says how many there are.
    """
    kept, held = split_indices(len(data), num_held_out, seed)
    rest = Subset(data, kept.tolist())
    inputs, targets = _stacked([data[index] for index in held.tolist()])
    known, largest = _fingerprints_and_classes(rest)
    count = 1 + max(largest, int(targets.max())) if num_classes is None else num_classes
    return rest, HeldOutData.split_off(inputs, targets, count).apart_from(known)


def check_held_out(data: HeldOutData, loader: Any) -> None:
    """Raise if held-out examples are among the data of ``loader``."""
    if not hasattr(loader, "dataset"):
        raise InputError(
            "Expected loader=..., the one that PrivacyEngine.make_private returned: held-out examples must "
            f"not be among its data; got {type(loader).__name__}."
        )
    data.require_apart(_fingerprints_and_classes(loader.dataset)[0], "the data of loader")


def _fingerprints_and_classes(data: Any) -> tuple[set[int], int]:
    """Return the fingerprints of all inputs, and the largest class."""
    found: set[int] = set()
    largest = 0
    pairs = (data[index] for index in range(len(data)))
    while chunk := list(islice(pairs, _READ_CHUNK)):
        inputs, targets = _stacked(chunk)
        found.update(tensor_fingerprints(inputs))
        largest = max(largest, int(targets.max()))
    return found, largest


def _stacked(pairs: list[Any]) -> tuple[Tensor, Tensor]:
    try:
        inputs, targets = zip(*((one, float(target)) for one, target in pairs), strict=True)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(
            f"Expected data of pairs of an input and its class, got a {type(pairs[0]).__name__} that is none."
        ) from error
    classes = torch.as_tensor(targets)
    if bool((classes != classes.round()).any()):
        raise InputError(f"Expected classes that are whole numbers, got {targets[0]:g}.")
    return torch.stack([torch.as_tensor(one) for one in inputs]), classes.long()


class InputCanaries(StepCanaries):
    """Examples, made before the first step and again whenever the canary is due.

    The direction of a canary is its gradient at the weights of the step, found apart from the library and
    clipped to the norm that the optimizer claims. What joins the sum is what the library makes of it.
    A score is what was released along the direction over its squared length, without the batch and without
    the other canaries: 1 where the canary is, and more where it was not clipped.
    """

    def __init__(
        self,
        optimizer: DPOptimizer,
        canary: InputCanary,
        coins: Coins,
        *,
        model: UnwrappedModel,
        backward: BackwardPass,
        data: HeldOutData,
    ) -> None:
        self._optimizer, self._model, self._backward = optimizer, model, backward
        self._data = data.to(optimizer.params[0].device)
        self._canaries = CanarySequence(canary, coins, _CRAFTING)
        self.num_canaries = coins.num_canaries

    def add_to_sum(self, index: int, members: IntArray, *, inserts: bool) -> CanaryProjection:
        assert inserts  # several processes are refused
        examples = self._canaries.at(index, self._craft)
        directions = _clipped(self._model.gradients(examples), self._optimizer)
        numbers = torch.as_tensor(members, device=directions.device)
        each = directions.new_zeros(0, directions.shape[1])
        if len(numbers):
            before = summed(self._optimizer)
            each = self._backward.add_to_sum(Examples(examples.inputs[numbers], examples.targets[numbers]))
            _check_independent(summed(self._optimizer) - before, each, before)
        return GradientProjection.of(directions, numbers, each, float(self._optimizer.max_grad_norm))

    def _craft(self, canary: InputCanary, num_canaries: int, rng: np.random.Generator) -> Examples:
        crafting = Crafting(
            model=self._model.module,
            loss=self._model.loss,
            data=self._data,
            max_grad_norm=float(self._optimizer.max_grad_norm),
        )
        with self._model.without_hooks():
            return crafting(canary, num_canaries, rng)


def _clipped(parts: list[Tensor], optimizer: DPOptimizer) -> Tensor:
    """Clip gradients as the optimizer claims to: each layer by its own norm, or all layers together."""
    norms = getattr(optimizer, "max_grad_norms", None)
    if norms is None:
        parts, norms = [torch.cat(parts, dim=1)], [optimizer.max_grad_norm]
    clipped = []
    for rows, norm in zip(parts, map(float, norms), strict=True):
        lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        clipped.append(rows * (norm / lengths.clamp(min=norm)))
    return torch.cat(clipped, dim=1)


def _check_independent(together: Tensor, each: Tensor, batch: Tensor) -> None:
    """Raise if what a canary adds depends on the others: then they cannot be subtracted from its score."""
    largest = max(float(each.abs().max()), float(batch.abs().max()))
    off = float((together - each.sum(dim=0)).abs().max())
    if off > _SUM_TOLERANCE * largest * len(each):
        raise InputError(
            f"Expected each example to be clipped by itself, but {len(each)} canaries together add another "
            f"sum than one by one, off by {off:.3g}: examples act on each other (replay_step shows that), or "
            "the model has chance of its own, such as dropout."
        )


@dataclass(frozen=True, eq=False)
class GradientProjection(CanaryProjection):
    """The gradient of each canary, as long as the claim lets it be."""

    directions: Tensor  # canaries x parameters
    squares: Tensor
    norm: float
    others: Tensor

    @classmethod
    def of(cls, directions: Tensor, members: Tensor, each: Tensor, norm: float) -> GradientProjection:
        """Project where ``members``, by number, added ``each`` its row; one may add up to ``norm``."""
        lengths = torch.linalg.vector_norm(directions, dim=1)
        usable = lengths.isfinite() & (lengths > _MIN_NORM * norm)
        directions = directions.masked_fill(~usable[:, None], 0.0)
        squares = torch.where(usable, lengths.square(), 1.0)
        of_all = directions @ each.sum(dim=0)
        own = torch.zeros_like(of_all).index_copy_(0, members, (directions[members] * each).sum(dim=1))
        return cls(directions, squares, norm, (of_all - own) / squares)

    def project(self, vector: Tensor) -> Tensor:
        return self.directions @ vector / self.squares


class BackwardPass(ABC):
    """Finds gradients of examples, clips them and adds them to ``p.summed_grad`` with the library's code.

    Everything else is restored, torch's random state too.
    """

    def __init__(self, optimizer: DPOptimizer, module: Any, criterion: Callable[..., Any]) -> None:
        self._optimizer, self._module, self._criterion = optimizer, module, criterion

    @abstractmethod
    def add_to_sum(self, examples: Examples) -> Tensor:
        """Add all of them; return what each adds by itself, examples x parameters."""

    def _backward(self, examples: Examples) -> None:
        with torch.enable_grad():
            self._criterion(self._module(examples.inputs), examples.targets).backward()

    @contextmanager
    def _without_side_effects(self) -> Iterator[None]:
        """Restore parameters, counters and the random state after a pass."""
        parameters = self._optimizer.params
        with ExitStack() as undo:
            undo.enter_context(torch.random.fork_rng(devices=[]))
            for owner in (self._optimizer, self._module):
                undo.enter_context(restored(owner))
            for name in _PASS_ATTRIBUTES:
                undo.enter_context(attribute_restored(parameters, name))
            for parameter in parameters:
                parameter.grad = parameter.grad_sample = parameter.summed_grad = None
            yield


class PerSampleBackward(BackwardPass):
    """The model finds a gradient for each example, and the optimizer clips them: hooks, functorch, ew."""

    def add_to_sum(self, examples: Examples) -> Tensor:
        clip, rows = PerSampleClip(self._optimizer), self._rows(examples)
        with self._without_side_effects():
            each = [self._clipped(clip, row) for row in rows.split(1)]  # type: ignore[no-untyped-call]
        clip.add_to_sum(rows)
        return torch.stack(each)

    def _rows(self, examples: Examples) -> Tensor:
        with self._without_side_effects():
            self._backward(examples)
            parts: list[Any] = [getattr(one, "grad_sample", None) for one in self._optimizer.params]
        if any(part is None or len(part) != len(examples) for part in parts):
            raise InputError(
                "Expected module to find a gradient for each example and each parameter of the optimizer; it "
                "did not: pass the model that make_private returned, in training mode."
            )
        return torch.cat([part.detach().flatten(1) for part in parts], dim=1)

    def _clipped(self, clip: PerSampleClip, row: Tensor) -> Tensor:
        for parameter in self._optimizer.params:
            parameter.summed_grad = None
        clip.add_to_sum(row)
        return summed(self._optimizer)


class GhostBackward(BackwardPass):
    """The loss finds norms and clips in two backward passes, as it does for a batch."""

    def add_to_sum(self, examples: Examples) -> Tensor:
        pairs = zip(examples.inputs.split(1), examples.targets.split(1), strict=True)  # type: ignore[no-untyped-call]
        each = [flat(self._clipped_sum(Examples(*pair))) for pair in pairs]
        total = self._clipped_sum(examples)
        with attribute_restored(self._optimizer.params, "grad"):
            for parameter, part in zip(self._optimizer.params, total, strict=True):
                parameter.grad = part
            self._optimizer.accumulate()
        return torch.stack(each)

    def _clipped_sum(self, examples: Examples) -> list[Tensor]:
        with self._without_side_effects():
            self._backward(examples)
            return [parameter.grad for parameter in self._optimizer.params]


class UnwrappedModel:
    """The model inside of what ``make_private`` returned, and the loss of each example."""

    def __init__(self, optimizer: DPOptimizer, module: nn.Module, criterion: Callable[..., Any]) -> None:
        self.module = module._module if isinstance(module, AbstractGradSampleModule) else module
        self._criterion = getattr(criterion, "criterion", criterion)  # ghost clipping has it inside
        self._names = _parameter_names(self.module, optimizer)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each example by itself, so that it may be a mean or a sum."""
        pairs = zip(outputs.split(1), targets.split(1), strict=True)  # type: ignore[no-untyped-call]
        return torch.stack([self._criterion(*pair).reshape(()) for pair in pairs])

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Remove the library's hooks from the model for a while."""
        before = [(part, name, getattr(part, name)) for part in self.module.modules() for name in _HOOKS]
        for part, name, _ in before:
            setattr(part, name, OrderedDict())
        try:
            yield
        finally:
            for part, name, hooks in before:
                setattr(part, name, hooks)

    def gradients(self, examples: Examples) -> list[Tensor]:
        """Return examples x entries for each parameter of the optimizer."""
        values = dict(self.module.named_parameters())
        parameters = {name: values[name].detach() for name in self._names}
        one = grad(partial(loss_of_one, self.module, self.loss))
        each: Any = vmap(one, in_dims=(None, 0, 0), randomness="different", chunk_size=_GRADIENT_CHUNK)
        with self.without_hooks(), torch.random.fork_rng(devices=[]):
            found = each(parameters, examples.inputs, examples.targets)
        return [found[name].flatten(1) for name in self._names]


def _parameter_names(module: nn.Module, optimizer: DPOptimizer) -> list[str]:
    """Return the names of the optimizer's parameters, in its order."""
    known = {id(value): name for name, value in module.named_parameters()}
    missing = sum(id(parameter) not in known for parameter in optimizer.params)
    if missing:
        raise InputError(
            f"Expected module to be the model of the optimizer, but {missing} of the optimizer's "
            f"{len(optimizer.params)} parameters are not in it."
        )
    return [known[id(parameter)] for parameter in optimizer.params]
