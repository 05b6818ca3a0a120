"""``check()``: faults that the settings of training with Opacus show before its first step.

No canary and no statistics are involved. An audit repeats the rules of ``_lints.py`` for the steps that ran.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.schedulers.noise_scheduler import _NoiseScheduler
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn

from dpaudit.diagnostics import Finding, likely_causes
from dpaudit.errors import FindingError
from dpaudit.observers.opacus._lints import (
    COMPUTED,
    Lint,
    clipping_lints,
    findings_and_notes,
    mixing_lints,
    name_list,
    noise_lints,
    norm_modules,
    outside_parameters,
    present_lints,
    seed_lints,
    unchecked,
)
from dpaudit.observers.opacus._prepared import PreparedTraining, attached_accounting, unwrapped


@dataclass(frozen=True, kw_only=True)
class LintReport:
    """What the settings of a training run show before its first step.

    ``findings`` are facts that contradict the accounting; ``notes`` are unusual, but may be intended;
    ``not_covered`` names what could not be checked, and why.
    """

    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()

    def likely_causes(self) -> tuple[str, ...]:
        """Return likely causes of the findings."""
        return likely_causes(findings=[finding.name for finding in self.findings])

    def raise_for_findings(self) -> None:
        """Raise :class:`dpaudit.FindingError` if there are findings."""
        if self.findings:
            raise FindingError(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "findings": [{"name": finding.name, "sentence": finding.sentence} for finding in self.findings],
            "notes": list(self.notes),
            "not_covered": list(self.not_covered),
            "likely_causes": list(self.likely_causes()),
        }

    def __str__(self) -> str:
        count = len(self.findings)
        lines = [
            f"{count or 'No'} {'finding' if count == 1 else 'findings'} in the settings.",
            *(f"  {finding}" for finding in self.findings),
            *(f"  possible cause: {cause}" for cause in self.likely_causes()),
            *(f"  note: {note}" for note in self.notes),
            *(f"  not covered: {gap}" for gap in self.not_covered),
        ]
        return "\n".join(lines)


def check(
    optimizer: DPOptimizer,
    *,
    module: Any = None,
    loader: Any = None,
    criterion: Any = None,
    privacy_engine: Any = None,
    other_optimizers: Sequence[Any] = (),
    noise_multiplier: float | None = None,
    sample_rate: float | None = None,
) -> LintReport:
    """Check a prepared training run without running it.

    ``optimizer``, ``module``, ``loader`` and, with ghost clipping, ``criterion`` are those that
    ``make_private`` returned; ``other_optimizers`` are further ones of the same loop. ``noise_multiplier``
    and ``sample_rate`` are the claimed ones, if the claim was not computed by the attached accountant.
    """
    training = PreparedTraining(
        optimizer=unwrapped(optimizer),
        module=module,
        loader=loader,
        criterion=criterion,
        privacy_engine=privacy_engine,
        other_optimizers=tuple(other_optimizers),
    )
    return check_prepared(training, noise_multiplier=noise_multiplier, sample_rate=sample_rate)


def check_prepared(
    training: PreparedTraining, *, noise_multiplier: float | None = None, sample_rate: float | None = None
) -> LintReport:
    """Check the parts of a training run; see :func:`check`."""
    findings, notes = findings_and_notes(
        [
            *noise_lints([float(training.optimizer.noise_multiplier)], noise_multiplier),
            *present_lints(training, sample_rate),
            *clipping_lints(training),
            *_accountant_lints(training),
            *_schedule_lints(training),
            *_parameter_lints(training),
            *_loss_lints(training),
            *mixing_lints(norm_modules(training.network)).values(),
            *seed_lints(training),
        ]
    )
    return LintReport(findings=findings, notes=notes, not_covered=tuple(unchecked(training)))


def _accountant_lints(training: PreparedTraining) -> Iterator[Finding]:
    """Check that the accountant of the given engine receives the steps."""
    expected = getattr(training.privacy_engine, "accountant", None)
    accounting = attached_accounting(training.optimizer)
    if expected is not None and (accounting is None or accounting.accountant is not expected):
        yield Finding.certain(
            "accountant-steps",
            "The accountant of the privacy engine is not attached to the optimizer: it knows none of its "
            "steps.",
        )


def _schedule_lints(training: PreparedTraining) -> Iterator[str]:
    """Name what changes the noise, or has changed it since the steps that were accounted for."""
    noise = float(training.optimizer.noise_multiplier)
    for scheduler in training.schedulers:
        kind = "noise multiplier" if isinstance(scheduler, _NoiseScheduler) else "clipping norm"
        yield (
            f"{type(scheduler).__name__} changes the {kind} during training: an epsilon that was computed in "
            "advance for one value does not apply, and no schedule may depend on the data."
        )
    accounting = attached_accounting(training.optimizer)
    counts = {} if accounting is None else accounting.counts()
    others = sorted({value for value, _ in counts if abs(value - noise) > COMPUTED * noise})
    if others:
        yield (
            f"The optimizer's noise multiplier is {noise:g}, but the accountant has steps with "
            f"{', '.join(f'{value:g}' for value in others[:3])}: was it changed after the accounting?"
        )


def _parameter_lints(training: PreparedTraining) -> Iterator[Lint]:
    """Check that no other optimizer updates parameters without clipping and noise."""
    outside, private = dict(outside_parameters(training)), set(map(id, training.optimizer.params))
    for other in _plain_optimizers(training):
        updated = set(map(id, chain.from_iterable(group["params"] for group in other.param_groups)))
        names = [name for name in outside if id(outside[name]) in updated]
        count = len(names) + len(updated & private)
        if count:
            fact = (
                f"{name_list(names) or f'{count} private parameters'} {'are' if count > 1 else 'is'} updated"
            )
            yield Finding.certain(
                "public-parameters",
                f"{fact} by another optimizer, {type(other).__name__}, without clipping and noise.",
            )
        for name in names:
            del outside[name]
    if outside:
        yield (
            f"{name_list(list(outside))} can be trained, but not by the private optimizer: pass other "
            "optimizers as other_optimizers=."
        )


def _plain_optimizers(training: PreparedTraining) -> list[Any]:
    """Return the other optimizers that are not private, without the one that the private one wraps."""
    inner = training.optimizer.original_optimizer
    others = [other for other in training.other_optimizers if other is not inner]
    return [other for other in others if not isinstance(other, DPOptimizer)]


def _loss_lints(training: PreparedTraining) -> Iterator[Finding]:
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
