"""Lints of training with Opacus: faults that its settings show without statistics.

A rule yields findings, which no correct training run has, and notes as strings. ``_check.py`` applies the
rules before the first step and after the last.

Opacus computes the sample rate as 1 / (number of batches) and divides the noisy sum by int(n * rate). Both
may differ between n examples and n - 1 or n + 1, while accounting assumes the same mechanism for both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from opacus.accountants import GaussianAccountant
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils.data import BatchSampler, ConcatDataset, IterableDataset, Subset

from dpaudit._types import IntArray
from dpaudit.diagnostics import Finding
from dpaudit.observers.opacus._clipping import clipped_norm
from dpaudit.observers.opacus._prepared import PreparedTraining, attached_accounting

Lint: TypeAlias = Finding | str
COMPUTED = 1e-6  # relative difference of numbers of which one is computed from the other
_ROUNDED_BY_USER = 0.01  # the same for numbers that a user rounded


def findings_and_notes(lints: Iterable[Lint]) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Return the findings and the notes, each once."""
    unique = list(dict.fromkeys(lints))
    findings = tuple(lint for lint in unique if isinstance(lint, Finding))
    return findings, tuple(lint for lint in unique if isinstance(lint, str))


def unchecked(training: PreparedTraining) -> Iterator[str]:
    if training.network is None:
        yield (
            "layers that mix examples, and parameters that are trained without noise, are not checked "
            "without module="
        )
    if training.loader is None:
        yield "without loader=, the sampler and the number of examples are not checked"
    accounting = attached_accounting(training.optimizer)
    if accounting is None and training.privacy_engine is None:
        yield "no accountant is attached to the optimizer, so its numbers are not compared with the run's"
    elif accounting is not None and accounting.sample_rate is None:
        yield (
            "the step hook is not that of Opacus: the sample rate that it reports to the accountant is not "
            "checked, and the noise multiplier only in an audit"
        )


def noise_lints(noises: Sequence[float], claimed: float | None) -> Iterator[Finding]:
    """Compare the noise multipliers of the optimizer with the claimed one."""
    low, multiplier = min(noises, default=math.inf), "The optimizer's noise multiplier is"
    if noises and not (low > 0 and all(map(math.isfinite, noises))):
        sentence = f"{multiplier} {low:g}: there is no privacy without noise."
        yield Finding.certain("noise-multiplier", sentence)
    elif claimed is not None and low < claimed * (1 - _ROUNDED_BY_USER):
        yield Finding.certain("noise-multiplier", f"{multiplier} {low:g}, below the claimed {claimed:g}.")


def present_lints(training: PreparedTraining, sample_rate: float | None) -> Iterator[Lint]:
    """Check settings that are the same before and after the steps: adaptive noise, sampling and data."""
    optimizer = training.optimizer
    adjusted, accounted = getattr(optimizer, "_adjusted_noise_multiplier", None), optimizer.noise_multiplier
    # adaptive clipping releases a noisy count besides, so it must add more noise, not less
    if adjusted is not None and float(adjusted) < float(accounted) * (1 - COMPUTED):
        yield Finding.certain(
            "noise-multiplier",
            f"Noise is added with a multiplier of {float(adjusted):g}, but {float(accounted):g} is accounted "
            "for.",
        )
    yield from _rate_lints(training, sample_rate)
    if training.num_examples is not None:
        if repeated := _num_repeated(training.loader.dataset):
            yield Finding.certain(
                "repeated-entries",
                f"{repeated} of the {training.num_examples} entries of the data set are examples that occur "
                "before: each of them counts more than once, beyond the clipping norm.",
            )
        yield from _size_lints(training, training.num_examples)


def clipping_lints(training: PreparedTraining) -> Iterator[Finding]:
    """Compare the norms to which gradients are clipped with the norm by which the noise is scaled."""
    optimizer = training.optimizer
    scale = float(optimizer.max_grad_norm)
    if not (0 < scale < math.inf):
        yield Finding.certain(
            "clipping-norm", f"The clipping norm must be positive and finite, got {scale:g}."
        )
        return
    clipped = clipped_norm(optimizer, training.module)
    if not clipped <= scale * (1 + _ROUNDED_BY_USER):
        where = "the layers together" if hasattr(optimizer, "max_grad_norms") else "the model"
        yield Finding.certain(
            "clipping-norm",
            f"Gradients are clipped to a norm of {clipped:g} by {where}, but the noise is scaled for a norm "
            f"of {scale:g}.",
        )


