"""Lints of training with Opacus: faults that its settings show without statistics.

:func:`check` needs no step. :class:`LintCheck` is the part of an audit that repeats the lints after the last
step, and compares the steps that ran with those that the accountant knows.

A lint yields findings, which no correct training run has, and notes as strings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.schedulers.noise_scheduler import _NoiseScheduler

from dpaudit.accounting import Claim
from dpaudit.diagnostics import CheckResults, ClaimedStep, Finding, likely_causes
from dpaudit.errors import FindingError
from dpaudit.observers.opacus._model_lints import (
    loss_lints,
    mixing_facts,
    module_lints,
    name_list,
    norm_modules,
    outside_parameters,
    parameter_lints,
)
from dpaudit.observers.opacus._prepared import PreparedTraining, attached_accounting, unwrapped
from dpaudit.observers.opacus._sampling_lints import EQUAL, SAME, data_lints, rate_lints
from dpaudit.stats import GIVEN

_Lint: TypeAlias = Finding | str
_UNSEEDED = torch.Generator().initial_seed()  # the same in every process
_GUESSABLE = 2**32  # seeds below can be tried one by one
_OBSERVED: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()  # the number of steps, by accountant
_STEPS = "steps"
_LONGER = "does training continue after the observed steps, or was epsilon computed for fewer steps?"


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
            "findings": [{"name": one.name, "sentence": one.sentence} for one in self.findings],
            "notes": list(self.notes),
            "not_covered": list(self.not_covered),
            "likely_causes": list(self.likely_causes()),
        }

    def __str__(self) -> str:
        count = len(self.findings)
        lines = [f"{count or 'No'} {'finding' if count == 1 else 'findings'} in the settings."]
        lines += [f"  {finding}" for finding in self.findings]
        lines += [f"  possible cause: {cause}" for cause in self.likely_causes()]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines + [f"  not covered: {one}" for one in self.not_covered])


def check(
    optimizer: DPOptimizer,
    *,
    module: Any = None,
    loader: Any = None,
    criterion: Any = None,
    privacy_engine: Any = None,
    also: Sequence[Any] = (),
    noise_multiplier: float | None = None,
    sample_rate: float | None = None,
) -> LintReport:
    """Check a prepared training run without running it.

    ``optimizer``, ``module``, ``loader`` and, with ghost clipping, ``criterion`` are those that
    ``make_private`` returned; ``also`` are other optimizers of the same loop. ``noise_multiplier`` and
    ``sample_rate`` are the claimed ones, if the claim was not computed by the attached accountant.
    """
    training = PreparedTraining(
        optimizer=unwrapped(optimizer),
        module=module,
        loader=loader,
        criterion=criterion,
        privacy_engine=privacy_engine,
        also=tuple(also),
    )
    return check_prepared(training, noise_multiplier=noise_multiplier, sample_rate=sample_rate)


def check_prepared(
    training: PreparedTraining, *, noise_multiplier: float | None = None, sample_rate: float | None = None
) -> LintReport:
    """Check the parts of a training run; see :func:`check`."""
    optimizer = training.optimizer
    found = [
        *_noise_lints([float(optimizer.noise_multiplier)], noise_multiplier),
        *_noise_adjustment_lints(optimizer),
        *_clipping_lints(training),
        *rate_lints(training, sample_rate),
        *data_lints(training),
        *_accountant_lints(training),
        *_schedule_lints(training),
        *module_lints(mixing_facts(norm_modules(training.network))),
        *parameter_lints(training),
        *loss_lints(training),
        *_seed_lints(training),
    ]
    findings, notes = _split(found)
    return LintReport(findings=findings, notes=notes, not_covered=tuple(_not_covered(training)))


class LintCheck:
    """The lints as a part of an audit: they are repeated for the settings that the steps really used.

    ``loader`` returns the loader, which may be found only in the loop.
    """

    def __init__(self, training: PreparedTraining, loader: Callable[[], Any] = lambda: None) -> None:
        self._training, self._loader = training, loader
        accounting = attached_accounting(training.optimizer)
        self._accountant = None if accounting is None else accounting.accountant
        self._before = {} if accounting is None else accounting.counts()
        self._all: Counter[str] = Counter()  # the steps of all observers of this training run
        if self._accountant is not None:
            self._all = _OBSERVED.setdefault(self._accountant, self._all)
        self._num_earlier = self._all[_STEPS]
        self._position, self._is_replaced = (0, 0), False
        self._noises: Counter[float] = Counter()
        self._norms = norm_modules(training.network)
        self._mixing: dict[str, str] = {}
        self._clipping: dict[str, Finding] = {}
        self._outside = [(name, value, value._version) for name, value in outside_parameters(training)]

    def note_step(self, noise_multiplier: float) -> None:
        """Note the settings of one step, before its update."""
        self._noises[noise_multiplier] += 1
        self._all[_STEPS] += 1
        history = () if self._accountant is None else self._accountant.history
        position = (len(history), history[-1][2] if history else 0)
        self._is_replaced = self._is_replaced or position < self._position
        self._position = position
        if self._norms:  # a model may be switched to evaluation between steps, so look now
            self._mixing |= mixing_facts(self._norms)
        if not self._clipping:
            self._clipping = {one.name: one for one in _clipping_lints(self._training)}

    def results(self, claimed: ClaimedStep) -> CheckResults:
        """Return the findings about the steps so far, given the claimed numbers."""
        return self.frozen(claimed.sample_rate).results(claimed)

    def frozen(self, sample_rate: float | None) -> FrozenLints:
        """Return the lints of the steps so far as they are now; see ``LiveCheck``."""
        training = self._with_loader()
        if not self._noises:
            return FrozenLints(num_accounted=self._num_accounted(), num_examples=training.num_examples)
        found = [
            *_noise_adjustment_lints(training.optimizer),
            *self._clipping.values(),
            *rate_lints(training, sample_rate),
            *data_lints(training),
            *self._accounted_lints(),
            *module_lints(self._mixing),
            *self._outside_lints(),
            *_seed_lints(training, is_audit=True),
        ]
        return FrozenLints(
            noises=tuple(self._noises),
            others=tuple(found),
            not_covered=tuple(_not_covered(training)),
            num_accounted=self._num_accounted(),
            num_examples=training.num_examples,
        )

    def _with_loader(self) -> PreparedTraining:
        return replace(self._training, loader=self._training.loader or self._loader())

    def _num_accounted(self) -> int | None:
        """Return the number of steps that were added to the accountant since the first one, if known."""
        accounting = attached_accounting(self._training.optimizer)
        if accounting is None or accounting.accountant is not self._accountant or self._is_replaced:
            return None
        total = sum(accounting.counts().values()) - sum(self._before.values())
        # steps of later observers, which have a claim of their own
        return total - (self._all[_STEPS] - self._num_earlier - sum(self._noises.values()))

    def _accounted_lints(self) -> Iterator[_Lint]:
        """Compare the steps that ran with those that were added to the accountant meanwhile."""
        accounting = attached_accounting(self._training.optimizer)
        if accounting is None or accounting.accountant is not self._accountant:
            return
        if self._is_replaced:
            yield (
                "The accountant's history was replaced during the run, as by loading a checkpoint: earlier "
                "steps are not accounted for unless they were discarded."
            )
            return
        counts = Counter(accounting.counts())
        counts.subtract(self._before)
        accounted, ran = sum(counts.values()), sum(self._noises.values())
        if accounted < ran:
            yield Finding.certain(
                "accountant-steps", f"The accountant knows {accounted} of the {ran} steps that were run."
            )
            return
        for noise in sorted(self._noises):
            used = sum(number for own, number in self._noises.items() if own <= noise)
            known = sum(number for (own, _), number in counts.items() if own <= noise * (1 + EQUAL))
            if known < used:
                yield Finding.certain(
                    "accountant-noise",
                    f"{used} steps had a noise multiplier of {noise:g} or less, but the accountant has "
                    f"only {known} such steps.",
                )
                return
        if len(self._noises) > 1:
            low, high = min(self._noises), max(self._noises)
            yield (
                f"The noise multiplier varied between {low:g} and {high:g}; the accountant has the same "
                "noise multipliers."
            )

    def _outside_lints(self) -> Iterator[str]:
        changed = [name for name, value, version in self._outside if value._version != version]
        if changed:
            yield (
                f"{name_list('Parameter', changed)} changed, but not by the private optimizer: if private "
                "data is used for that, the change has neither clipping nor noise."
            )


@dataclass(frozen=True, kw_only=True)
class FrozenLints:
    """The lints of a run, without its objects; ``others`` were found at the sample rate that was claimed."""

    noises: tuple[float, ...] = ()
    others: tuple[_Lint, ...] = ()
    not_covered: tuple[str, ...] = ()
    num_accounted: int | None = None
    num_examples: int | None = None

    def results(self, claimed: ClaimedStep) -> CheckResults:
        """Return the findings about all steps."""
        lints: list[_Lint] = []
        if self.noises:
            lints += _noise_lints(self.noises, claimed.noise_multiplier)
        lints += self.others
        if isinstance(claimed.claim, Claim):
            lints += [*self._claimed_steps_lints(claimed.claim), *self._delta_lints(claimed.claim)]
        findings, notes = _split(lints)
        return CheckResults(certain=findings, notes=notes, not_covered=self.not_covered)

    def _claimed_steps_lints(self, claim: Claim) -> Iterator[Finding]:
        """Compare a given number of steps with those that were added to the accountant by now."""
        given = [part.value for part in claim.parts if part.name == "num_steps" and part.source == GIVEN]
        if given and self.num_accounted is not None and self.num_accounted > given[0]:
            sentence = (
                f"The accountant has {self.num_accounted} steps since the first observed one, but the claim "
                f"is about {given[0]:g} steps."
            )
            yield replace(Finding.certain("accountant-steps", sentence), cause=_LONGER)

    def _delta_lints(self, claim: Claim) -> Iterator[str]:
        count = self.num_examples
        if count and claim.delta >= 1 / count:
            yield (
                f"The claimed delta of {claim.delta:g} is not below 1/{count:,}, one over the number of "
                "examples: such a claim allows publishing an example."
            )


def _split(found: Iterable[_Lint]) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    lints = list(dict.fromkeys(found))
    findings = tuple(one for one in lints if isinstance(one, Finding))
    return findings, tuple(one for one in lints if isinstance(one, str))


def _not_covered(training: PreparedTraining) -> Iterator[str]:
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


def _noise_lints(noises: Sequence[float], claimed: float | None) -> Iterator[Finding]:
    low = min(noises)
    if not (low > 0 and all(map(math.isfinite, noises))):
        sentence = f"The optimizer's noise multiplier is {low:g}: there is no privacy without noise."
        yield Finding.certain("noise-multiplier", sentence)
    elif claimed is not None and low < claimed * (1 - SAME):
        sentence = f"The optimizer's noise multiplier is {low:g}, below the claimed {claimed:g}."
        yield Finding.certain("noise-multiplier", sentence)


def _noise_adjustment_lints(optimizer: DPOptimizer) -> Iterator[Finding]:
    """Check that adaptive clipping, which releases a noisy count besides, adds more noise, not less."""
    adjusted = getattr(optimizer, "_adjusted_noise_multiplier", None)
    accounted = float(optimizer.noise_multiplier)
    if adjusted is not None and float(adjusted) < accounted * (1 - EQUAL):
        yield Finding.certain(
            "noise-multiplier",
            f"Noise is added with a multiplier of {float(adjusted):g}, but {accounted:g} is accounted for.",
        )


def _clipping_lints(training: PreparedTraining) -> Iterator[Finding]:
    """Compare the norms to which gradients are clipped with the norm by which the noise is scaled."""
    optimizer = training.optimizer
    scale = float(optimizer.max_grad_norm)
    if not (0 < scale < math.inf):
        yield Finding.certain("clipping-norm", f"Expected a finite clipping norm above 0, got {scale:g}.")
        return
    norms = getattr(optimizer, "max_grad_norms", None)
    clipped = None if norms is None else math.hypot(*map(float, norms))
    where = "the layers together"
    if isinstance(optimizer, DPOptimizerFastGradientClipping) and training.module is not None:
        own = vars(training.module).get("max_grad_norm")
        clipped, where = (float(own), "the model") if isinstance(own, int | float) else (None, "")
    if clipped is not None and not clipped <= scale * (1 + SAME):
        yield Finding.certain(
            "clipping-norm",
            f"Gradients are clipped to a norm of {clipped:g} by {where}, but the noise is scaled for a norm "
            f"of {scale:g}.",
        )


def _accountant_lints(training: PreparedTraining) -> Iterator[Finding]:
    """Check that the accountant of the given engine receives the steps."""
    expected = getattr(training.privacy_engine, "accountant", None)
    if expected is None:
        return
    accounting = attached_accounting(training.optimizer)
    if accounting is None or accounting.accountant is not expected:
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
    others = sorted({own for own, _ in counts if abs(own - noise) > EQUAL * noise})
    if others:
        listed = ", ".join(f"{own:g}" for own in others[:3])
        yield (
            f"The optimizer's noise multiplier is {noise:g}, but the accountant has steps with {listed}: was "
            "it changed after the accounting?"
        )


def _seed_lints(training: PreparedTraining, *, is_audit: bool = False) -> Iterator[_Lint]:
    """Check that the noise cannot be recomputed; a seed is usual in an audit, but not in production."""
    optimizer = training.optimizer
    if optimizer.secure_mode:
        return
    seed = _seed(optimizer.generator)
    if seed == _UNSEEDED:
        yield Finding.certain(
            "noise-seed",
            f"The generator of the noise was never seeded: it starts from {seed} in every process.",
        )
    elif seed is not None and seed < _GUESSABLE:
        sentence = f"The generator of the noise has the seed {seed}: whoever knows it can subtract the noise."
        yield sentence if is_audit else Finding.certain("noise-seed", sentence)
    if is_audit:
        return
    if optimizer.generator is None and torch.initial_seed() < _GUESSABLE:
        yield (
            f"The noise comes from torch's global generator, whose seed is {torch.initial_seed()}: whoever "
            "knows it can subtract the noise."
        )
    drawn = _seed(getattr(training.sampler, "generator", None))
    if drawn is not None and (drawn == _UNSEEDED or drawn < _GUESSABLE):
        yield (
            f"The generator of the sampler has the seed {drawn}: whoever knows it knows the batches, so "
            "that sampling does not amplify privacy."
        )


def _seed(generator: Any) -> int | None:
    return generator.initial_seed() if isinstance(generator, torch.Generator) else None
