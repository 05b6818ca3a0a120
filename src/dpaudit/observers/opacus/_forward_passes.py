"""The first forward passes of a model, repeated with other examples.

An example may not change outputs or losses of others. :class:`RepeatedCall` repeats a call with every second
example replaced, and with the others alone. State, random numbers and weights are as before afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpaudit.errors import InputError
from dpaudit.observers._session import StepRecorder
from dpaudit.observers.opacus._clipping import at_least_single, precision
from dpaudit.observers.opacus._prepared import PreparedTraining
from dpaudit.observers.opacus._single_examples import ExampleFacts
from dpaudit.observers.opacus._snapshot import TorchSnapshot, digest

_NUM_PASSES, _MAX_CALLS = 10, 30  # repeated passes; calls of the module, of which some cannot be repeated
# Relative change of an output, and share of examples, that rounding may cause. Outputs of correct models were
# equal bit by bit; only one that sorts its examples, as into experts, may round in another way.
_TOLERANCE, _ULPS = 1e-3, 32.0
_DISTRIBUTED = DistributedDataParallel, DifferentiallyPrivateDistributedDataParallel


class _Changes(NamedTuple):
    """The outputs that change for unchanged examples: because of others, or possibly for another reason."""

    certain: set[int]
    to_check: set[int]


class RepeatedCall:
    """A function of batches, such as a model, whose calls are repeated with other examples.

    ``roots`` hold the state that a call may change, and ``weights`` what it may not.
    """

    def __init__(
        self, function: Callable[..., Any], roots: Sequence[Any], weights: Sequence[Tensor] = (), dim: int = 0
    ) -> None:
        self._function, self._roots, self._weights, self._dim = function, roots, list(weights), dim
        self._digests, self._sizes, self._others = dict[int, str](), dict[int, int](), set[int]()
        self._num_repeated = 0
        self.num_rows = 0
        """The number of rows of the batch; 0 in the first call, when it is unknown what differs in others."""

    def begin(self, *arguments: Any) -> None:
        """Save the state before a call; arrays that never change or have other sizes are no examples."""
        self._leaves, self._structure = tree_flatten(arguments)
        arrays = {
            place: leaf
            for place, leaf in enumerate(self._leaves)
            if isinstance(leaf, Tensor) and leaf.dim() > self._dim
        }
        self._batched = self._arrays_of_examples(arrays)
        self._values = [weight.data.clone() for weight in self._weights if weight.requires_grad]
        self._before = TorchSnapshot(self._roots, self._weights)

    def _arrays_of_examples(self, arrays: Mapping[int, Tensor]) -> list[int]:
        """Return the places of arrays with a row for each example."""
        digests, sizes = self._digests, self._sizes
        self._digests = {place: digest(leaf) for place, leaf in arrays.items()}
        self._sizes = {place: leaf.shape[self._dim] for place, leaf in arrays.items()}
        new = [place for place in arrays if digests.get(place) != self._digests[place]] or list(arrays)[:1]
        self.num_rows = self._sizes[new[0]] if digests and new else 0
        for of_call in (sizes, self._sizes):
            self._others |= {place for place in arrays if of_call.get(place) != of_call.get(new[0])}
        return [place for place in new if place not in self._others]

    def forget(self) -> None:
        """Free the memory of the latest call."""
        self._leaves, self._values = [], list[Tensor]()
        self._before = self._after = TorchSnapshot([])

    def changes(self, outputs: Mapping[int, Tensor], num_rows: int) -> _Changes:
        """Return which of the outputs change for examples that stay the same, and forget the call."""
        try:
            return self._changes(outputs, num_rows)
        finally:
            self.forget()

    def _changes(self, outputs: Mapping[int, Tensor], num_rows: int) -> _Changes:
        self._after = TorchSnapshot(self._roots, self._weights)
        if self._changed_weights():
            raise InputError("it changes its weights")
        self._num_repeated += 1
        order = torch.arange(num_rows)
        unchanged = order % 2 == self._num_repeated % 2
        replaced = torch.where(unchanged, order, order[unchanged][0])
        changed = self._differing(outputs, self._repeat(num_rows, replaced), unchanged)
        if changed and self._differing(outputs, self._repeat(num_rows), unchanged):
            raise InputError("its outputs differ when it runs on the same batch again")
        if changed and self._is_random:  # masks may follow the examples
            with _WithoutDropout():  # type: ignore[no-untyped-call]
                same = dict(enumerate(self._repeat(num_rows)))
                changed &= self._differing(same, self._repeat(num_rows, replaced), unchanged)
            return _Changes(set(), changed) if self._is_random else _Changes(changed, set())
        if changed or self._is_random or self._num_repeated % 3:
            return _Changes(changed, set())
        alone = self._repeat(num_rows, order[unchanged])
        return _Changes(
            set(), self._differing(outputs, alone, unchanged, torch.ones(int(unchanged.sum())) > 0)
        )

    def _changed_weights(self) -> list[tuple[Tensor, Tensor]]:
        trained = [weight for weight in self._weights if weight.requires_grad]  # others are too many to copy
        pairs = zip(trained, self._values, strict=True)
        return [(weight, value) for weight, value in pairs if not torch.equal(weight.data, value)]

    def _repeat(self, num_rows: int, chosen: Tensor | None = None) -> list[Tensor]:
        """Return the outputs for a batch of chosen examples, by default all."""
        leaves = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        for place in self._batched if chosen is not None else ():
            rows = leaves[place].movedim(self._dim, 0).unflatten(0, (num_rows, -1))
            leaves[place] = rows[chosen].flatten(0, 1).movedim(0, self._dim)
        args, kwargs = tree_unflatten(leaves, self._structure)
        self._before.restore()
        try:
            with torch.no_grad():
                outputs = self._function(*args, **kwargs)
            self._is_random = self._before.has_used_randomness
        finally:
            self._after.restore()
            for weight, value in self._changed_weights():
                weight.data.copy_(value)
        return tensors_of(outputs)

    def _differing(
        self,
        first: Mapping[int, Tensor],
        second: Sequence[Tensor],
        unchanged: Tensor,
        unchanged_of_second: Tensor | None = None,
    ) -> set[int]:
        """Return the outputs whose unchanged rows differ by more than rounding."""
        masks = unchanged, unchanged if unchanged_of_second is None else unchanged_of_second
        limit = max(_TOLERANCE, _ULPS * precision([*first.values(), *self._weights]))
        pairs = {place: (tensor, second[place]) for place, tensor in first.items() if place < len(second)}
        return {place for place, pair in pairs.items() if _differ(pair, masks, limit)}


def _differ(tensors: tuple[Tensor, Tensor], masks: tuple[Tensor, Tensor], limit: float) -> bool:
    """Return whether rows of two outputs differ in every layout that outputs may have."""
    layouts = (_by_example(tensor, len(mask)) for tensor, mask in zip(tensors, masks, strict=True))
    shares = []
    for views in zip(*layouts, strict=False):
        rows = [view[mask] for view, mask in zip(views, masks, strict=True)]
        for dim in range(1, rows[0].dim()):  # the longest example may be gone
            length = min(view.shape[dim] for view in rows)
            rows = [view.narrow(dim, 0, length) for view in rows]
        old, new = (at_least_single(view.flatten(1)) for view in rows)
        is_finite = old.isfinite().all(dim=1)
        old, new = old[is_finite], new[is_finite]
        room = limit * float(old.norm()) / max(len(old), 1) ** 0.5
        is_moved = ~((new - old).norm(dim=1) <= room)
        shares.append(float(is_moved.float().mean()) if len(old) else 0.0)
    return min(shares, default=0.0) > limit


def _by_example(tensor: Tensor, num_rows: int) -> Iterator[Tensor]:
    """Yield all views of a tensor whose first dimension can be that of the examples."""
    if tensor.dim() == 1:
        tensor = tensor[:, None]
    if tensor.shape[:1] == (num_rows,):
        yield tensor
    if tensor.shape[1:2] == (num_rows,):
        yield tensor.transpose(0, 1)
    if tensor.dim() and len(tensor) > num_rows > 0 and len(tensor) % num_rows == 0:  # a row for each token
        yield tensor.reshape(num_rows, -1, *tensor.shape[1:])
        yield tensor.reshape(-1, num_rows, *tensor.shape[1:]).transpose(0, 1)


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in containers, and in dataclasses such as the outputs of a model."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping) or is_dataclass(value):
        value = list((value if isinstance(value, Mapping) else vars(value)).values())
    return (
        [tensor for entry in value for tensor in tensors_of(entry)] if isinstance(value, list | tuple) else []
    )


def _note(places: set[int], place: int, _: Tensor) -> None:
    places.add(place)


class _WithoutDropout(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces random masks by their mean, which is the same for all examples."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if function is torch.ops.aten.bernoulli_.float:
            return args[0].fill_(args[1] if len(args) > 1 else 0.5)
        return function(*args, **(kwargs or {}))


class ForwardPasses:
    """The first forward passes of a module and, with ghost clipping, of its criterion."""

    def __init__(
        self, training: PreparedTraining, facts: ExampleFacts, are_paused: Callable[[], bool]
    ) -> None:
        self._hooks, self._network, self._facts = training.module, training.network, facts
        self._are_paused, self._is_busy, self._handles = are_paused, False, list[Any]()
        self._num_calls, self.num_left = 0, _NUM_PASSES
        """The number of passes that are still to be repeated."""
        self._criteria: dict[int, RepeatedCall] = {}
        self._pending: tuple[int, _Changes] | None = None  # rows of the latest pass, and outputs that change
        self._used: set[int] = set()  # outputs with a gradient

    @contextmanager
    def installed(self, steps: StepRecorder) -> Iterator[None]:
        """Watch the module and the criterion inside the block."""
        if self._network is None or not self.num_left:
            yield
            return
        inside: Any = self._network
        while isinstance(inside, (AbstractGradSampleModule, *_DISTRIBUTED)):
            inside = inside._module if isinstance(inside, AbstractGradSampleModule) else inside.module
        self._module = RepeatedCall(
            inside.forward if inside is self._network else inside,  # without the hooks below
            [inside],
            list(inside.parameters()),
            dim=0 if getattr(self._hooks, "batch_first", True) else 1,
        )
        losses_of = DPLossFastGradientClipping.__call__

        def losses_and_repeated(criterion: Any, *args: Any, **kwargs: Any) -> Any:
            if steps.is_over or criterion.module is not self._hooks or not self._is_watching():
                return losses_of(criterion, *args, **kwargs)
            return self._repeat_losses(criterion, partial(losses_of, criterion), args, kwargs)

        self._handles = [
            self._network.register_forward_pre_hook(steps.guarded(self._before_forward), with_kwargs=True),
            self._network.register_forward_hook(steps.guarded(self._after_forward)),
        ]
        DPLossFastGradientClipping.__call__ = losses_and_repeated
        try:
            yield
        finally:
            DPLossFastGradientClipping.__call__ = losses_of
            self._stop()

    def _stop(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        for call in (self._module, *self._criteria.values()):
            call.forget()

    def _is_watching(self) -> bool:
        is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
        is_ours = self._is_busy or self._are_paused() or not self._handles
        return torch.is_grad_enabled() and not (is_ours or is_transformed or torch.compiler.is_compiling())

    @contextmanager
    def _repeating(self) -> Iterator[None]:
        """Ignore calls inside the block, and note its errors: training continues."""
        self._is_busy = True
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self._facts.why_not_repeated = (
                str(error) if isinstance(error, InputError) else type(error).__name__
            )
        finally:
            self._is_busy = False

    def _before_forward(self, _: Any, args: Any, kwargs: Any) -> None:
        if not self._is_watching():
            return
        self._num_calls, self._pending = self._num_calls + 1, None
        if self._num_calls > _MAX_CALLS or not self.num_left:
            self._stop()
            return
        with self._repeating():
            self._module.begin(args, kwargs)

    def _after_forward(self, _: Any, __: Any, output: Any) -> None:
        if not self._is_watching():
            return
        if self._module.num_rows < 2:
            self._module.forget()
            return
        outputs = {place: tensor for place, tensor in enumerate(tensors_of(output)) if tensor.requires_grad}
        self._used = used = set[int]()
        with self._repeating():
            changes = self._module.changes(outputs, self._module.num_rows)
            for place in changes.certain | changes.to_check:
                outputs[place].register_hook(  # type: ignore[no-untyped-call]
                    partial(_note, used, place)
                )
            self._pending = self._module.num_rows, changes

    def confirm(self, batch_sizes: Sequence[int]) -> None:
        """Note the latest pass, if its rows are about to be clipped and its outputs were used."""
        pending, self._pending = self._pending, None
        if pending is not None and pending[0] in batch_sizes:
            certain, to_check = (bool(places & self._used) for places in pending[1])
            self._facts.outputs.add(float(certain), 0.0)
            self._facts.by_batch.add(float(to_check), 0.0)
            self.num_left -= 1

    def _repeat_losses(self, criterion: Any, losses_of: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what the criterion returns, and repeat its call."""
        call = self._criteria.setdefault(
            id(criterion),
            RepeatedCall(lambda *a, **k: losses_of(*a, **k).loss_per_sample, [criterion.criterion]),
        )
        with self._repeating():
            call.begin(args, kwargs)
        loss = losses_of(*args, **kwargs)
        num_rows = len(loss.loss_per_sample) if loss.loss_per_sample.dim() else 0
        if call.num_rows >= num_rows > 1:
            with self._repeating():
                changes = call.changes({0: loss.loss_per_sample}, num_rows)
                self._facts.losses.add(float(bool(changes.certain)), 0.0)
        call.forget()
        return loss
