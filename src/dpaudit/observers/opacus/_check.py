"""``check()``: faults that the settings of training with Opacus show before its first step.

No canary and no statistics are involved. :class:`LintCheck` is the part of an audit that repeats the rules of
``_lints.py`` after the last step, and compares the steps that ran with those that the accountant knows.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from opacus.accountants import RDPAccountant
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.schedulers.noise_scheduler import _NoiseScheduler
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn

from dpaudit.accounting import Claim
from dpaudit.diagnostics import CheckResults, ClaimedStep, Finding, RunHistory, likely_causes
from dpaudit.errors import FindingError
from dpaudit.observers.opacus import _lints
from dpaudit.observers.opacus._lints import name_list, outside_parameters, private_elsewhere
from dpaudit.observers.opacus._prepared import (
    PreparedTraining,
    attached_accounting,
    unwrapped,
    updating_optimizer,
)
from dpaudit.stats import GIVEN

_OBSERVED_STEPS = "_dpaudit_num_observed"  # attribute of an accountant: the steps of all observers


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


class LintCheck:
    """The lints as a part of an audit: they are repeated for the settings that the steps really used."""

    def __init__(self, training: PreparedTraining) -> None:
        self._training, self.history = training, RunHistory()
        accounting = attached_accounting(training.optimizer)
        self._accountant = None if accounting is None else accounting.accountant
        self._before = Counter() if accounting is None else accounting.counts()
        self._num_earlier = self._num_observed()
        self._position, self._is_replaced = (0, 0), False
        self._noises: Counter[float] = Counter()
        self._norm_modules = _lints.norm_modules(training.network)
        self._mixing: dict[str, Finding] = {}
        self._outside = [(name, value, value._version) for name, value in outside_parameters(training)]
        self._of_others = [(name, value, value._version) for name, value in private_elsewhere(training)]
        self._was_trained = accounting is not None and not self._before and _has_trained(training.optimizer)
        self._num_more: int | None = None  # accounted steps that were not observed, since the end

    def _num_observed(self) -> int:
        """Return the steps of all observers of this accountant, each of which may have its own claim."""
        return int(getattr(self._accountant, _OBSERVED_STEPS, 0))

    def note_step(self, noise_multiplier: float) -> None:
        """Note the settings of one step, before its update."""
        self._noises[noise_multiplier] += 1
        if self._accountant is not None:
            setattr(self._accountant, _OBSERVED_STEPS, self._num_observed() + 1)
            history = self._accountant.history
            position = (len(history), history[-1][2] if history else 0)
            self._is_replaced = self._is_replaced or position < self._position
            self._position = position
        # a model may be switched to evaluation between steps, so look now
        self._mixing |= _lints.mixing_lints(self._norm_modules)

    def end(self, *, is_complete: bool) -> Counter[tuple[float, float]] | None:
        """Note the end of the observed steps; return those that the accountant got meanwhile."""
        num_accounted = self._num_accounted()
        if is_complete and num_accounted is not None:
            self._num_more = num_accounted - self._noises.total()
        return self._counts()

    def results(self, claimed: ClaimedStep) -> CheckResults:
        """Return the findings about the steps so far, given the claimed numbers."""
        return self.frozen(claimed.sample_rate).results(claimed)

    def frozen(self, sample_rate: float | None) -> FrozenLints:
        """Return the lints of the steps so far as they are now; see ``LiveCheck``."""
        training, lints = self._training, list[_lints.Lint]()
        if self._noises:
            lints += _lints.present_lints(training, sample_rate)
            lints += self._accounted_lints()
            lints += self._mixing.values()
            lints += _lints.seed_lints(training, is_audit=True)
        return FrozenLints(
            noises=tuple(self._noises),
            others=tuple(lints),
            not_covered=tuple(_lints.unchecked(training)) if self._noises else (),
            num_accounted=self._num_accounted(),
            num_examples=training.num_examples,
            to_check=tuple(self._facts_to_check()) if self._noises else (),
            before=self._before,
            unknown=self._unknown(),
            accounted=self._counts() or Counter(),
        )

    def _unknown(self) -> Counter[tuple[float, float]]:
        """Return the accounted steps of earlier phases that the accountant did not have before this one."""
        steps: Counter[tuple[float, float]] = Counter()
        for phase in self.history.earlier:
            steps.update(phase or {})
        return steps - self._before

    def _facts_to_check(self) -> Iterator[Finding]:
        """Yield what may be other private steps on the same parameters, or updates that are not private."""

        def changed(parameters: Sequence[tuple[str, Any, int]]) -> str:
            return name_list([name for name, value, version in parameters if value._version != version])

        if names := changed(self._outside):
            sentence = f"{names} changed, but not by the private optimizer, without clipping and noise."
            yield Finding.certain("outside-update", sentence)
        if names := changed(self._of_others):
            sentence = f"{names} changed by another private optimizer, whose steps this claim leaves out."
            yield Finding.certain("other-private-steps", sentence)
        if self._num_more and self._num_more > 0:
            sentence = f"The accountant got {self._num_more} more steps than were observed, of an optimizer"
            yield Finding.certain("other-private-steps", f"{sentence} that this claim leaves out.")
        if self._was_trained and not self._unknown():
            sentence = "The optimizer or its parameters have gradients of earlier steps, but its accountant"
            yield Finding.certain("other-private-steps", f"{sentence} had none: were they private?")

    def _counts(self) -> Counter[tuple[float, float]] | None:
        """Return the steps that were accounted since the first one; None with another accountant."""
        accounting = attached_accounting(self._training.optimizer)
        if accounting is None or accounting.accountant is not self._accountant:
            return None
        counts = accounting.counts()
        counts.subtract(self._before)
        return counts

    def _num_accounted(self) -> int | None:
        counts = self._counts()
        if counts is None or self._is_replaced:
            return None
        num_later = self._num_observed() - self._num_earlier - self._noises.total()  # of later observers
        return counts.total() - num_later

    def _accounted_lints(self) -> Iterator[_lints.Lint]:
        """Compare the steps that ran with those that were added to the accountant meanwhile."""
        counts, num_steps = self._counts(), self._noises.total()
        if counts is None:
            return
        if self._is_replaced:
            yield (
                "The accountant's history was replaced during the run, as by loading a checkpoint: earlier "
                "steps are not accounted for unless they were discarded."
            )
            return
        if counts.total() < num_steps:
            sentence = f"The accountant knows {counts.total()} of the {num_steps} steps that were run."
            yield Finding.certain("accountant-steps", sentence)
            return
        for noise in sorted(self._noises):
            used = sum(number for value, number in self._noises.items() if value <= noise)
            limit = noise * (1 + _lints.COMPUTED)
            accounted = sum(number for (value, _), number in counts.items() if value <= limit)
            if accounted < used:
                yield Finding.certain(
                    "accountant-noise",
                    f"{used} steps had a noise multiplier of {noise:g} or less, but the accountant has "
                    f"only {accounted} such steps.",
                )
                return
        if len(self._noises) > 1:
            between = f"between {min(self._noises):g} and {max(self._noises):g}"
            yield f"The noise multiplier varied {between}; the accountant has the same noise multipliers."


@dataclass(frozen=True, kw_only=True)
class FrozenLints:
    """The lints of a run, without its objects; ``others`` were found at the sample rate that was claimed."""

    noises: tuple[float, ...] = ()
    others: tuple[_lints.Lint, ...] = ()
    not_covered: tuple[str, ...] = ()
    num_accounted: int | None = None
    num_examples: int | None = None
    to_check: tuple[Finding, ...] = ()
    before: Counter[tuple[float, float]] = field(default_factory=Counter)
    """Steps that the accountant had before, by noise multiplier and sample rate."""
    unknown: Counter[tuple[float, float]] = field(default_factory=Counter)
    """Steps of earlier phases that the accountant did not have."""
    accounted: Counter[tuple[float, float]] = field(default_factory=Counter)
    """Steps that the accountant has since."""

    def results(self, claimed: ClaimedStep) -> CheckResults:
        """Return the findings about all steps."""
        lints = [*_lints.noise_lints(self.noises, claimed.noise_multiplier), *self.others]
        if isinstance(claimed.claim, Claim):
            lints += self._claim_lints(claimed.claim)
        to_check, total = list(self.to_check), self._epsilon_of_all(claimed.claim)
        if self.unknown:
            sentence = f"The accountant does not have {self.unknown.total()} steps of earlier phases{total}."
            to_check.append(Finding.certain("other-private-steps", sentence))
        elif self.before:
            lints.append(f"The accountant has {self.before.total()} steps from before the audit{total}.")
        findings, notes = _lints.findings_and_notes(lints)
        return CheckResults(
            certain=findings, to_check=tuple(to_check), notes=notes, not_covered=self.not_covered
        )

    def _epsilon_of_all(self, claim: object) -> str:
        """Return what epsilon of this run and of all earlier steps is, as the rest of a sentence."""
        if not isinstance(claim, Claim) or not (self.before or self.unknown):
            return ""
        accountant = RDPAccountant()
        steps = self.before + self.unknown + self.accounted
        accountant.history = [(*setting, number) for setting, number in steps.items()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an order at the end of the range is a looser bound
            epsilon = accountant.get_epsilon(claim.delta)
        return f": together, epsilon is at most {epsilon:.3g} at delta {claim.delta:g}"

    def _claim_lints(self, claim: Claim) -> Iterator[_lints.Lint]:
        claimed = [value.value for value in claim.parts if (value.name, value.source) == ("num_steps", GIVEN)]
        if claimed and self.num_accounted is not None and self.num_accounted > claimed[0]:
            sentence = (
                f"The accountant has {self.num_accounted} steps since the first observed one, but the claim "
                f"is about {claimed[0]:g} steps."
            )
            cause = (
                "does training continue after the observed steps, or was epsilon computed for fewer steps?"
            )
            yield replace(Finding.certain("accountant-steps", sentence), cause=cause)
        if self.num_examples and claim.delta >= 1 / self.num_examples:
            yield (
                f"The claimed delta of {claim.delta:g} is not below 1/{self.num_examples:,}, one over the "
                "number of examples: such a claim allows publishing an example."
            )


def _has_trained(optimizer: DPOptimizer) -> bool:
    """Return whether there are moments or rows of gradients of earlier steps."""

    def has_moments(state: Mapping[str, Any]) -> bool:
        step = state.get("step")
        if step is not None:  # others may begin with moments that are not zero
            return bool(step)
        return any(bool(value.any()) for value in state.values() if isinstance(value, torch.Tensor))

    states, parameters = updating_optimizer(optimizer).state, optimizer.params
    return any(
        has_moments(states.get(parameter, {})) or getattr(parameter, "grad_sample", None) is not None
        for parameter in parameters
    )


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

    Args:
        optimizer: What ``make_private`` returned, as are module, loader and, for ghost clipping, criterion.
        module: The model.
        loader: The loader of the batches.
        criterion: The loss.
        privacy_engine: The engine, whose accountant is checked.
        other_optimizers: Further optimizers of the same loop.
        noise_multiplier: The claimed one, unless the attached accountant computed the claim.
        sample_rate: The claimed one.

    Returns:
        The findings, the notes, and what could not be checked.

    Example:
        ``check(optimizer, module=model, loader=loader).raise_for_findings()``

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
    findings, notes = _lints.findings_and_notes(
        [
            *_lints.noise_lints([float(training.optimizer.noise_multiplier)], noise_multiplier),
            *_lints.present_lints(training, sample_rate),
            *_lints.clipping_lints(training),
            *_accountant_lints(training),
            *_schedule_lints(training),
            *_parameter_lints(training),
            *_loss_lints(training),
            *_lints.mixing_lints(_lints.norm_modules(training.network)).values(),
            *_lints.seed_lints(training),
        ]
    )
    return LintReport(findings=findings, notes=notes, not_covered=tuple(_lints.unchecked(training)))


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
    others = sorted({value for value, _ in counts if abs(value - noise) > _lints.COMPUTED * noise})
    if others:
        yield (
            f"The optimizer's noise multiplier is {noise:g}, but the accountant has steps with "
            f"{', '.join(f'{value:g}' for value in others[:3])}: was it changed after the accounting?"
        )


def _parameter_lints(training: PreparedTraining) -> Iterator[_lints.Lint]:
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