def _rate_lints(training: PreparedTraining, claimed: float | None) -> Iterator[Lint]:
    """Compare the loader's sampling with that of the accountant and the claim."""
    accounting, drawn = attached_accounting(training.optimizer), training.drawn_rate
    accounted = None if accounting is None else accounting.sample_rate
    if drawn is None:
        yield from _fixed_batch_lints(training, accounted if claimed is None else claimed)
        return
    draws = f"The loader draws each example with probability {drawn:.6g}"
    limits = ((accounted, "accountant's", COMPUTED), (claimed, "claimed", _ROUNDED_BY_USER))
    for rate, whose, tolerance in limits:
        if rate is not None and drawn > rate * (1 + tolerance):
            yield Finding.certain("loader-rate", f"{draws}, more than the {whose} sample rate of {rate:.6g}.")
            return
    # rounding in Opacus makes the accountant's rate up to 2 % larger than the loader's
    if accounted is not None and drawn < accounted * 0.95:
        yield f"{draws}, less than the accountant's sample rate of {accounted:.6g}: epsilon is overestimated."


def _fixed_batch_lints(training: PreparedTraining, rate: float | None) -> Iterator[Lint]:
    """Check a loader without Poisson sampling; one batch of all examples needs none."""
    sampler = training.sampler
    if type(sampler) is not BatchSampler or (rate or 0.0) >= 1:
        return
    whence = f"a {type(sampler.sampler).__name__}"
    if isinstance(training.loader.dataset, IterableDataset):  # whose sampler has no indices
        whence = "an IterableDataset, in its own order"
    elif hasattr(sampler.sampler, "__len__") and len(sampler) <= 1:
        return
    fact = f"The loader has batches of {sampler.batch_size} from {whence}"
    accounting = attached_accounting(training.optimizer)
    if accounting is not None and isinstance(accounting.accountant, GaussianAccountant):
        yield f"{fact}: call get_epsilon(poisson=False), which is for batches of one size."
    elif rate is not None:
        sentence = f"{fact}, but the sample rate {rate:.6g} is accounted for as Poisson sampling."
        yield Finding.certain("batch-sampler", sentence)
    else:
        yield f"{fact}: a claim that assumes Poisson sampling does not apply."


def _num_repeated(dataset: Any) -> int:
    """Return how many entries of subsets and concatenations are the same entry of a data set again."""
    if not isinstance(dataset, Subset | ConcatDataset):
        return 0
    try:
        owners, indices = _entries(dataset)
    except (TypeError, ValueError, IndexError):
        return 0  # entries that are not numbered
    return len(indices) - len(np.unique(np.stack([owners, indices]), axis=1).T)


def _entries(dataset: Any) -> tuple[IntArray, IntArray]:
    """Return the data set that holds each entry, as a number, and the index there."""
    if isinstance(dataset, Subset):
        owners, indices = _entries(dataset.dataset)
        chosen = np.asarray([int(index) for index in dataset.indices], dtype=np.int64)
        return owners[chosen], indices[chosen]
    if isinstance(dataset, ConcatDataset):
        pairs = [_entries(inner) for inner in dataset.datasets]
        owners, indices = (np.concatenate(column) for column in zip(*pairs, strict=True))
        return owners, indices
    return np.full(len(dataset), id(dataset)), np.arange(len(dataset))


def _size_lints(training: PreparedTraining, size: int) -> Iterator[str]:
    """Compare the sample rate and the divisor at n examples with those at n - 1 and n + 1."""
    rate, sampler, divisor = training.drawn_rate, training.sampler, training.optimizer.expected_batch_size
    if rate is None or divisor is None or not hasattr(sampler, "__len__"):
        return
    num_batches, length, ranks = round(1 / rate), len(sampler), getattr(sampler, "num_replicas", 1)

    if not math.isclose(divisor * ranks, _divisor(size, length)):
        return  # it was not computed by make_private
    batch_size, is_mean = _batch_size(size, num_batches), training.optimizer.loss_reduction == "mean"

    def and_divides(number: int, count: int) -> str:
        return f" and divides by {_divisor(number, count)}" if is_mean else ""

    changes = []
    for other in (size - 1, size + 1):
        changed = math.ceil(other / batch_size) if batch_size else num_batches
        if changed != num_batches:
            draws = f"it draws at 1/{changed}{and_divides(other, changed)}"
            changes.append(f"with {other:,} at batch size {batch_size}, {draws}")
        elif and_divides(other, length) != and_divides(size, length):
            changes.append(f"with {other:,}, it divides by {_divisor(other, length)}")
    if changes:
        yield (
            f"The mechanism depends on the number of examples: with {size:,}, Opacus draws at a rate of "
            f"1/{num_batches}{and_divides(size, length)}; {'; '.join(changes)}. The accounting holds if the "
            "number of examples is public or the same in neighboring data sets."
        )


