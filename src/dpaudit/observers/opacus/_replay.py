"""``replay()`` for Opacus: one whole training step, run on a batch and on neighbors of it.

Six things must hold, and none needs statistics: one example moves the release by at most the clipping norm;
everything after the release depends on the release alone; so does the release of the next step; no example
changes the gradient of another; the noise is the same for every batch; and every batch has the same number of
releases.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch
from opacus.optimizers import AdaClipDPOptimizer, DPOptimizer
from torch import Tensor, distributed, nn
from torch.utils.data import IterableDataset, default_collate

from dpaudit._types import FloatArray
from dpaudit.errors import InputError
from dpaudit.observers._arrays import map_tree
from dpaudit.observers._neighbors import batch_size
from dpaudit.observers._replay import compare_neighbors
from dpaudit.observers._replay_result import (
    NumberArray,
    ReleaseTrace,
    ReplayedStep,
    ReplayResult,
    StepTrace,
    fingerprint_rows,
    scale_between,
)
from dpaudit.observers.opacus._clipping import (
    GhostClip,
    clip_for,
    flat,
    precision,
    product_precision,
    split_like,
    watched,
)
from dpaudit.observers.opacus._observer import check_unobserved
from dpaudit.observers.opacus._prepared import (
    PreparedTraining,
    attached_accounting,
    private_inside,
    unwrapped,
    updating_optimizer,
)
from dpaudit.observers.opacus._snapshot import TorchSnapshot, attribute_digests, digest, state_digests


def replay(
    step: Callable[[Any], object],
    batch: Any,
    *,
    optimizer: DPOptimizer,
    model: nn.Module | None = None,
    other_optimizers: Sequence[Any] = (),
    published_state: Sequence[Any] = (),
    private_state: Sequence[Any] = (),
) -> ReplayResult:
    """Run a step on a batch and on neighbors of it with the same randomness, and compare everything.

    The step runs about 70 times. Afterwards all named objects, the accountant and the RNGs are as before.

    Args:
        step: One whole training step on a batch: forward and backward pass, ``optimizer.step()``,
            ``zero_grad()``.
        batch: Tensors with one row per example, as a loader yields them; a few examples are enough.
        optimizer: What ``make_private`` returned.
        model: What ``make_private`` returned.
        other_optimizers: Further ones of the step: their weights are compared, and private ones are replayed.
        published_state: Objects that the step writes and that are published or used later; they are compared.
        private_state: Objects that are never published, such as a metric; they are restored, not compared.

    Returns:
        The findings, and the largest change of the release.

    Raises:
        InputError: The step does not repeat itself bit for bit, or clips adaptively or on several processes.

    Example:
        ``replay(step, batch, optimizer=optimizer, model=model).raise_for_violation()``

    """
    replayed = _OpacusStep(
        step,
        batch,
        unwrapped(optimizer),
        model,
        other_optimizers=other_optimizers,
        published_state=published_state,
        private_state=private_state,
    )
    try:
        return compare_neighbors(replayed, batch)
    finally:
        replayed.restore()


def replay_training(
    training: PreparedTraining, step: Callable[[Any], object], batch: Any = None, **state: Any
) -> ReplayResult:
    """Replay a step of an observed training run; ``state`` has further arguments of :func:`replay`.

    Without a batch, the step begins with examples of the data set, before the loader's ``collate_fn``.
    """

    def collated(examples: Any) -> object:
        return step(loader.collate_fn(_rows(examples)))

    loader, run = training.loader, step
    if batch is None:
        if not hasattr(loader, "dataset"):
            raise InputError(
                "recorder.replay(train_step) takes its examples from the loader: pass loader=... to "
                "observe(), or a batch, as in recorder.replay(train_step, batch)."
            )
        batch, run = default_collate(_examples(loader.dataset)), collated
    return replay(run, batch, optimizer=training.optimizer, model=training.network, **state)


def _examples(dataset: Any, number: int = 8) -> list[Any]:
    """Return some examples, evenly spaced where they have indices."""
    if isinstance(dataset, IterableDataset):
        return list(itertools.islice(dataset, number))
    return [dataset[int(index)] for index in np.unique(np.linspace(0, len(dataset) - 1, number).astype(int))]


def _rows(batch: Any) -> list[Any]:
    """Return the examples of a batch, each with the structure of the batch."""
    return [map_tree(lambda array: array[index], batch) for index in range(batch_size(batch))]  # noqa: B023


def _require_replayable(optimizer: Any) -> None:
    check_unobserved(optimizer)
    if isinstance(optimizer, AdaClipDPOptimizer) or hasattr(optimizer, "target_unclipped_quantile"):
        raise InputError(
            "Adaptive clipping cannot be replayed, because its noisy count is a second release; replay the "
            "step with clipping='flat'."
        )
    if optimizer.secure_mode:
        raise InputError(
            "secure_mode=True cannot be replayed, because its generator cannot be reset; replay the step "
            "with secure_mode=False."
        )
    is_distributed = distributed.is_available() and distributed.is_initialized()
    if hasattr(optimizer, "reduce_gradients") or (is_distributed and distributed.get_world_size() > 1):
        raise InputError("Several processes cannot be replayed; replay the step in one process.")


class _OpacusStep(ReplayedStep):
    """A step with an Opacus optimizer, whose methods are replaced while it runs."""

    can_vary = True
    how_to_repeat = (
        "name what it keeps from one batch to the next in published_state=[...] or private_state=[...], and "
        "other optimizers in other_optimizers=[...]"
    )

    def __init__(
        self,
        step: Callable[[Any], object],
        batch: Any,
        optimizer: DPOptimizer,
        model: Any,
        *,
        other_optimizers: Sequence[Any],
        published_state: Sequence[Any],
        private_state: Sequence[Any],
    ) -> None:
        self._step, self._optimizer, self._model = step, optimizer, model
        self.num_examples = batch_size(batch)
        self._others = {f"other_optimizers[{index}]": other for index, other in enumerate(other_optimizers)}
        self._others |= {f"published_state[{index}]": state for index, state in enumerate(published_state)}
        private = [optimizer, *filter(None, map(private_inside, other_optimizers))]
        self._protected = [_Protected.among(each, (model, *published_state)) for each in private]
        self._others |= _accountants(self._protected)
        self._snapshot = TorchSnapshot([optimizer, model, *self._others.values(), *private_state])
        self.must_clip = any(protected.ghost is not None for protected in self._protected)
        self._private = {id(parameter) for parameter in optimizer.params}
        self._more_weights = dict(self._unprotected_weights())
        self._names = _parameter_names(self._protected, model)
        self.not_covered = self._uncovered(model)

    def _unprotected_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of all optimizers that are neither private nor in the state of the model."""
        covered = self._private | {id(value) for value in getattr(self._model, "parameters", tuple)()}
        for name, optimizer in {"optimizer": self._optimizer.original_optimizer, **self._others}.items():
            for group_number, group in enumerate(getattr(optimizer, "param_groups", ())):
                for index, value in enumerate(group["params"]):
                    if id(value) not in covered:
                        yield f"{name}.param_groups.{group_number}.{index}", value

    def restore(self) -> None:
        """Restore everything that the step wrote to."""
        self._snapshot.restore()

    def run(
        self, batch: Any, first: StepTrace | None, *, norm_factor: float = 1.0, next_batch: Any = None
    ) -> StepTrace:
        self.restore()
        run = _OpacusRun(self._snapshot, first)
        with ExitStack() as undo:
            for protected in self._protected:
                _scale_norms(protected, norm_factor)
                _WatchedOptimizer(protected, run, self._names).install(undo)
            try:
                self._step(batch)
                if next_batch is not None:
                    self._step(next_batch)
            except Exception as error:  # noqa: BLE001  # an error is a result, too
                run.trace.error = error
        run.trace.state.update(self._state())
        run.trace.attributes.update(attribute_digests(self._model))
        return run.trace

    def _state(self) -> dict[tuple[str, str], str]:
        """Return digests of everything that the step may write, by the finding that a change of it is."""
        optimizer = self._optimizer
        trained = {self._names[id(value)]: value for value in optimizer.params} | self._more_weights
        digests = {("weights", name): digest(value) for name, value in trained.items()}
        inner = optimizer.original_optimizer.state_dict()
        digests |= {("optimizer-state", name): text for name, text in state_digests("", inner["state"])}
        digests |= {("hyperparameters", name): text for name, text in _settings(optimizer)}
        digests |= dict(self._model_state())
        for name, value in self._others.items():
            digests |= {("other-state", key): text for key, text in state_digests(name, value)}
        return digests

    def _model_state(self) -> Iterator[tuple[tuple[str, str], str]]:
        model_state = {} if self._model is None else self._model.state_dict(keep_vars=True)
        for name, value in model_state.items():
            if isinstance(value, Tensor) and id(value) not in self._private:
                kind = "weights" if isinstance(value, nn.Parameter) else "buffers"
                yield (kind, name.removeprefix("_module.")), digest(value)

    def _uncovered(self, model: Any) -> tuple[str, ...]:
        gaps = [
            "what the step writes elsewhere than to its model, its optimizers and the named state, such as "
            "files and logs, is not compared"
        ]
        if model is None:
            gaps.append("buffers and unprotected weights of the model: pass model=...")
        if self.must_clip:
            gaps.append("with ghost clipping, norms of gradients were compared instead of gradients")
        if len(self._protected) > 1:
            gaps.append(
                f"the step has {len(self._protected)} private optimizers: make sure that the claim counts "
                "the releases of all of them"
            )
        return tuple(gaps)


