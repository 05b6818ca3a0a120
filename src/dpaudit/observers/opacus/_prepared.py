"""The parts that ``PrivacyEngine.make_private`` returned, out of their wrappers.

The accountant is reached through the step hook of the optimizer, and the sampler through the loader, also if
a ``BatchMemoryManager`` splits its batches.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

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
from torch.utils.data import BatchSampler, DataLoader

from dpaudit.errors import InputError
from dpaudit.recording import DPSGDParams

_WRAPPED_AS = ("_optimizer", "optimizer")  # by Lightning, by Accelerate
_MAX_DEPTH = 4  # of wrappers, and of functions around the hook of an accountant


def unwrapped(optimizer: Any) -> Any:
    """Return the private optimizer inside wrappers such as those of Lightning and Accelerate.

    Lightning's wrapper copies the attributes and the class of what it wraps, so that it looks private; its
    steps are those of the optimizer inside.
    """
    inner, kinds = optimizer, [type(optimizer).__name__]
    for _ in range(_MAX_DEPTH):
        wrapped = _wrapped(inner)
        if wrapped is None:
            break
        inner = wrapped
        kinds.append(type(inner).__name__)
    if not isinstance(inner, DPOptimizer):
        raise InputError(
            "Expected the optimizer that PrivacyEngine.make_private returned, got "
            f"{' around '.join(kinds)}, which is not private."
        )
    return inner


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

    def counts(self) -> dict[tuple[float, float], int]:
        """Return the number of accounted steps for each noise multiplier and sample rate."""
        counts: dict[tuple[float, float], int] = {}
        for noise, rate, num_steps in self.accountant.history:
            counts[noise, rate] = counts.get((noise, rate), 0) + num_steps
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
    """A reader of the parameters that the optimizer claims; ``note_step`` must be called in every step."""

    def __init__(self, optimizer: DPOptimizer, loader: Any) -> None:
        self._optimizer = optimizer
        self._rate = None if loader is None else loader_rate(loader)
        if loader is not None and self._rate is None and accounted_rate(optimizer) is None:
            raise InputError(
                "Expected the loader that make_private returned, which has a sample rate, got a "
                f"{type(loader).__name__} without one: pass sample_rate=... instead."
            )
        self._noises: dict[float, None] = {}  # in order of appearance

    def note_step(self, noise_multiplier: float) -> None:
        """Note the noise multiplier of this step."""
        self._noises[noise_multiplier] = None

    def __call__(self) -> DPSGDParams:
        noises = tuple(self._noises) or (float(self._optimizer.noise_multiplier),)
        rate = self._rate if self._rate is not None else accounted_rate(self._optimizer)
        origins = {
            "noise_multiplier": "the optimizer",
            "sample_rate": "the accountant" if self._rate is None else "the loader",
        }
        if len(noises) > 1:  # steps differ, so the claimed noise multiplier must be given
            return DPSGDParams(sample_rate=rate, noises=noises, origins=origins)
        return DPSGDParams(noise_multiplier=noises[0], sample_rate=rate, origins=origins)


def loader_rate(loader: Any) -> float | None:
    """Return the sample rate of the loader that ``make_private`` or ``BatchMemoryManager`` returned.

    A loader with a sampler of its own has none; a single batch of all examples has rate 1.
    """
    owner, has_one_size = loader, False
    for name in ("batch_sampler", "sampler", "sampler"):  # a sampler may be inside one that splits batches
        rate = getattr(owner, "sample_rate", None)
        if rate is not None:
            return float(rate)
        owner = getattr(owner, name, None)
        has_one_size = has_one_size or isinstance(owner, BatchSampler)
    if has_one_size and not _is_one_batch(loader):
        raise InputError(
            "Expected a loader with Poisson sampling, which the claim assumes, got a "
            f"{type(loader).__name__} with batches of one size: create it by make_private with "
            "poisson_sampling=True."
        )
    return 1.0 if has_one_size else None


def _is_one_batch(loader: Any) -> bool:
    """Return whether all examples of the data set are in one batch."""
    size = getattr(loader, "batch_size", None)
    try:
        return size is not None and size >= len(loader.dataset)
    except TypeError:  # a data set that is only iterated
        return False


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
        if isinstance(prepared, Mapping):
            components = {name: prepared[name] for name in names if name in prepared}
        elif isinstance(prepared, Iterable) and not isinstance(prepared, nn.Module | DataLoader):
            components = _sorted_by_type(prepared)
        elif isinstance(prepared, Optimizer):
            components = {"optimizer": prepared}
        else:
            components = {name: getattr(prepared, name) for name in names if hasattr(prepared, name)}
        if components.get("optimizer") is None:
            raise InputError(
                "Expected what make_private returned, or a dict or object with optimizer, module and loader; "
                f"got {type(prepared).__name__} without a private optimizer."
            )
        components["optimizer"] = unwrapped(components["optimizer"])
        components["schedulers"] = tuple(_schedulers(prepared))
        return cls(**components)

    @property
    def network(self) -> nn.Module | None:
        """The model; with ``wrap_model=False``, ``make_private`` returns an object that holds it."""
        if isinstance(self.module, nn.Module):
            return self.module
        held = getattr(self.module, "_module", None)
        return held if isinstance(held, nn.Module) else None

    @property
    def sampler(self) -> Any:
        """The batch sampler that draws examples, or None."""
        sampler = getattr(self.loader, "batch_sampler", None)
        return sampler.sampler if isinstance(sampler, BatchSplittingSampler) else sampler

    @property
    def drawn_rate(self) -> float | None:
        """The rate of Poisson sampling at which the loader draws, if it states one."""
        rate = getattr(self.sampler, "sample_rate", getattr(self.loader, "sample_rate", None))
        return None if rate is None else float(rate)

    @property
    def num_examples(self) -> int | None:
        """The number of examples of the data set, if it has a length."""
        try:
            return len(self.loader.dataset)
        except (AttributeError, TypeError):
            return None


def _schedulers(prepared: Any) -> Iterator[Any]:
    """Yield the schedulers among the parts of a training run, whatever their names."""
    if isinstance(prepared, Mapping):
        components: Iterable[Any] = prepared.values()
    elif isinstance(prepared, list | tuple):
        components = prepared
    else:
        components = getattr(prepared, "__dict__", {}).values()
    yield from (
        component for component in components if isinstance(component, _NoiseScheduler | _GradClipScheduler)
    )


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
        elif "optimizer" not in components and _is_private(component):
            components["optimizer"] = component
        elif isinstance(component, Optimizer):
            others.append(component)
    if others:
        components["other_optimizers"] = tuple(others)
    return components


def _name_by_type(component: Any) -> str | None:
    """Return the name of an engine, a loader, a loss or a model; None for anything else."""
    if isinstance(component, PrivacyEngine):
        return "privacy_engine"
    if isinstance(component, DataLoader):
        return "loader"
    if isinstance(component, DPLossFastGradientClipping | _Loss):
        return "criterion"
    return "module" if isinstance(component, nn.Module) or hasattr(component, "remove_hooks") else None


def _is_private(component: Any) -> bool:
    try:
        unwrapped(component)
    except InputError:
        return False
    return True
