"""One audit of one training run: what observers need, whatever library trains the model.

A :class:`Library` knows where a framework clips, sums and adds noise. An :class:`AuditSession` has the rest:
which canaries are present in a step, the recorder with its checks, and when the observer is installed. A
``with`` block or :meth:`AuditSession.start` and :meth:`AuditSession.stop` enclose the steps to audit.
:class:`LaidOutCanaries` draws the canaries of each step once the parameters are known, and
:class:`StepRecorder` assembles the recorder and its checks. :func:`replaced` and :func:`attribute_restored`
change objects of a library for the time of a block.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, Protocol

import numpy as np

from dpaudit._types import BoolArray
from dpaudit.accounting import Claim
from dpaudit.canaries import (
    CanaryPlan,
    Directions,
    GradientCanary,
    InputCanary,
    Mixture,
    ParameterLayout,
    fresh_seed,
)
from dpaudit.diagnostics import BatchRecord, NoiseCheck, ObservedStep, RunCheck, SumRecord
from dpaudit.errors import InputError
from dpaudit.recording import (
    DPSGDParams,
    LiveBound,
    ObservedCanaries,
    PerStep,
    ReadClaim,
    Recorder,
    TrainingInfo,
    WholeRun,
)

P = ParamSpec("P")
MIXTURE = Mixture()
_NUM_CANARIES = 64
_MISSING = object()


class AuditSession(AbstractContextManager[Recorder]):
    """The time in which steps are audited: a ``with`` block, or from ``start()`` to ``stop()``.

    A session is used once, because its recorder holds the steps of one training run.
    """

    _recorder: Recorder | None = None

    def __init__(self, name: str, inside: AbstractContextManager[Recorder]) -> None:
        self._name, self._inside, self._was_started = name, inside, False

    def start(self) -> Recorder:
        """Install the observer; return the recorder of the steps from now on."""
        if self._was_started:
            raise InputError(
                f"Expected a new {self._name}(...) for each with block, got one that was already used: its "
                "recorder holds the steps of that block."
            )
        self._was_started = True
        self._recorder = self._inside.__enter__()
        return self._recorder

    def stop(self, error: BaseException | None = None) -> bool | None:
        """Remove the observer and close the recorder; ``error`` is what ended the training run, if any.

        Nothing happens if the session is not running.
        """
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return None
        try:
            trace = None if error is None else error.__traceback__
            return self._inside.__exit__(None if error is None else type(error), error, trace)
        finally:
            recorder.close()

    def __enter__(self) -> Recorder:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self.stop(error)

    def __getattr__(self, name: str) -> NoReturn:
        what = self.__dict__.get("_name", "observe")  # not yet set while a copy is being created
        raise AttributeError(
            f"{what}() audits the steps inside a with block: write 'with {what}(...) as recorder:' around "
            f"the training loop and use recorder.{name}."
        )


@contextmanager
def replaced(owner: Any, name: str, new: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of one object; restore its own attribute, or remove it if there was none."""
    attributes = {key: value for key, value in vars(owner).items() if key == name}
    setattr(owner, name, new)
    try:
        yield
    finally:
        delattr(owner, name)
        vars(owner).update(attributes)


@contextmanager
def attribute_restored(owners: Sequence[Any], name: str) -> Iterator[None]:
    """Restore an attribute of each owner at the end, or remove it if there was none."""
    before = [getattr(owner, name, _MISSING) for owner in owners]
    try:
        yield
    finally:
        for owner, value in zip(owners, before, strict=True):
            if value is not _MISSING:
                setattr(owner, name, value)
            elif hasattr(owner, name):
                delattr(owner, name)


def session(observe: Callable[P, Iterator[Recorder]]) -> Callable[P, AuditSession]:
    """Make an :class:`AuditSession` of a function that installs an observer and yields its recorder."""
    manager = contextmanager(observe)

    @wraps(observe)
    def around(*args: P.args, **options: P.kwargs) -> AuditSession:
        return AuditSession(observe.__name__, manager(*args, **options))

    return around