class _Protected(NamedTuple):
    """A private optimizer, and the model that does its ghost clipping, if any."""

    optimizer: DPOptimizer
    ghost: Any

    @classmethod
    def among(cls, optimizer: DPOptimizer, models: Sequence[Any]) -> _Protected:
        """Return an optimizer with that of the models which does its ghost clipping."""
        trained = set(map(id, optimizer.params))
        ghosts = [
            model
            for model in models
            if hasattr(model, "get_clipping_coef") and trained <= set(map(id, model.parameters()))
        ]
        ghost = ghosts[0] if ghosts else None
        clip = clip_for(optimizer, ghost)
        _require_replayable(optimizer)
        return cls(optimizer, ghost if isinstance(clip, GhostClip) else None)


def _accountants(protected: Sequence[_Protected]) -> dict[str, Any]:
    accountings = [attached_accounting(optimizer) for optimizer, _ in protected]
    return {
        f"accountant {index + 1}" if index else "accountant": accounting.accountant
        for index, accounting in enumerate(accountings)
        if accounting is not None
    }


class _OpacusRun:
    """One run: its trace, and the random numbers of the noise."""

    def __init__(self, snapshot: TorchSnapshot, first: StepTrace | None) -> None:
        self.trace = StepTrace()
        self._snapshot, self._first = snapshot, first
        self._start = self._random_digest()

    def _random_digest(self) -> list[tuple[str, str]]:
        return list(state_digests("", self._snapshot.random_state()))

    def before_noise(self) -> ReleaseTrace | None:
        """Restore the random numbers of the first run; return its release, None if there is none."""
        index = len(self.trace.releases)
        state, used = self._snapshot.random_state(), self._random_digest()
        if self._first is None or index >= len(self._first.releases):
            self.trace.uses_randomness |= used != self._start
            self.trace.random.append((state, used))
            return None
        state, first = self._first.random[index]
        self.trace.has_same_randomness &= used == first
        self._snapshot.set_random_state(state)
        return self._first.releases[index]

    def after_noise(self, release: ReleaseTrace) -> None:
        """Add a release to the trace."""
        self.trace.releases.append(release)
        self._start = self._random_digest()


