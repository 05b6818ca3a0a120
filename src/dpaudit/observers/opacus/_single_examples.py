"""Single examples in the first steps of a training run, which is the same without these checks.

:class:`ExampleGradients` compares what is clipped with plain backward passes: ghost clipping must clip an
example by the norm of its gradient, and rows must add up to the gradient of their batch. In
``_forward_passes.py``, outputs of an example must be the same whatever the others are. What both find is in
:class:`ExampleFacts`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dpaudit.diagnostics import CheckResults, ClaimedStep, Finding
from dpaudit.observers._arrays import attribute_restored
from dpaudit.observers._session import StepRecorder
from dpaudit.observers.opacus._clipping import flat, product_precision, rows_to_clip, tensor_norms
from dpaudit.observers.opacus._snapshot import TorchSnapshot

# Steps, and examples of each, whose two gradients take half as long as a step. Among 16
# examples, a checkpoint with other masks is found in 99.9 % of runs: a third of its norms is too small.
_NUM_STEPS, _NUM_EXAMPLES = 8, 2
# Relative rounding errors. In correct runs, norms and sums differ by up to 3e-6, or in bfloat16 by 1 ulp.
_TOLERANCE, _ULPS = 1e-3, 8.0
_ACROSS = (
    "does a layer work across the batch, such as a softmax over the first dimension, attention without "
    "batch_first=True, statistics of the batch, or a vote?"
)


@dataclass
class _Differences:
    """How many things were compared, how many of them differ, and the largest difference."""

    number: int = 0
    num_differing: int = 0
    largest: float = 0.0

    def add(self, difference: float, limit: float) -> None:
        self.number += 1
        if difference > limit:
            self.num_differing, self.largest = self.num_differing + 1, max(self.largest, difference)

    def __str__(self) -> str:
        return f"{self.num_differing} of {self.number}"


class ExampleFacts:
    """What the first steps show of single examples."""

    def __init__(self, *, has_ghost_norms: bool, is_repeated: bool) -> None:
        self.is_repeated = is_repeated
        self.norms, self.rows = _Differences(), _Differences()
        self.outputs, self.losses, self.by_batch = _Differences(), _Differences(), _Differences()
        """Repeated passes; ``by_batch`` if random numbers or places in the batch can be the reason."""
        self.why_not_repeated = "the module did not run"
        self.why_not = "no clipping factors were computed" if has_ghost_norms else ""
        """Why no norms were compared; empty if there are none, or if they were compared."""

    def results(self, claimed: ClaimedStep) -> CheckResults:
        """Return facts about the steps so far."""
        del claimed
        return CheckResults(
            certain=tuple(self._certain()), to_check=tuple(self._to_check()), not_covered=tuple(self._gaps())
        )

    def _certain(self) -> Iterator[Finding]:
        if self.norms.num_differing:
            yield Finding.certain(
                "ghost-norm",
                f"The norms by which {self.norms} compared examples are clipped are too small: a gradient "
                f"is up to {1 + self.norms.largest:.4g} times as long, and clipped to as many times the "
                "clipping norm.",
                1 + self.norms.largest,
            )

        for what, passes in (("Outputs of the model", self.outputs), ("Losses", self.losses)):
            if passes.num_differing:
                sentence = (
                    f"{what} change for examples that stay the same if others of the batch are replaced"
                )
                finding = Finding.certain("coupled-examples", f"{sentence}, in {passes} repeated passes.")
                yield finding if what == "Losses" else replace(finding, cause=_ACROSS)

    def _to_check(self) -> Iterator[Finding]:
        if self.by_batch.num_differing and not self.outputs.num_differing:
            yield Finding.certain(
                "outputs-by-batch",
                f"In {self.by_batch} repeated passes, outputs of an example change with its place in the "
                "batch, the number of examples, or random numbers that depend on others.",
            )
        if self.rows.num_differing:
            yield Finding.certain(
                "row-gradient",
                f"In {self.rows} compared batches, the gradients of the examples do not add up to the "
                f"gradient of the batch: they differ by up to {100 * self.rows.largest:.2g} % of its size.",
                self.rows.largest,
            )

    def _gaps(self) -> Iterator[str]:
        if self.is_repeated and not self.outputs.number:
            yield f"whether examples see each other in the model: not repeated, {self.why_not_repeated}"
        if self.why_not:
            yield (
                "ghost clipping computes norms from activations, which gradient canaries do not have: they "
                f"were not compared with the norms of gradients, because {self.why_not}"
            )


class ExampleGradients:
    """Gradients of plain backward passes, compared with the norms or rows that clipping uses.

    ``ghost`` is the module that does ghost clipping, if any; passes of canaries ``are_paused``.
    """

    def __init__(
        self, optimizer: DPOptimizer, ghost: Any, facts: ExampleFacts, are_paused: Callable[[], bool]
    ) -> None:
        self._optimizer, self._ghost, self._are_paused = optimizer, ghost, are_paused
        self._undo, self.num_left = ExitStack(), _NUM_STEPS
        """The number of steps in which gradients are still to be compared."""
        self._batches: list[dict[int, Tensor]] = []  # the gradients of each backward pass of this step
        self.facts = facts

    @contextmanager
    def installed(self, steps: StepRecorder) -> Iterator[None]:
        """Keep the gradients of the first batches inside the block."""
        self._compare = steps.guarded(self._compare_norms)
        if self._ghost is None and self.num_left:
            for index, parameter in enumerate(self._optimizer.params):
                self._undo.callback(parameter.register_hook(steps.guarded(self._noting(index))).remove)
        with self._undo:
            yield

    def _noting(self, index: int) -> Callable[[Tensor], None]:
        def note(gradient: Tensor) -> None:
            if self._are_paused() or len(self._batches) > 1:
                return
            if not self._batches or index in self._batches[-1]:  # another backward pass
                self._batches.append({})
            self._batches[-1][index] = gradient.to_dense().clone()

        return note

    def _end_step(self) -> None:
        self.num_left -= 1
        if not self.num_left:
            self._undo.close()

    @torch.no_grad()
    def compare_rows(self) -> None:
        """Compare the rows that are about to be clipped with the gradient of their batch."""
        batches, self._batches = self._batches, []
        if not self.num_left or len(batches) != 1:  # rows of several passes are clipped together
            return
        passes = [rows_to_clip(parameter) for parameter in self._optimizer.params]
        if len(batches[0]) != len(passes) or {*map(len, passes)} != {1}:
            return
        rows = [samples for [samples] in passes]
        if any(samples.shape[1:] != batches[0][index].shape for index, samples in enumerate(rows)):
            return  # the observer raises an error about it
        factor = len(rows[0]) if self._optimizer.loss_reduction == "mean" else 1
        gradients = [batches[0][index] for index in range(len(rows))]
        lengths = tensor_norms([*rows, *gradients])  # sums of rows that cancel have the rounding of rows
        difference = flat([samples.sum(0) for samples in rows]) - factor * flat(gradients)
        size = max(np.linalg.norm(lengths[: len(rows)]), factor * np.linalg.norm(lengths[len(rows) :]))
        if np.isfinite(size) and size > 0:
            self.facts.rows.add(float(difference.norm()) / float(size), _limit(rows))
            self._end_step()

    def watch(self, coefficients: Tensor, norms: Tensor | None) -> Tensor:
        """Return clipping factors that note the losses which they are multiplied by."""
        if not self.num_left or norms is None or not len(norms) or not norms.isfinite().all():
            return coefficients
        watched, is_first = coefficients.as_subclass(_Coefficients), itertools.count()
        watched.note = lambda losses: None if next(is_first) else self._compare(losses, norms)
        return watched

    def _compare_norms(self, losses: Tensor, norms: Tensor) -> None:
        """Compare the norms by which some examples are clipped with the gradients of their losses."""
        random = TorchSnapshot([])
        torch.rand(1)  # so that a checkpoint which does not restore random numbers gets others
        try:
            with attribute_restored([self._ghost], "hooks_enabled"):
                self._ghost.hooks_enabled = False
                limit = _limit([parameter._norm_sample for parameter in self._ghost.trainable_parameters])
                for number in range(min(_NUM_EXAMPLES, len(norms))):
                    index = (self.num_left + number * len(norms) // _NUM_EXAMPLES) % len(norms)
                    length, norm = float(self._gradient(losses[index].sum()).norm()), float(norms[index])
                    self.facts.norms.add(length / max(norm, limit * self._ghost.max_grad_norm) - 1, limit)
            self.facts.why_not = ""
        except Exception as error:  # noqa: BLE001  # training continues
            self.facts.why_not = f"a backward pass of one example raised {type(error).__name__}"
        finally:
            random.restore()
        self._end_step()

    def _gradient(self, loss: Tensor) -> Tensor:
        parameters: list[Any] = self._optimizer.params
        try:
            gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        except RuntimeError:  # a checkpoint with use_reentrant=True allows no other call than backward()
            model = self._ghost._module
            leaves = _leaves(loss) | set(model.parameters())
            is_distributed = any(isinstance(module, DistributedDataParallel) for module in model.modules())
            if is_distributed or any(leaf._post_accumulate_grad_hooks for leaf in leaves):
                raise  # something waits for gradients
            gradients = _accumulated(loss, parameters, list(leaves))
        pairs = zip(gradients, parameters, strict=True)
        return flat([torch.zeros_like(value) if gradient is None else gradient for gradient, value in pairs])


def _limit(tensors: Sequence[Tensor]) -> float:
    """Return the largest relative difference that rounding may cause."""
    return max(_TOLERANCE, _ULPS * product_precision(tensors))


def _accumulated(loss: Tensor, parameters: Sequence[Any], leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Return gradients by way of ``p.grad``, which is restored."""
    with attribute_restored(leaves, "grad"):
        for leaf in leaves:
            leaf.grad = None
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        return tuple(parameter.grad for parameter in parameters)


def _leaves(loss: Tensor) -> set[Any]:
    """Return the tensors whose ``grad`` a backward pass changes, except those inside checkpoints."""
    seen: set[Any] = {None}
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {node.variable for node in seen if hasattr(node, "variable")}


class _Coefficients(Tensor):
    """Clipping factors of examples, which note the losses that they are multiplied by."""

    note: Callable[[Tensor], None]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
            tensors = [value for value in args if isinstance(value, Tensor)]
            factors = next((value for value in tensors if isinstance(value, cls)), None)
            if factors is None:
                return result
            losses = [value for value in tensors if value.requires_grad and value.shape[:1] == factors.shape]
            if losses:
                factors.note(losses[0])
            elif isinstance(result, Tensor) and result.shape == factors.shape:  # on another device, say
                result = result.as_subclass(cls)
                result.note = factors.note
            return result
