"""Input canaries for Opacus: examples that pass through the model, the loss and the clipping of a step.

:func:`hold_out` splits off the examples that canaries are made from. :meth:`InputCanaries.added` adds
canaries to the sum: a :class:`BackwardPass` runs the library's own code on them. A canary is scored along its
gradient, which an :class:`UnwrappedModel` computes without the library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils.data import Subset

from dpaudit._torch import HeldOutData, require_fitting, tensor_fingerprints
from dpaudit._torch._crafting import CanarySequence, Crafting, Examples, loss_of_one
from dpaudit._types import IntArray
from dpaudit.canaries import CanaryCoins, InputCanary, split_indices
from dpaudit.errors import InputError
from dpaudit.observers._arrays import attribute_restored
from dpaudit.observers.opacus._clipping import (
    CoordinateIndex,
    PerSampleClip,
    at_least_single,
    copied_sums,
    flat,
    precision,
    restored,
    summed,
)
from dpaudit.observers.opacus._gradient_canaries import CanaryProjection, StepCanaries
from dpaudit.observers.opacus._prepared import PreparedTraining

_CRAFTING = 4  # purpose of a random stream, besides those of CanaryPlan and of the positions of entries
_READ_CHUNK = 1_000  # examples of a data set that are in memory together
_GRADIENT_CHUNK = 16  # canaries whose gradients are computed together
_MIN_NORM = 1e-12  # in clipping norms: a shorter gradient has no direction to score along
_SUM_TOLERANCE = 1e-3  # relative to the largest entry, far above the rounding error of sums
_ULPS = 2.0  # the same in half precision: one rounding of each of two sums
_PASS_ATTRIBUTES = ("grad", "grad_sample", "summed_grad", "_norm_sample")  # set on parameters by a pass


def hold_out(
    data: Any, num_held_out: int, *, seed: int = 0, num_classes: int | None = None
) -> tuple[Subset[Any], HeldOutData]:
    """Split off random examples, from which input canaries are made.

    Args:
        data: A data set with a length, of pairs of an input and its class.
        num_held_out: How many to split off; duplicates of examples in the first part are dropped.
        seed: The seed of the choice.
        num_classes: The number of classes, by default that of the data.

    Returns:
        The data to train on, and the held-out examples.

    Example:
        ``rest, held_out = hold_out(data, 100)``

    """
    remaining, held = split_indices(len(data), num_held_out, seed)
    rest = Subset(data, remaining.tolist())
    inputs, targets = _stacked([data[index] for index in held.tolist()])
    fingerprints, largest = _fingerprints_and_classes(rest)
    count = 1 + max(largest, int(targets.max())) if num_classes is None else num_classes
    return rest, HeldOutData.split_off(inputs, targets, count).apart_from(fingerprints)


def _check_held_out(data: HeldOutData, loader: Any) -> None:
    """Raise if the data of ``loader`` include held-out examples."""
    if not hasattr(loader, "dataset"):
        raise InputError(
            "loader=..., the one that PrivacyEngine.make_private returned, is needed to check that its "
            f"data include no held-out example, got {type(loader).__name__}."
        )
    data.require_apart(_fingerprints_and_classes(loader.dataset)[0], "the data of loader")


def _fingerprints_and_classes(data: Any) -> tuple[set[int], int]:
    """Return the fingerprints of all inputs and the largest class."""
    fingerprints: set[int] = set()
    largest = 0
    pairs = (data[index] for index in range(len(data)))
    while chunk := list(islice(pairs, _READ_CHUNK)):
        inputs, targets = _stacked(chunk)
        fingerprints.update(tensor_fingerprints(inputs))
        largest = max(largest, int(targets.max()))
    return fingerprints, largest


def _stacked(pairs: list[Any]) -> tuple[Tensor, Tensor]:
    try:
        inputs, targets = zip(*((example, float(target)) for example, target in pairs), strict=True)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(
            f"The data must be pairs of an input and its class, got a {type(pairs[0]).__name__}."
        ) from error
    classes = torch.as_tensor(targets)
    if bool((classes != classes.round()).any()):
        raise InputError(f"Classes must be whole numbers, got {targets[0]:g}.")
    return torch.stack([torch.as_tensor(example) for example in inputs]), classes.long()


class InputCanaries(StepCanaries):
    """Examples crafted before the first step and again whenever the canary is due.

    The direction of a canary is its gradient at the weights of the step, computed without the library and
    clipped to the norm that the optimizer claims. The contribution to the sum is computed by the library.
    A score is the release projected onto the direction, divided by the squared norm of the direction, without
    the batch and the other canaries: 1 if the canary is present, and more if it was not clipped.
    """

    def __init__(
        self, training: PreparedTraining, canary: InputCanary, coins: CanaryCoins, data: HeldOutData
    ) -> None:
        self._optimizer = optimizer = training.optimizer
        module = training.module
        if not isinstance(module, nn.Module):
            raise InputError(
                "Input canaries need module=..., the model that PrivacyEngine.make_private returned, which "
                f"computes their gradients, got {type(module).__name__}."
            )
        _check_held_out(data, training.loader)
        loss = _loss(training)
        self._model = UnwrappedModel(training, loss)
        require_fitting(module, self._model.criterion, data)
        is_ghost = isinstance(optimizer, DPOptimizerFastGradientClipping)
        self._backward = (GhostBackward if is_ghost else PerSampleBackward)(optimizer, module, loss)
        self._data = data.to(optimizer.params[0].device)
        self._canaries = CanarySequence(canary, coins, _CRAFTING)
        self._index = CoordinateIndex.complete(optimizer.params)
        self._coins = coins

    @property
    def coins(self) -> CanaryCoins:
        return self._coins

    @property
    def options(self) -> dict[str, Any]:
        return {"coupled": True}

    def index(self, index: int) -> CoordinateIndex:  # noqa: ARG002
        return self._index

    def added(self, index: int, members: IntArray, before: Tensor) -> tuple[CanaryProjection, Tensor]:
        examples = self._canaries.at(index, self._craft)
        directions = _clipped(self._model.gradients(examples), self._optimizer)
        numbers = torch.as_tensor(members, device=directions.device)
        each, after = directions.new_zeros(0, directions.shape[1]), before
        if len(numbers):
            with copied_sums(self._optimizer):
                chosen = Examples(examples.inputs[numbers], examples.targets[numbers])
                each, after = self._backward.add_to_sum(chosen), flat(summed(self._optimizer))
            _check_independent(after - before, each, before, precision(self._optimizer.params))
        norm = float(self._optimizer.max_grad_norm)
        return _projection(directions, numbers, each, norm, self._index), after

    def _craft(self, canary: InputCanary, num_canaries: int, rng: np.random.Generator) -> Examples:
        crafting = Crafting(
            model=self._model.module,
            loss=self._model.loss,
            data=self._data,
            max_grad_norm=float(self._optimizer.max_grad_norm),
        )
        with self._model.without_hooks():
            return crafting(canary, num_canaries, rng)


def _clipped(layers: list[Tensor], optimizer: DPOptimizer) -> Tensor:
    """Clip gradients as the optimizer claims to: each layer by its own norm, or all layers together."""
    norms = getattr(optimizer, "max_grad_norms", None)
    if norms is None:
        layers, norms = [torch.cat(layers, dim=1)], [optimizer.max_grad_norm]
    clipped = []
    for rows, norm in zip(layers, map(float, norms), strict=True):
        lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        clipped.append(rows * (norm / lengths.clamp(min=norm)))
    return torch.cat(clipped, dim=1)


def _check_independent(together: Tensor, each: Tensor, batch: Tensor, eps: float) -> None:
    """Raise if the contribution of a canary depends on the others: they could not be subtracted then."""
    largest = max(float(each.abs().max()), float(batch.abs().max()))
    off = float((together - each.sum(dim=0)).abs().max())
    if off > max(_SUM_TOLERANCE, _ULPS * eps) * largest * len(each):
        raise InputError(
            f"Examples are not clipped separately: the sum of {len(each)} canaries together differs by "
            f"{off:.3g} from the sum one by one. Examples affect each other (check with replay()), or the "
            "model uses randomness such as dropout."
        )


def _projection(
    directions: Tensor, members: Tensor, each: Tensor, norm: float, index: CoordinateIndex
) -> CanaryProjection:
    """Return the projection onto clipped gradients if ``members``, by number, added the rows ``each``."""
    lengths = torch.linalg.vector_norm(directions, dim=1)
    usable = lengths.isfinite() & (lengths > _MIN_NORM * norm)
    directions = directions.masked_fill(~usable[:, None], 0.0)
    squares = torch.where(usable, lengths.square(), 1.0)
    of_all = directions @ each.sum(dim=0)
    of_itself = torch.zeros_like(of_all).index_copy_(0, members, (directions[members] * each).sum(dim=1))
    return CanaryProjection(
        index,
        lambda vector: directions @ vector / squares,
        others=(of_all - of_itself) / squares,
        lengths=torch.linalg.vector_norm(directions, dim=1).double().cpu().numpy() / norm,
    )


def _loss(training: PreparedTraining) -> Any:
    """Return the loss, by default cross-entropy."""
    criterion = training.criterion
    if isinstance(training.optimizer, DPOptimizerFastGradientClipping):
        if not isinstance(criterion, DPLossFastGradientClipping):
            raise InputError(
                "Ghost clipping needs criterion=..., the loss that PrivacyEngine.make_private returned, "
                f"got {type(criterion).__name__}."
            )
        return criterion
    return (
        nn.CrossEntropyLoss(reduction=training.optimizer.loss_reduction) if criterion is None else criterion
    )


class BackwardPass(ABC):
    """A way to add clipped gradients of examples to ``p.summed_grad`` with the library's own code.

    Everything else is restored, including torch's RNG state.
    """

    def __init__(self, optimizer: DPOptimizer, module: Any, criterion: Callable[..., Any]) -> None:
        self._optimizer, self._module, self._criterion = optimizer, module, criterion

    @abstractmethod
    def add_to_sum(self, examples: Examples) -> Tensor:
        """Add all examples; return their individual contributions (examples x parameters)."""

    def _backward(self, examples: Examples) -> None:
        with torch.enable_grad():
            self._criterion(self._module(examples.inputs), examples.targets).backward()

    @contextmanager
    def _without_side_effects(self) -> Iterator[None]:
        """Restore parameters, counters and the RNG state after a pass."""
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
    """A pass that materializes per-example gradients, which the optimizer clips: hooks, functorch, ew."""

    def add_to_sum(self, examples: Examples) -> Tensor:
        clip, rows = PerSampleClip(self._optimizer), self._rows(examples)
        with self._without_side_effects():
            each = [self._clipped(clip, row) for row in rows.split(1)]  # type: ignore[no-untyped-call]
        clip.add_full_rows(rows)
        return torch.stack(each)

    def _rows(self, examples: Examples) -> Tensor:
        with self._without_side_effects():
            self._backward(examples)
            rows_by_layer: list[Any] = [
                getattr(parameter, "grad_sample", None) for parameter in self._optimizer.params
            ]
        if any(layer_rows is None or len(layer_rows) != len(examples) for layer_rows in rows_by_layer):
            raise InputError(
                "module does not compute a gradient for each example and each parameter of the optimizer; "
                "pass the model that make_private returned, in training mode."
            )
        return torch.cat([layer_rows.detach().flatten(1) for layer_rows in rows_by_layer], dim=1)

    def _clipped(self, clip: PerSampleClip, row: Tensor) -> Tensor:
        for parameter in self._optimizer.params:
            parameter.summed_grad = None
        clip.add_full_rows(row)
        return flat(summed(self._optimizer))


class GhostBackward(BackwardPass):
    """Two backward passes by the loss, which computes norms and clips, as for a batch."""

    def add_to_sum(self, examples: Examples) -> Tensor:
        pairs = zip(examples.inputs.split(1), examples.targets.split(1), strict=True)  # type: ignore[no-untyped-call]
        each = [flat(self._clipped_sum(Examples(*pair))) for pair in pairs]
        total = self._clipped_sum(examples)
        with attribute_restored(self._optimizer.params, "grad"):
            for parameter, gradient in zip(self._optimizer.params, total, strict=True):
                parameter.grad = gradient
            self._optimizer.accumulate()
        return torch.stack(each)

    def _clipped_sum(self, examples: Examples) -> list[Tensor]:
        with self._without_side_effects():
            self._backward(examples)
            return [parameter.grad for parameter in self._optimizer.params]


class UnwrappedModel:
    """The model inside the one that ``make_private`` returned, with per-example losses."""

    def __init__(self, training: PreparedTraining, criterion: Any) -> None:
        module = training.module
        self.module = module._module if isinstance(module, AbstractGradSampleModule) else module
        self.criterion = getattr(criterion, "criterion", criterion)  # ghost clipping wraps it
        values, parameters = dict(self.module.named_parameters()), training.optimizer.params
        missing = len(parameters) - len(set(map(id, parameters)) & set(map(id, values.values())))
        if missing:
            raise InputError(
                f"module must be the model that the optimizer trains, but {missing} of the optimizer's "
                f"{len(parameters)} parameters are not in it."
            )
        self._names = training.names

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each example, computed one by one, so that mean and sum reduction agree."""
        pairs = zip(outputs.split(1), targets.split(1), strict=True)  # type: ignore[no-untyped-call]
        return torch.stack([self.criterion(*pair).reshape(()) for pair in pairs])

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Remove the library's hooks from the model inside the block."""
        layers: list[Any] = list(self.module.modules())
        with attribute_restored(layers, "_forward_hooks"), attribute_restored(layers, "_backward_hooks"):
            for layer in layers:
                layer._forward_hooks, layer._backward_hooks = OrderedDict(), OrderedDict()
            yield

    def gradients(self, examples: Examples) -> list[Tensor]:
        """Return a matrix (examples x entries) for each parameter of the optimizer."""
        values = dict(self.module.named_parameters())
        parameters = {name: values[name].detach() for name in self._names}
        gradient_of_one = grad(partial(loss_of_one, self.module, self.loss))
        each: Any = vmap(
            gradient_of_one, in_dims=(None, 0, 0), randomness="different", chunk_size=_GRADIENT_CHUNK
        )
        with self.without_hooks(), torch.random.fork_rng(devices=[]):
            gradients = each(parameters, examples.inputs, examples.targets)
        return [at_least_single(gradients[name].flatten(1)) for name in self._names]