def _divisor(size: int, num_batches: int) -> int:
    """Return the number by which Opacus divides the sum, computed as Opacus does."""
    return int(size * (1 / max(num_batches, 1)))


def _batch_size(size: int, num_batches: int) -> int | None:
    """Return the batch size of the original loader if the number of batches then differs at a neighbor.

    Only the number of batches is left of that loader, so that this is one of several possible sizes.
    """
    if size % num_batches == 0:
        return size // num_batches
    if num_batches > 1 and (size - 1) % (num_batches - 1) == 0:
        return (size - 1) // (num_batches - 1)
    return None


def seed_lints(training: PreparedTraining, *, is_audit: bool = False) -> Iterator[Lint]:
    """Check that the noise cannot be recomputed; a seed is usual in an audit, but not in production."""
    generator, unseeded = training.optimizer.generator, torch.Generator().initial_seed()
    if training.optimizer.secure_mode:
        return
    if _has_known_seed(generator):
        seed = generator.initial_seed()
        sentence = f"The generator of the noise has the seed {seed}: whoever knows it can subtract the noise."
        if seed == unseeded:
            sentence = f"The generator of the noise was never seeded: it starts from {seed} in every process."
        yield sentence if is_audit and seed != unseeded else Finding.certain("noise-seed", sentence)
    if is_audit:
        return
    if generator is None and _has_known_seed(torch.default_generator):
        yield (
            f"The noise comes from torch's global generator, whose seed is {torch.initial_seed()}: whoever "
            "knows it can subtract the noise."
        )
    sampling: Any = getattr(training.sampler, "generator", None)
    if _has_known_seed(sampling):
        yield (
            f"The generator of the sampler has the seed {sampling.initial_seed()}: whoever knows it knows "
            "the batches, so that sampling does not amplify privacy."
        )


def _has_known_seed(generator: Any) -> bool:
    """Return whether the seed can be guessed: it is that of every new generator, or small."""
    if not isinstance(generator, torch.Generator):
        return False
    return generator.initial_seed() == torch.Generator().initial_seed() or generator.initial_seed() < 2**32


def norm_modules(network: nn.Module | None) -> list[tuple[str, Any]]:
    """Return the modules that may mix examples, with their names."""
    modules = () if network is None else network.named_modules()
    return [
        (_plain(name), module) for name, module in modules if isinstance(module, _BatchNorm | _InstanceNorm)
    ]


def mixing_lints(modules: Iterable[tuple[str, Any]]) -> dict[str, Finding]:
    """Return a finding for each module that mixes examples in its present mode, by name.

    Opacus rejects them only if they have trainable parameters.
    """
    findings = {}
    for name, module in modules:
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            fact = "normalizes each example by its whole batch"
        elif isinstance(module, _InstanceNorm) and module.training and module.running_mean is not None:
            fact = "keeps averages of examples in its buffers"
        else:
            continue
        sentence = f"{type(module).__name__} {name} {fact}, which neither clipping nor noise covers."
        findings[name] = Finding.certain("mixing-module", sentence)
    return findings


def outside_parameters(training: PreparedTraining) -> Iterator[tuple[str, Any]]:
    """Yield the trainable parameters of the model that no private optimizer updates."""
    others = [other for other in training.other_optimizers if isinstance(other, DPOptimizer)]
    private = {id(value) for optimizer in (training.optimizer, *others) for value in optimizer.params}
    for name, value in () if training.network is None else training.network.named_parameters():
        is_private = id(value) in private or hasattr(value, "summed_grad")  # set by any private optimizer
        if value.requires_grad and not is_private:
            yield _plain(name), value


def private_elsewhere(training: PreparedTraining) -> Iterator[tuple[str, Any]]:
    """Yield the trainable parameters of the model that only other private optimizers update."""
    observed = set(map(id, training.optimizer.params))
    for name, value in () if training.network is None else training.network.named_parameters():
        if value.requires_grad and hasattr(value, "summed_grad") and id(value) not in observed:
            yield _plain(name), value


def name_list(names: Sequence[str]) -> str:
    """Return the names of parameters, of which at most three are listed; nothing if there are none."""
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"Parameter{'s' if len(names) > 1 else ''} {listed}" if names else ""


def _plain(name: str) -> str:
    """Return the name of a module or parameter without the wrappers around the model."""
    return re.sub(r"^(_?module(\.|$))+", "", name) or "(model)"