def claimed_numbers(claim: Claim | None, **numbers: Any) -> tuple[Claim | None, DPSGDParams]:
    """Return a claim that was passed whole, or by its numbers; a usual DP-SGD claim is its numbers."""
    if claim is None:
        return None, DPSGDParams(**numbers)
    if not isinstance(claim, Claim):
        raise InputError(f"Expected claim to be a Claim such as Claim.dpsgd(...), got {claim!r}.")
    twice = [name for name, number in numbers.items() if number is not None]
    if twice:
        raise InputError(f"Expected claim=... or {twice[0]}=..., got both: the claim contains its numbers.")
    values: dict[str, Any] = {number.name: number.value for number in claim.parts} | {"delta": claim.delta}
    if values.keys() == numbers.keys() and claim.unit == "example":
        return None, DPSGDParams(**values)
    return claim, DPSGDParams(num_steps=None if claim.training is None else claim.training.num_steps)


class Library(Protocol):
    """What an observer must know of a framework."""

    @property
    def layout(self) -> ParameterLayout:
        """The parameters of a gradient, in order; read in the first step."""

    def claimed(self) -> DPSGDParams:
        """Return the numbers of the claim that the training run states."""

    def install(self, audited: AuditedSteps) -> AbstractContextManager[None]:
        """Return a block in which each step has its canaries, and is passed to ``audited.observe``."""


class LaidOutCanaries:
    """The gradient canaries of all steps, on parameters that are known from the first gradient on.

    ``num_canaries`` may be None until then.
    """

    def __init__(self, canary: GradientCanary, num_canaries: int | None, seed: int) -> None:
        self.canary, self.is_number_known = canary, num_canaries is not None
        self.draws = CanaryPlan(canary, 1 if num_canaries is None else num_canaries, seed)
        self.eps = 0.0
        """The relative precision of gradients."""
        self._layout: ParameterLayout | None = None
        self._directions: dict[int, Directions] = {}

    def choose_number(self, num_canaries: int) -> None:
        """Set the number of canaries."""
        self.draws, self.is_number_known = CanaryPlan(self.canary, num_canaries, self.draws.seed), True

    @property
    def layout(self) -> ParameterLayout:
        """The named parameters of a gradient; none before the first."""
        return ParameterLayout((), ()) if self._layout is None else self._layout

    def lay_out(self, layout: ParameterLayout) -> None:
        """Lay the canaries out on the parameters of a gradient; raise if the first one had others."""
        if self._layout is None:
            self._layout = layout
        require_same_parameters(self._layout, layout)

    def directions(self, index: int) -> Directions:
        """Return the directions of a step's canaries."""
        variant = self.canary.variant(index)
        if variant not in self._directions:
            if self.canary.moving:
                self._directions.clear()
            self._directions[variant] = self.draws.directions(index, self.layout)
        return self._directions[variant]

    def observed(self) -> ObservedCanaries:
        """Return the canaries for tests of what arrives of them."""
        return ObservedCanaries(self.canary, self.directions, lambda: self.layout, lambda: self.eps)


def require_same_parameters(first: ParameterLayout, layout: ParameterLayout) -> None:
    """Raise if a gradient has other parameters than the first one, as after unfreezing a layer."""
    if (layout.names, layout.shapes) != (first.names, first.shapes):
        raise InputError(
            f"Expected gradients with {first.num_parameters:,} entries in every step, in the same "
            f"{len(first.names)} arrays, got {layout.num_parameters:,} in {len(layout.names)} arrays: were "
            "layers frozen or unfrozen? Call observe() once for each phase of the training run, after the "
            "change."
        )


