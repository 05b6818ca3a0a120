"""Lints of training with Opacus: faults that its settings show without statistics.

:func:`check` needs no step. :class:`LintCheck` is the part of an audit that repeats the lints after the last
step, and compares the steps that ran with those that the accountant knows.

The rules are in ``_lint_rules``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from opacus.optimizers import DPOptimizer

from dpaudit.accounting import Claim
from dpaudit.diagnostics import CheckResults, ClaimedStep, Finding, likely_causes
from dpaudit.errors import FindingError
from dpaudit.observers.opacus._lint_rules import (
    COMPUTED,
    Lint,
    clipping_lints,
    mixing_lints,
    name_list,
    noise_lints,
    norm_modules,
    outside_parameters,
    preparation_lints,
    present_lints,
    seed_lints,
)
from dpaudit.observers.opacus._prepared import PreparedTraining, attached_accounting, unwrapped
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
    findings, notes = _split(
        [
            *noise_lints([float(training.optimizer.noise_multiplier)], noise_multiplier),
            *present_lints(training, sample_rate),
            *clipping_lints(training),
            *preparation_lints(training),
            *mixing_lints(norm_modules(training.network)).values(),
            *seed_lints(training),
        ]
    )
    return LintReport(findings=findings, notes=notes, not_covered=tuple(_not_covered(training)))


class LintCheck:
    """The lints as a part of an audit: they are repeated for the settings that the steps really used.

    ``loader`` returns the loader, which may be found only in the loop.
    """

    def __init__(self, training: PreparedTraining, loader: Callable[[], Any] = lambda: None) -> None:
        self._training, self._loader = training, loader
        accounting = attached_accounting(training.optimizer)
        self._accountant = None if accounting is None else accounting.accountant
        self._before = Counter[tuple[float, float]]({} if accounting is None else accounting.counts())
        self._num_earlier = self._num_observed()
        self._position, self._is_replaced = (0, 0), False
        self._noises: Counter[float] = Counter()
        self._norm_modules = norm_modules(training.network)
        self._mixing: dict[str, Finding] = {}
        self._clipping: list[Finding] = []
        self._outside = [(name, value, value._version) for name, value in outside_parameters(training)]

    def _num_observed(self) -> int:
        """Return the steps of all observers of this accountant, each of which may have its own claim."""
        return int(getattr(self._accountant, _OBSERVED_STEPS, 0))

    def note_step(self, noise_multiplier: float) -> None:
        """Note the settings of one step, before its update."""
        self._noises[noise_multiplier] += 1
        history = () if self._accountant is None else self._accountant.history
        if self._accountant is not None:
            setattr(self._accountant, _OBSERVED_STEPS, self._num_observed() + 1)
        position = (len(history), history[-1][2] if history else 0)
        self._is_replaced = self._is_replaced or position < self._position
        self._position = position
        if self._norm_modules:  # a model may be switched to evaluation between steps, so look now
            self._mixing |= mixing_lints(self._norm_modules)
        self._clipping = self._clipping or list(clipping_lints(self._training))

    def results(self, claimed: ClaimedStep) -> CheckResults:
        """Return the findings about the steps so far, given the claimed numbers."""
        return self.frozen(claimed.sample_rate).results(claimed)

    def frozen(self, sample_rate: float | None) -> FrozenLints:
        """Return the lints of the steps so far as they are now; see ``LiveCheck``."""
        training = replace(self._training, loader=self._training.loader or self._loader())
        if not self._noises:
            return FrozenLints(num_accounted=self._num_accounted(), num_examples=training.num_examples)
        lints = [
            *present_lints(training, sample_rate),
            *self._clipping,
            *self._accounted_lints(),
            *self._mixing.values(),
            *self._outside_lints(),
            *seed_lints(training, is_audit=True),
        ]
        return FrozenLints(
            noises=tuple(self._noises),
            others=tuple(lints),
            not_covered=tuple(_not_covered(training)),
            num_accounted=self._num_accounted(),
            num_examples=training.num_examples,
        )

    def _counts(self) -> Counter[tuple[float, float]] | None:
        """Return the steps that were accounted since the first one; None with another accountant."""
        accounting = attached_accounting(self._training.optimizer)
        if accounting is None or accounting.accountant is not self._accountant:
            return None
        counts = Counter(accounting.counts())
        counts.subtract(self._before)
        return counts

    def _num_accounted(self) -> int | None:
        counts = self._counts()
        if counts is None or self._is_replaced:
            return None
        num_later = self._num_observed() - self._num_earlier - self._noises.total()  # of later observers
        return counts.total() - num_later

    def _accounted_lints(self) -> Iterator[Lint]:
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
            accounted = sum(
                number for (value, _), number in counts.items() if value <= noise * (1 + COMPUTED)
            )
            if accounted < used:
                yield Finding.certain(
                    "accountant-noise",
                    f"{used} steps had a noise multiplier of {noise:g} or less, but the accountant has "
                    f"only {accounted} such steps.",
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
                f"{name_list(changed)} changed, but not by the private optimizer: if private data is used "
                "for that, the change has neither clipping nor noise."
            )


@dataclass(frozen=True, kw_only=True)
class FrozenLints:
    """The lints of a run, without its objects; ``others`` were found at the sample rate that was claimed."""

    noises: tuple[float, ...] = ()
    others: tuple[Lint, ...] = ()
    not_covered: tuple[str, ...] = ()
    num_accounted: int | None = None
    num_examples: int | None = None

    def results(self, claimed: ClaimedStep) -> CheckResults:
        """Return the findings about all steps."""
        lints = [*noise_lints(self.noises, claimed.noise_multiplier), *self.others]
        if isinstance(claimed.claim, Claim):
            lints += self._claim_lints(claimed.claim)
        findings, notes = _split(lints)
        return CheckResults(certain=findings, notes=notes, not_covered=self.not_covered)

    def _claim_lints(self, claim: Claim) -> Iterator[Lint]:
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


def _split(lints: Iterable[Lint]) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Return the findings and the notes, each once."""
    unique = list(dict.fromkeys(lints))
    findings = tuple(lint for lint in unique if isinstance(lint, Finding))
    return findings, tuple(lint for lint in unique if isinstance(lint, str))


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
