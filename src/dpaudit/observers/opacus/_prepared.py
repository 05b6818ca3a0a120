"""The parts that ``PrivacyEngine.make_private`` returned, out of their wrappers.

The accountant is reached through the step hook of the optimizer, and the sampler through the loader, also if
a ``BatchMemoryManager`` splits its batches. :class:`LoaderBatches` follows that sampler: workers and wrappers
may draw ahead, and which batch belongs to which step is decided in ``BatchRecord``, by the number of rows.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
from opacus import PrivacyEngine
from opacus.accountants.accountant import IAccountant
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.schedulers.grad_clip_scheduler import _GradClipScheduler
from opacus.schedulers.noise_scheduler import _NoiseScheduler
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn
from torch.nn.modules.loss import _Loss
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SubsetRandomSampler

from dpaudit._types import IntArray
from dpaudit.diagnostics import BatchRecord
from dpaudit.errors import InputError
from dpaudit.observers._session import StepRecorder
from dpaudit.recording import DPSGDParams

Epoch: TypeAlias = Callable[[], Iterator[Any]]
"""A function that starts drawing the batches of an epoch."""

_WRAPPED_AS = ("_optimizer", "optimizer")  # by Lightning, by Accelerate
_MAX_DEPTH = 4  # of wrappers, and of functions around the hook of an accountant


def unwrapped(optimizer: Any) -> Any:
    """Return the private optimizer inside wrappers such as those of Lightning and Accelerate.

    Lightning's wrapper copies the attributes and the class of what it wraps, so that it looks private; its
    steps are those of the optimizer inside.
    """
    wrappers = list(_wrappers(optimizer))
    if not isinstance(wrappers[-1], DPOptimizer):
        raise InputError(
            f"{' around '.join(type(wrapper).__name__ for wrapper in wrappers)} is not private; pass the "
            "optimizer that PrivacyEngine.make_private returned."
        )
    return wrappers[-1]


def private_inside(component: Any) -> DPOptimizer | None:
    """Return the private optimizer inside wrappers, or None if there is none."""
    *_, inner = _wrappers(component)
    return inner if isinstance(inner, DPOptimizer) else None


def _wrappers(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and those inside it, the innermost last."""
    for _ in range(_MAX_DEPTH + 1):
        yield optimizer
        optimizer = _wrapped(optimizer)
        if optimizer is None:
            return


def updating_optimizer(optimizer: DPOptimizer) -> Any:
    """Return the optimizer that changes the weights and has hooks, inside wrappers that have none.

    ``make_private`` may be called with the wrapper of Accelerate.
    """
    inner = optimizer.original_optimizer
    while not hasattr(inner, "_optimizer_step_pre_hooks") and (wrapped := _wrapped(inner)) is not None:
        inner = wrapped
    return inner


def _wrapped(wrapper: Any) -> Any:
    """Return the optimizer that an object holds, or None if it holds none or several."""
    attributes = getattr(wrapper, "__dict__", {})
    for name in _WRAPPED_AS:
        if isinstance(attributes.get(name), Optimizer):
            return attributes[name]
    if isinstance(wrapper, DPOptimizer):
        return None
    members = wrapper if isinstance(wrapper, list | tuple) else attributes.values()
    nested = [
        member for value in members for member in (value if isinstance(value, list | tuple) else [value])
    ]
    private = {id(member): member for member in nested if isinstance(member, DPOptimizer)}
    return next(iter(private.values())) if len(private) == 1 else None


@dataclass(frozen=True, eq=False)
class Accounting:
    """The accountant that a step hook reports to, and the sample rate that it reports."""

    accountant: Any
    sample_rate: float | None

    def counts(self) -> Counter[tuple[float, float]]:
        """Return the number of accounted steps for each noise multiplier and sample rate."""
        counts: Counter[tuple[float, float]] = Counter()
        for noise, rate, num_steps in self.accountant.history:
            counts[noise, rate] += num_steps
        return counts


def attached_accounting(optimizer: DPOptimizer) -> Accounting | None:
    """Return the accountant whose hook is attached to the optimizer, also inside another hook.

    Both are available only as variables in the closure of the hook.
    """
    return next(_accountings(optimizer.step_hook, _MAX_DEPTH), None)


def _accountings(hook: Any, depth: int) -> Iterator[Accounting]:
    if isinstance(hook, functools.partial):
        hook = hook.func
    if not inspect.isfunction(hook) or depth == 0:
        return
    try:
        variables = inspect.getclosurevars(hook).nonlocals
    except ValueError:  # a variable that has no value yet
        return
    rate = variables.get("sample_rate")
    for value in variables.values():
        if isinstance(value, IAccountant):
            yield Accounting(value, float(rate) if isinstance(rate, int | float) else None)
        elif isinstance(value, PrivacyEngine):
            yield Accounting(value.accountant, None)
    for value in variables.values():
        yield from _accountings(value, depth - 1)