class StepRecorder:
    """The recorder of a training run and the checks of its sums and batches.

    Findings about ``settings`` come first, before those of the sums, the batches and the other ``checks``.
    With ``entries``, a mask of the canaries in the data set, each has one score of the whole run. A
    step that is not finite ends the recording with a warning; what was recorded before can be audited.
    """

    def __init__(
        self,
        canary: GradientCanary | InputCanary,
        read: Callable[[], DPSGDParams],
        claimed: DPSGDParams,
        *,
        batches: BatchRecord,
        claim: Claim | None = None,
        settings: Sequence[RunCheck] = (),
        checks: Sequence[RunCheck] = (),
        entries: BoolArray | None = None,
        finished: Callable[[float], None] | None = None,
        coupled: bool = False,
        reach: float = 1.0,
        num_canaries: int | None = None,
        canaries: ObservedCanaries | None = None,
        facts: Callable[[], TrainingInfo],
        **options: Any,
    ) -> None:
        self.batches, self.is_over = batches, False
        self.checks: list[RunCheck] = [*settings, SumRecord(), batches, *checks]
        """All checks but those of the noise."""
        signal = min(canary.scale, 1.0) if isinstance(canary, GradientCanary) else 1.0
        scorer: PerStep | WholeRun
        if entries is not None:
            scorer = WholeRun(entries, signal=signal, reach=reach, finished=finished)
        else:
            scorer = PerStep(
                coupled=coupled, signal=signal, reach=reach, num_canaries=num_canaries, canaries=canaries
            )
        self.recorder = Recorder(
            claim=ReadClaim(read, claimed) if claim is None else claim,
            num_steps=claimed.num_steps,
            scorer=scorer,
            facts=facts,
            checks=[NoiseCheck(), *self.checks],
            **options,
        )

    @property
    def index(self) -> int:
        """The number of the current step."""
        return self.recorder.num_done

    def note_not_covered(self, sentence: str) -> None:
        """Add a sentence to what the recorder does not cover, once."""
        if sentence not in self.recorder.not_covered:
            self.recorder.not_covered += (sentence,)

    def record(self, step: ObservedStep) -> None:
        """Record a step, or end the recording if it is not finite."""
        if np.isfinite(step.scores).all() and np.isfinite(step.released).all():
            self.recorder.observe(step)
        else:
            self.end()

    def end(self) -> None:
        """Record no further step: the training run may continue, but its gradients reveal nothing more."""
        self.is_over = True
        overflow = ", or a norm overflows, as in half precision, for canaries of 1e6 clipping norms"
        gap = (
            f"steps from step {self.index} on are not audited: its gradients are not finite, so the training "
            f"run diverged{'' if self.index else overflow}"
        )
        self.recorder.not_covered += (gap,)
        warnings.warn(f"The audit ends: {gap}.", stacklevel=2)


class AuditedSteps:
    """The canaries and the recorder of a session, which a library asks in every step."""

    def __init__(self, library: Library, canaries: LaidOutCanaries, steps: StepRecorder) -> None:
        self._library, self._canaries, self._steps = library, canaries, steps

    @property
    def plan(self) -> CanaryPlan:
        """The random choices of the audit, and its kind of canary."""
        return self._canaries.draws

    @property
    def present(self) -> BoolArray:
        """Which canaries are present in the step in progress."""
        return self.plan.coins(self._steps.index)

    @property
    def directions(self) -> Directions:
        """The directions of the canaries of the step in progress."""
        self._canaries.lay_out(self._library.layout)
        return self._canaries.directions(self._steps.index)

    def observe(self, step: ObservedStep) -> None:
        """Record the step in progress."""
        if not self._steps.is_over:
            self._steps.record(step)


@session
def observe_library(
    library: Library,
    *,
    claim: Claim | None = None,
    noise_multiplier: float | None = None,
    sample_rate: float | None = None,
    num_steps: int | None = None,
    delta: float | None = None,
    canary: GradientCanary = MIXTURE,
    num_canaries: int = _NUM_CANARIES,
    max_grad_norm: float | None = None,
    checks: Sequence[RunCheck] = (),
    not_covered: tuple[str, ...] = (),
    confidence: float = 0.95,
    tests: bool = True,
    seed: int | None = None,
    every: int | None = None,
    callbacks: Sequence[Callable[[LiveBound], None]] = (),
) -> Iterator[Recorder]:
    """Audit the steps of a library inside the ``with`` block, with every test that its fields allow.

    The claim is ``claim``, or what the library states, completed by the numbers given here or to ``audit()``.
    ``checks`` are tested besides those of noise, sums and batches. The other arguments are as for the
    observers of supported libraries.
    """
    canaries = LaidOutCanaries(canary, num_canaries, fresh_seed(seed))
    steps = StepRecorder(
        canary,
        library.claimed,
        DPSGDParams(
            noise_multiplier=noise_multiplier, sample_rate=sample_rate, num_steps=num_steps, delta=delta
        ),
        claim=claim,
        batches=BatchRecord(),
        checks=checks,
        facts=lambda: TrainingInfo(canary=canary, max_grad_norm=max_grad_norm),
        not_covered=not_covered,
        confidence=confidence,
        tests=tests,
        every=every,
        callbacks=callbacks,
        num_canaries=num_canaries,
        canaries=canaries.observed(),
    )
    with library.install(AuditedSteps(library, canaries, steps)):
        yield steps.recorder