class _WatchedOptimizer:
    """What one private optimizer does during a run."""

    def __init__(self, protected: _Protected, run: _OpacusRun, names: Mapping[int, str]) -> None:
        self._optimizer, self._ghost = protected
        self._run, self._trace, self._names = run, run.trace, names
        self._num_updates = 0
        self._rows: list[FloatArray] = []  # since the last release
        self._row_eps = 0.0
        self._first: ReleaseTrace | None = None  # the same release in the first run
        self._before: NumberArray = np.zeros(0)  # noise or scaling

    def install(self, undo: ExitStack) -> None:
        """Watch the methods of the optimizer until ``undo`` is closed."""
        optimizer, ghost = self._optimizer, self._ghost
        undo.enter_context(
            watched(optimizer, "add_noise", before=self._before_noise, after=self._after_noise)
        )
        undo.enter_context(
            watched(optimizer, "scale_grad", before=self._before_scaling, after=self._after_scaling)
        )
        if ghost is None:
            undo.enter_context(watched(optimizer, "clip_and_accumulate", before=self._note_samples))
        else:
            undo.enter_context(watched(ghost, "get_clipping_coef", after=self._note_norms))
        hook = updating_optimizer(optimizer).register_step_pre_hook(self._before_update)
        undo.callback(hook.remove)

    def _note_samples(self) -> None:
        samples = self._optimizer.grad_samples
        self._note_rows(fingerprint_rows(samples), samples)

    def _note_norms(self, _: Tensor) -> None:
        """Note the norms of the gradients from which the model computed clipping factors."""
        norms = self._ghost._per_sample_gradient_norms.detach()
        self._note_rows(norms.double().cpu().numpy()[:, None], [norms])

    def _note_rows(self, rows: FloatArray, samples: Sequence[Tensor]) -> None:
        self._rows.append(rows)
        self._row_eps = max(self._row_eps, product_precision(samples))

    def _before_noise(self) -> None:
        self._first = self._run.before_noise()
        self._before = _numbers([parameter.summed_grad for parameter in self._optimizer.params])

    def _after_noise(self, _: Any) -> None:
        """Note the release, and replace it by that of the first run."""
        noisy, first = self._gradients(), self._first
        rows, self._rows = np.concatenate(self._rows) if self._rows else None, []
        release = ReleaseTrace(
            total=self._before,
            noisy=noisy,
            unit=float(self._optimizer.max_grad_norm),
            eps=precision([parameter.grad for parameter in self._optimizer.params]),
            rows=rows,
            row_eps=self._row_eps,
        )
        if first is not None and first.noisy.shape == noisy.shape:
            vector = torch.from_numpy(first.noisy.copy())  # the optimizer changes it in place
            for parameter, gradient in split_like(vector, self._optimizer.params):
                parameter.grad = gradient.to(parameter.grad)
        self._run.after_noise(release)

    def _gradients(self) -> NumberArray:
        return _numbers([parameter.grad for parameter in self._optimizer.params])

    def _before_scaling(self) -> None:
        self._before = self._gradients()

    def _after_scaling(self, _: Any) -> None:
        """Note the number by which the release was divided."""
        releases = self._trace.releases
        factor = scale_between(self._before, self._gradients(), releases[-1].eps) if releases else None
        if factor:
            self._trace.state["divisor", f"release {len(releases)}"] = f"{1 / factor:.6g}"

    def _before_update(self, *_: Any) -> None:
        """Note the gradient and the settings with which the wrapped optimizer is about to update."""
        self._num_updates += 1
        suffix = f" in update {self._num_updates}"
        for name, text in _group_settings(self._optimizer):
            self._trace.state["hyperparameters", name + suffix] = text
        for parameter in self._optimizer.params:
            text = "None" if parameter.grad is None else digest(parameter.grad)
            self._trace.state["gradient-after-noise", f"{self._names[id(parameter)]}{suffix}"] = text


