"""Input canaries: examples that join a step through the model, the loss and the clipping of Opacus.

Gradients of examples, found apart from the library: what canaries are made with, and looked for along.
Examples of an audit in the library's own passes: from the model to the clipped sum. Examples of a torch data
set that its training does not get.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import Subset

from dpaudit._torch import HeldOutData, tensor_fingerprints
from dpaudit._torch._crafting import Crafting, Examples
from dpaudit._types import IntArray
from dpaudit.canaries import Coins, InputCanary, split_places
from dpaudit.errors import InputError
from dpaudit.observers.opacus._clipping import RowClip, attribute_kept, kept
from dpaudit.observers.opacus._gradient_canaries import Canaries, Look

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


_CRAFTING = 4  # a purpose of chance, besides those of Draws and of entries
_SHORTEST = 1e-12  # in clipping norms: along a gradient that is shorter nothing can be said
_ROOM = 1e-3  # of the largest numbers, far above the rounding of sums


@dataclass(frozen=True, eq=False)
class _Along(Look):
    """The gradient of each canary, as long as the claim lets it be."""

    directions: Tensor  # canaries x parameters
    squares: Tensor
    of_others: Tensor
    reach: float

    @classmethod
    def of(cls, directions: Tensor, joined: Tensor, alone: Tensor, reach: float) -> _Along:
        """Where ``joined`` canaries, by number, added ``alone`` each; ``reach`` is the most that one may."""
        norms = torch.linalg.vector_norm(directions, dim=1)
        can_tell = norms.isfinite() & (norms > _SHORTEST * reach)
        directions = directions.masked_fill(~can_tell[:, None], 0.0)
        squares = torch.where(can_tell, norms.square(), 1.0)
        of_all = directions @ alone.sum(dim=0)
        own = torch.zeros_like(of_all).index_copy_(0, joined, (directions[joined] * alone).sum(dim=1))
        return cls(directions, squares, (of_all - own) / squares, reach)

    def project(self, vector: Tensor) -> Tensor:
        return self.directions @ vector / self.squares

    @property
    def others(self) -> Tensor:
        return self.of_others


class InputCanaries(Canaries):
    """Examples, made before the first step and anew when it is time for it.

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
        model: Model,
        own: Pass,
        data: HeldOutData,
    ) -> None:
        self._optimizer, self._canary, self._coins = optimizer, canary, coins
        self._model, self._own = model, own
        self._data = data.to(optimizer.params[0].device)
        self._examples: Examples | None = None
        self._made_at: int | None = None
        self.num_canaries = coins.num_canaries

    def join(self, index: int, numbers: IntArray, *, inserts: bool) -> Look:
        assert inserts  # several processes are refused
        examples = self.examples(index)
        directions = _clipped(self._model.gradients(examples), self._optimizer)
        joined = torch.as_tensor(numbers, device=directions.device)
        alone = directions.new_zeros(0, directions.shape[1])
        if len(joined):
            before = self._sum()
            alone = self._own.join(Examples(examples.inputs[joined], examples.targets[joined]))
            _require_apart(self._sum() - before, alone, before)
        return _Along.of(directions, joined, alone, float(self._optimizer.max_grad_norm))

    def examples(self, index: int) -> Examples:
        """The canaries of a step."""
        if self._examples is None or self._canary.is_due(index, self._made_at):
            self._examples, self._made_at = self._craft(index), index
        return self._examples

    def _craft(self, index: int) -> Examples:
        crafting = Crafting(
            model=self._model.module,
            loss=self._model.loss,
            data=self._data,
            max_grad_norm=float(self._optimizer.max_grad_norm),
        )
        with self._model.without_hooks():
            return crafting(self._canary, self.num_canaries, self._coins.rng(index, _CRAFTING))

    def _sum(self) -> Tensor:
        parts: list[Tensor] = [parameter.summed_grad for parameter in self._optimizer.params]
        return torch.cat([part.reshape(-1) for part in parts])


def _clipped(parts: list[Tensor], optimizer: DPOptimizer) -> Tensor:
    """Gradients as the optimizer claims to clip them: each layer by its own norm, or all layers together."""
    norms = getattr(optimizer, "max_grad_norms", None)
    if norms is None:
        return _shortened(torch.cat(parts, dim=1), float(optimizer.max_grad_norm))
    layers = zip(parts, norms, strict=True)
    return torch.cat([_shortened(part, float(norm)) for part, norm in layers], dim=1)


def _shortened(rows: Tensor, norm: float) -> Tensor:
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    shortened: Tensor = rows * (norm / lengths.clamp(min=norm))
    return shortened


def _require_apart(together: Tensor, alone: Tensor, batch: Tensor) -> None:
    """What a canary adds must not depend on the others: else nobody can take them off."""
    largest = max(float(alone.abs().max()), float(batch.abs().max()))
    off = float((together - alone.sum(dim=0)).abs().max())
    if off > _ROOM * largest * len(alone):
        raise InputError(
            f"Expected each example to be clipped by itself, but {len(alone)} canaries together add another "
            f"sum than one by one, off by {off:.3g}: examples act on each other (replay_step shows that), or "
            "the model has chance of its own, such as dropout."
        )


_AT_ONCE = 1_000


def hold_out(
    data: Any, num_held_out: int, *, seed: int = 0, num_classes: int | None = None
) -> tuple[Subset[Any], HeldOutData]:
    """The data without ``num_held_out`` examples, drawn at random, and those examples.

    ``data`` has a length and pairs of an input and its class. Train on the first part. Held-out examples that
    it has too, as duplicates, are left out of the second. Classes are those that the data have, unless
    ``num_classes`` says how many there are.
    """
    kept, held = split_places(len(data), num_held_out, seed)
    rest = Subset(data, kept.tolist())
    inputs, targets = _stacked([data[place] for place in held.tolist()])
    known, largest = _seen(rest)
    count = 1 + max(largest, int(targets.max())) if num_classes is None else num_classes
    return rest, HeldOutData.split_off(inputs, targets, count).apart_from(known)


def require_apart(data: HeldOutData, loader: Any) -> None:
    """Refuse held-out examples that the loader draws, such as those of a batch."""
    if not hasattr(loader, "dataset"):
        raise InputError(
            "Expected loader=..., the one that PrivacyEngine.make_private returned: held-out examples must "
            f"not be among its data; got {type(loader).__name__}."
        )
    data.require_apart(_seen(loader.dataset)[0], "the data of loader")


def _seen(data: Any) -> tuple[set[int], int]:
    """The fingerprints of all inputs, and the largest class."""
    found: set[int] = set()
    largest = 0
    for pairs in _chunks(data[place] for place in range(len(data))):
        inputs, targets = _stacked(pairs)
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


def _chunks(pairs: Iterable[Any]) -> Iterator[list[Any]]:
    source = iter(pairs)
    while some := list(islice(source, _AT_ONCE)):
        yield some
