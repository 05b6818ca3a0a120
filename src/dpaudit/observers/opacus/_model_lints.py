"""Lints of a model and its loss: what mixes examples, and what is trained without clipping and noise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from dpaudit.diagnostics import Finding
from dpaudit.observers.opacus._prepared import PreparedTraining


def norm_modules(network: nn.Module | None) -> list[tuple[str, Any]]:
    """Return the modules that may mix examples, with their names."""
    modules = () if network is None else network.named_modules()
    return [(_plain(name), one) for name, one in modules if isinstance(one, _BatchNorm | _InstanceNorm)]


def mixing_facts(norms: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Return what those modules do that mix examples in their present mode, by name.

    Opacus rejects them only if they have trainable parameters.
    """
    found = {}
    for name, module in norms:
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            found[name] = f"{type(module).__name__} {name} normalizes each example by its whole batch"
        elif isinstance(module, _InstanceNorm) and module.training and module.running_mean is not None:
            found[name] = f"{type(module).__name__} {name} keeps averages of examples in its buffers"
    return found


def module_lints(mixing: dict[str, str]) -> Iterator[Finding]:
    """Yield a finding for each module that mixes examples."""
    for fact in mixing.values():
        yield Finding.certain("mixing-module", f"{fact}, which neither clipping nor noise covers.")


def outside_parameters(training: PreparedTraining) -> Iterator[tuple[str, Any]]:
    """Yield the trainable parameters of the model that no private optimizer updates."""
    private = {id(value) for value in training.optimizer.params}
    for other in training.also:
        if isinstance(other, DPOptimizer):
            private |= {id(value) for value in other.params}
    for name, value in () if training.network is None else training.network.named_parameters():
        is_private = id(value) in private or hasattr(value, "summed_grad")  # set by any private optimizer
        if value.requires_grad and not is_private:
            yield _plain(name), value


def parameter_lints(training: PreparedTraining) -> Iterator[Finding | str]:
    """Check that no other optimizer updates parameters without clipping and noise."""
    outside = dict(outside_parameters(training))
    for other in training.also:
        if isinstance(other, DPOptimizer) or other is training.optimizer.original_optimizer:
            continue
        mine = {id(value) for group in other.param_groups for value in group["params"]}
        names = [name for name, value in outside.items() if id(value) in mine]
        shared = [value for value in training.optimizer.params if id(value) in mine]
        count = len(names) + len(shared)
        if count:
            trained = name_list("Parameter", names) if names else f"{count} private parameters"
            yield Finding.certain(
                "public-parameters",
                f"{trained} {'are' if count > 1 else 'is'} updated by another optimizer, "
                f"{type(other).__name__}, without clipping and noise.",
            )
        for name in names:
            del outside[name]
    if outside:
        yield (
            f"{name_list('Parameter', list(outside))} can be trained, but not by the private optimizer: "
            "pass other optimizers as also=."
        )


def loss_lints(training: PreparedTraining) -> Iterator[Finding]:
    """Check that the reduction of the loss does not make gradients depend on other examples."""
    criterion, optimizer = training.criterion, training.optimizer
    if criterion is None or isinstance(criterion, DPLossFastGradientClipping):
        return
    kind = type(criterion).__name__
    if isinstance(optimizer, DPOptimizerFastGradientClipping):
        yield Finding.certain(
            "private-criterion",
            f"Ghost clipping needs the criterion that make_private returned, got a {kind}, which does not "
            "clip.",
        )
        return
    reduction = getattr(criterion, "reduction", None)
    expected = getattr(training.module, "__dict__", {}).get("loss_reduction", optimizer.loss_reduction)
    if {reduction, expected} == {"mean", "sum"}:
        yield Finding.certain(
            "loss-reduction",
            f"The loss is reduced by {reduction}, but make_private got loss_reduction={expected!r}: the "
            "gradient of an example depends on the size of its batch before it is clipped.",
        )
    weight = getattr(criterion, "weight", None)
    divides = isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss) and reduction == "mean"
    if divides and weight is not None and len(torch.unique(weight)) > 1:
        yield Finding.certain(
            "loss-reduction",
            f"{kind} with class weights divides by the weights of the whole batch: the gradient of an "
            "example depends on the classes of the others.",
        )


def _plain(name: str) -> str:
    """Return the name of a module or parameter without the wrappers around the model."""
    parts = name.split(".")
    while parts and parts[0] in ("_module", "module"):
        parts = parts[1:]
    return ".".join(parts) or "(model)"


def name_list(kind: str, names: Sequence[str]) -> str:
    """Return the names, of which at most three are listed."""
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{kind}{'s' if len(names) > 1 else ''} {listed}"
