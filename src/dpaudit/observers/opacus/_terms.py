"""What a private optimizer, its loader and its accountant say of the training."""

from __future__ import annotations

import inspect
from typing import Any

from opacus.optimizers import DPOptimizer
from torch.utils.data import BatchSampler

from dpaudit.errors import InputError
from dpaudit.observers._terms import Terms

__all__ = ["ReadTerms", "accounted_rate", "loader_rate"]


class ReadTerms:
    """Reads the claim of an optimizer, now; ``note`` is to be called in every step."""

    def __init__(self, optimizer: DPOptimizer, loader: Any) -> None:
        self._optimizer = optimizer
        self._rate = None if loader is None else loader_rate(loader)
        self._noises: dict[float, None] = {}  # in the order of the steps

    def note(self) -> None:
        """The noise of this step."""
        self._noises[float(self._optimizer.noise_multiplier)] = None

    def __call__(self) -> Terms:
        noises = tuple(self._noises) or (float(self._optimizer.noise_multiplier),)
        rate = self._rate if self._rate is not None else accounted_rate(self._optimizer)
        if len(noises) > 1:  # there is no claim of equal steps: then it has to be given
            return Terms(sample_rate=rate, noises=noises)
        return Terms(noise_multiplier=noises[0], sample_rate=rate)


def loader_rate(loader: Any) -> float:
    """The sample rate of the loader that ``make_private`` or ``BatchMemoryManager`` gave."""
    place, has_one_size = loader, False
    for name in ("batch_sampler", "sampler", "sampler"):  # a sampler may be inside of one that splits
        rate = getattr(place, "sample_rate", None)
        if rate is not None:
            return float(rate)
        place = getattr(place, name, None)
        has_one_size = has_one_size or isinstance(place, BatchSampler)
    if has_one_size:
        raise InputError(
            f"Expected a loader that is Poisson-sampled, which the claim counts with, got a "
            f"{type(loader).__name__} whose batches have one size: make it by make_private with "
            "poisson_sampling=True."
        )
    raise InputError(
        f"Expected the loader that make_private returned, which knows its sample rate, got a "
        f"{type(loader).__name__} that does not: pass sample_rate=... instead."
    )


def accounted_rate(optimizer: DPOptimizer) -> float | None:
    """The rate that the accountant counts with, if its hook is attached to the optimizer.

    The hook is the only thing that knows both; what it knows are the variables around it.
    """
    hook = optimizer.step_hook
    if not inspect.isfunction(hook):
        return None
    known = inspect.getclosurevars(hook).nonlocals
    rates = {rate for _, rate, _ in getattr(known.get("self"), "history", ())}
    if len(rates) > 1:
        return None
    found = rates.pop() if rates else known.get("sample_rate")
    return None if found is None else float(found)