class OpacusParamsReader:
    """A reader of the parameters that the optimizer claims; ``note_step`` must be called in every step.

    The sample rate is that of the loader with ``reads_loader``, otherwise that of the accountant.
    """

    def __init__(self, training: PreparedTraining, *, reads_loader: bool = True) -> None:
        self._optimizer = training.optimizer
        self._rate = training.loader_rate() if reads_loader else None
        self._noises: dict[float, None] = {}  # in order of appearance

    def note_step(self, noise_multiplier: float) -> None:
        """Note the noise multiplier of this step."""
        self._noises[noise_multiplier] = None

    def __call__(self) -> DPSGDParams:
        noises = tuple(self._noises) or (float(self._optimizer.noise_multiplier),)
        origins = {
            "noise_multiplier": "the optimizer",
            "sample_rate": "the accountant" if self._rate is None else "the loader",
        }
        return DPSGDParams(
            # if steps differ, the claimed noise multiplier must be given
            noise_multiplier=noises[0] if len(noises) == 1 else None,
            sample_rate=accounted_rate(self._optimizer) if self._rate is None else self._rate,
            noises=noises if len(noises) > 1 else None,
            origins=origins,
        )


def accounted_rate(optimizer: DPOptimizer) -> float | None:
    """Return the sample rate of the accountant, if its hook is attached to the optimizer."""
    accounting = attached_accounting(optimizer)
    if accounting is None:
        return None
    rates = {rate for _, rate in accounting.counts()}
    if len(rates) > 1:
        return None
    return float(rates.pop()) if rates else accounting.sample_rate


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedTraining:
    """The parts of a training run before its first step; None for those that are not known."""

    optimizer: DPOptimizer
    module: Any = None
    loader: Any = None
    criterion: Any = None
    privacy_engine: Any = None
    other_optimizers: tuple[Any, ...] = ()
    """Other optimizers that run in the same loop."""
    schedulers: tuple[Any, ...] = ()
    """Schedulers of the noise or of the clipping norm."""

    @classmethod
    def of(cls, prepared: Any) -> PreparedTraining:
        """Sort what a function returned: a tuple by type, a mapping or an object by names."""
        names = [field.name for field in fields(cls) if field.name != "schedulers"]
        values: Iterable[Any] = ()
        if isinstance(prepared, Mapping):
            values = prepared.values()
            components = {name: prepared[name] for name in names if name in prepared}
        elif isinstance(prepared, Iterable) and not isinstance(prepared, nn.Module | DataLoader):
            values = list(prepared)
            components = _sorted_by_type(values)
        elif isinstance(prepared, Optimizer):
            components = {"optimizer": prepared}
        else:
            values = getattr(prepared, "__dict__", {}).values()
            components = {name: getattr(prepared, name) for name in names if hasattr(prepared, name)}
        if components.get("optimizer") is None:
            raise InputError(
                "A private optimizer is missing: pass or return what make_private returned, or a dict or an "
                f"object with optimizer, module and loader, got a {type(prepared).__name__}."
            )
        components["optimizer"] = unwrapped(components["optimizer"])
        schedulers = [value for value in values if isinstance(value, _NoiseScheduler | _GradClipScheduler)]
        return cls(**components, schedulers=tuple(schedulers))

    @property
    def network(self) -> nn.Module | None:
        """The model; with ``wrap_model=False``, ``make_private`` returns an object that holds it."""
        if isinstance(self.module, nn.Module):
            return self.module
        held = getattr(self.module, "_module", None)
        return held if isinstance(held, nn.Module) else None

    @property
    def names(self) -> list[str]:
        """The names of the optimizer's parameters in the model, or their numbers."""
        named = () if self.network is None else self.network.named_parameters()
        names = {id(value): name.removeprefix("_module.") for name, value in named}
        return [names.get(id(value), f"parameter {i}") for i, value in enumerate(self.optimizer.params)]

    @property
    def sampler(self) -> Any:
        """The batch sampler that draws examples, also inside one that splits batches, or None."""
        sampler = getattr(self.loader, "batch_sampler", None)
        return sampler.sampler if isinstance(sampler, BatchSplittingSampler) else sampler

    @property
    def drawn_rate(self) -> float | None:
        """The rate of Poisson sampling at which the loader draws, if it states one."""
        rate = getattr(self.sampler, "sample_rate", getattr(self.loader, "sample_rate", None))
        return None if rate is None else float(rate)

    def loader_rate(self) -> float | None:
        """Return the sample rate of the claim that the loader states; None without a loader.

        A single batch of all examples has rate 1.
        """
        rate = getattr(self.loader, "sample_rate", self.drawn_rate)
        if rate is not None or self.loader is None:
            return None if rate is None else float(rate)
        if isinstance(self.sampler, BatchSampler):
            if (self.loader.batch_size or 0) >= (self.num_examples or math.inf):
                return 1.0
            raise InputError(
                f"The claim assumes Poisson sampling, but the loader is a {type(self.loader).__name__} with "
                "batches of one size; create it by make_private with poisson_sampling=True."
            )
        if accounted_rate(self.optimizer) is None:
            raise InputError(
                f"{type(self.loader).__name__} has no sample rate; pass the loader that make_private "
                "returned, or sample_rate=..."
            )
        return None

    @property
    def num_examples(self) -> int | None:
        """The number of examples of the data set, if it has a length."""
        try:
            return len(self.loader.dataset)
        except (AttributeError, TypeError):
            return None