def _numbers(tensors: Sequence[Any]) -> NumberArray:
    vector = flat(tensors).cpu()
    return (vector.float() if vector.dtype in {torch.float16, torch.bfloat16} else vector).numpy()


def _settings(optimizer: DPOptimizer) -> Iterator[tuple[str, str]]:
    """Yield the settings of the mechanism, and those of each parameter group."""
    for name in (
        "noise_multiplier",
        "max_grad_norm",
        "max_grad_norms",
        "expected_batch_size",
        "loss_reduction",
    ):
        if hasattr(optimizer, name):
            yield from state_digests(name, getattr(optimizer, name))
    yield from _group_settings(optimizer)


def _group_settings(optimizer: DPOptimizer) -> Iterator[tuple[str, str]]:
    """Yield the settings of each parameter group, such as its learning rate."""
    for index, group in enumerate(optimizer.param_groups):
        settings = {name: value for name, value in group.items() if name != "params"}
        name = "param_groups" if len(optimizer.param_groups) == 1 else f"param_groups.{index}"
        yield from state_digests(name, settings)


def _scale_norms(protected: _Protected, factor: float) -> None:
    """Multiply all clipping norms; the snapshot restores them."""
    optimizer: Any = protected.optimizer
    if factor == 1.0:
        return
    optimizer.max_grad_norm = optimizer.max_grad_norm * factor
    if hasattr(optimizer, "max_grad_norms"):
        optimizer.max_grad_norms = [norm * factor for norm in optimizer.max_grad_norms]
    if protected.ghost is not None:
        protected.ghost.max_grad_norm = protected.ghost.max_grad_norm * factor


def _parameter_names(protected: Sequence[_Protected], model: Any) -> dict[int, str]:
    parameters = [value for optimizer, _ in protected for value in optimizer.params]
    names = {id(value): f"parameter {index}" for index, value in enumerate(parameters)}
    if model is not None:
        names |= {id(value): name.removeprefix("_module.") for name, value in model.named_parameters()}
    return names