def _sorted_by_type(prepared: Iterable[Any]) -> dict[str, Any]:
    """Return the parts by name; further optimizers are ``other_optimizers``."""
    components: dict[str, Any] = {}
    others = []
    for component in prepared:
        name = _name_by_type(component)
        if name == "module" and isinstance(components.get(name), AbstractGradSampleModule):
            continue
        if name is not None:
            components[name] = component
        elif "optimizer" not in components and private_inside(component) is not None:
            components["optimizer"] = component
        elif isinstance(component, Optimizer):
            others.append(component)
    return components | {"other_optimizers": tuple(others)}


def _name_by_type(component: Any) -> str | None:
    """Return the name of an engine, a loader, a loss or a model; None for anything else."""
    kinds: dict[str, Any] = {
        "privacy_engine": PrivacyEngine,
        "loader": DataLoader,
        "criterion": DPLossFastGradientClipping | _Loss,
        "module": nn.Module,
    }
    is_model = hasattr(component, "remove_hooks")  # around one that is not wrapped
    names = (name for name, kind in kinds.items() if isinstance(component, kind))
    return next(names, "module" if is_model else None)


class LoaderBatches:
    """The batches of the loader, if it is given and draws by index; ``record`` keeps them."""

    def __init__(self, training: PreparedTraining, *, is_distributed: bool, is_followed: bool = True) -> None:
        self._is_followed, self._num_epochs = is_followed, 0
        self.record = BatchRecord(
            "batches are not tested, and rows are not compared with drawn examples: pass loader=..., the "
            "loader that make_private returned, and start the loop over it inside the with block"
        )
        self._sampler = training.sampler if isinstance(training.loader, DataLoader) else None
        self._subset: IntArray | None = None
        inside = getattr(self._sampler, "sampler", self._sampler)
        if isinstance(inside, SubsetRandomSampler):
            self._subset = np.unique(np.asarray(inside.indices, dtype=np.int64))
        self._num_examples = training.num_examples if self._subset is None else self._subset.size
        why_not = None
        if isinstance(getattr(training.loader, "dataset", None), IterableDataset):
            self._sampler = None
            self.record.unobserved = (
                "batches are not tested: an IterableDataset draws its examples itself, without indices"
            )
        elif is_distributed:
            why_not = "each process draws from its own part of the data"
        elif self._num_examples is None:
            why_not = "the data set of the loader has no length"
        if self._sampler is not None and why_not is not None:
            self.record.tests_sampling = False
            batches = "batches of several processes" if is_distributed else "batches"
            self.record.unobserved = f"{batches} are not tested against Poisson sampling: {why_not}"
        if is_followed and self._sampler is not None:
            self.record.num_examples = self._num_examples or 0
            collate = getattr(training.loader, "collate_fn", None)
            self.record.fills_empty = getattr(collate, "rand_on_empty", False)

    @contextmanager
    def installed(self, steps: StepRecorder) -> Iterator[None]:
        """Follow the loader inside the block, unless another hook does."""
        if not self._is_followed or not hasattr(self._sampler, "__dict__"):
            yield
            return
        note = steps.guarded(self._note)

        def noting(epoch: Epoch) -> Iterator[Any]:
            number = self._num_epochs = self._num_epochs + 1
            for batch in epoch():
                note(batch, number)
                yield batch

        with iterated_by(self._sampler, noting):
            yield

    def _note(self, batch: Any, epoch: int) -> None:
        indices = np.asarray(batch, dtype=np.int64).reshape(-1)
        if self._subset is not None:
            indices = np.searchsorted(self._subset, indices).astype(np.int64)
        self.record.add_drawn_batch(indices, self._num_examples or 0, epoch)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs, which belongs to no training run."""
        return {**vars(self), "_sampler": None}


@contextmanager
def iterated_by(
    sampler: Any, batches: Callable[[Epoch], Iterator[list[int]]], **attributes: Any
) -> Iterator[None]:
    """Iterate over a sampler through ``batches``, which receives the sampler's own epochs.

    ``__iter__`` is looked up on the class, so the class is replaced, by one with these ``attributes``. The
    object stays the same because a BatchMemoryManager, created before or after this, holds a reference to it.
    """
    original = type(sampler)

    def iterate(self: Any) -> Iterator[list[int]]:
        return batches(lambda: original.__iter__(self))

    names = {"__iter__": iterate, "__module__": original.__module__, **attributes}
    sampler.__class__ = type(original.__name__, (original,), names)
    try:
        yield
    finally:
        sampler.__class__ = original
