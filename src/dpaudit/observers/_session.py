"""One audit of one training run: what observers need, whatever library trains the model.

A :class:`Library` knows where a framework clips, sums and adds noise. :class:`AuditedSteps` have the rest:
which canaries are present in a step, and the recorder with its checks. All observers accept
:class:`AuditOptions`. An :class:`AuditSession` is the time in which an observer is installed: a ``with``
block, or from :meth:`AuditSession.start` to :meth:`AuditSession.stop`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache, wraps
from typing import Any, NoReturn, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, cast

import numpy as np

from dpaudit import _validate
from dpaudit._types import BoolArray
from dpaudit.accounting import Claim
from dpaudit.canaries import (
    CanaryCoins,
    CanaryPlan,
    Directions,
    GradientCanary,
    InputCanary,
    Mixture,
    ParameterLayout,
    fresh_seed,
)
from dpaudit.diagnostics import BatchRecord, NoiseCheck, ObservedStep, RunCheck, RunHistory, SumRecord
from dpaudit.errors import InputError, first_line
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
from dpaudit.recording._claim_source import CLAIM_PARTS

P = ParamSpec("P")
R = TypeVar("R")
MIXTURE = Mixture()
NUMBERS = ("noise_multiplier", "sample_rate", "num_steps", "delta", "epsilon")  # of a claim


class AuditOptions(TypedDict, total=False):
    """What every observer accepts: the claim, and how steps are audited."""

    claim: Claim | None
    """What is claimed of the training run, instead of the four numbers below."""
    noise_multiplier: float | None
    """The claimed noise multiplier, by default what the library states."""
    sample_rate: float | None
    """The claimed probability that an example is in a batch, by default what the library states."""
    num_steps: int | None
    """The planned number of steps, by default the number of recorded ones."""
    delta: float | None
    """The delta of the claim, by default what the library states."""
    epsilon: float | None
    """The epsilon that was claimed of these numbers, which is compared with that of the accountant."""
    confidence: float
    """The confidence of bound and tests together, by default 0.95."""
    tests: bool
    """Whether anything but the scores is tested; without tests, the bound has the whole error rate."""
    seed: int | None
    """The random seed of the audit, by default from the operating system."""
    every: int | None
    """The number of steps between calls of ``callbacks``."""
    callbacks: Sequence[Callable[[LiveBound], None]]
    """Functions that receive the live bound; they may raise to end the training run."""


def observer(observe: Callable[P, R]) -> Callable[P, R]:
    """Make an observer list the shared options, the claim first, and refuse others when it is called."""
    signature = inspect.signature(observe)
    parameters = {name: option for name, option in signature.parameters.items() if name != "options"}
    defaults = {"confidence": 0.95, "tests": True, "callbacks": ()}
    for name, annotation in AuditOptions.__annotations__.items():
        kind, text = inspect.Parameter.KEYWORD_ONLY, annotation.__forward_arg__
        parameters[name] = inspect.Parameter(name, kind, default=defaults.get(name), annotation=text)
    ordered = sorted(parameters.values(), key=lambda option: (option.kind, option.name != "claim"))

    @wraps(observe)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        _validate.no_epsilon(options, CLAIM_PARTS, "target_epsilon")
        for name in options.keys() - parameters.keys():
            raise TypeError(f"{observe.__name__}() got an unexpected keyword argument {name!r}")
        return observe(*args, **options)

    checked.__signature__ = signature.replace(parameters=ordered)  # type: ignore[attr-defined]
    return checked


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
                f"This {self._name}(...) was already used in a with block, and its recorder holds the steps "
                f"of that block; call {self._name}(...) again."
            )
        self._was_started = True
        with ExitStack() as undo:
            recorder = undo.enter_context(self._inside)
            recorder.require_claim()
            undo.pop_all()
        self._recorder = recorder
        return recorder

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

    def __exit__(self, *error: Any) -> bool | None:
        return self.stop(error[1])

    def __getattr__(self, name: str) -> NoReturn:
        what = self.__dict__.get("_name", "observe")  # not yet set while a copy is being created
        raise AttributeError(
            f"{what}() audits the steps inside a with block: write 'with {what}(...) as recorder:' around "
            f"the training loop and use recorder.{name}."
        )


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
        raise InputError(f"claim must be a Claim such as Claim.dpsgd(...), got {claim!r}.")
    claim = claim.with_epsilon(numbers.pop("epsilon", None))
    if twice := [name for name, number in numbers.items() if number is not None]:
        raise InputError(f"Pass either claim=... or {twice[0]}=..., not both: a claim has its numbers.")
    values: dict[str, Any] = {number.name: number.value for number in claim.parts} | {"delta": claim.delta}
    if values.keys() - {"epsilon"} == numbers.keys() and claim.unit == "example":
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


class StepRecorder:
    """The recorder of a training run and the checks of its sums and batches.

    Findings about ``settings`` come first, before those of the sums, the batches and the other ``checks``.
    With ``entries``, a mask of the canaries in the data set, each has one score of the whole run. What
    goes wrong ends the observation with a warning; the steps before can be audited.
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
        self.is_over = self._is_set_up = False
        self.history = RunHistory()  # of the training run, for which an observer notes the last weights
        self.checks: list[RunCheck] = [*settings, SumRecord(), self.history, batches, *checks]
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
        """Record a step and call the callbacks, or end the observation if the step is not finite."""
        with self.guard():
            values = [value for value in (step.scores, step.released) if value is not None]
            if all(np.isfinite(value).all() for value in values):
                self.recorder.observe(step)
                self._is_set_up = True
            else:
                self.end_diverged()

    def end_diverged(self) -> None:
        """End the observation of a run whose gradients are not finite, which reveal nothing more."""
        if not self.is_over:
            self.is_over = True
            end_diverged(self.recorder)

    def end(self, reason: str) -> None:
        """Record no further step, with one warning that gives the reason; the training run continues."""
        if not self.is_over:
            self.is_over = True
            _end(self.recorder, reason)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """End the observation if the block raises, because an audit never ends a training run.

        Three kinds of errors pass: those of callbacks, which end the run on purpose, an ``InputError`` before
        the first recorded step, which shows what is wrong with the setup while nothing is lost, and whatever
        is no ``Exception``, such as a ``KeyboardInterrupt``. Code of users and libraries is called outside.
        """
        try:
            yield
        except Exception as error:
            is_wiring = isinstance(error, InputError) and not self._is_set_up and not self.is_over
            if error is self.recorder.stopped_by or is_wiring:
                raise
            name = "" if isinstance(error, InputError) else f"{type(error).__name__} in dpaudit: "
            self.end(f"{name}{first_line(error)}")

    def guarded(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Return a function that is called as long as the observation lasts, and ends it if it raises."""

        def call(*args: P.args, **options: P.kwargs) -> R | None:
            if not self.is_over:
                with self.guard():
                    return function(*args, **options)
            return None

        return call


def end_diverged(recorder: Recorder) -> None:
    """Close the recorder of steps that are not finite, with a warning."""
    overflow = ", or a norm overflows, as in half precision, for canaries of 1e6 clipping norms"
    reason = "its gradients are not finite, so the training run diverged"
    _end(recorder, reason if recorder.num_done else reason + overflow)


def _end(recorder: Recorder, reason: str) -> None:
    recorder.close(reason)
    warnings.warn(f"The audit ends: {recorder.ended[0]}.", stacklevel=3)


class AuditedSteps:
    """The canaries of a session, and what records its steps, which a library asks in every step.

    Gradient canaries are laid out on the parameters of the first gradient; their number may be None until
    then. ``options`` that are not :class:`AuditOptions` are those of the recorder.
    """

    def __init__(
        self,
        canary: GradientCanary | InputCanary,
        num_canaries: int | None,
        read: Callable[[], DPSGDParams],
        *,
        facts: Callable[[], TrainingInfo],
        batches: BatchRecord,
        checks: Sequence[RunCheck] = (),
        read_layout: Callable[[], ParameterLayout] | None = None,
        **options: Any,
    ) -> None:
        self.canary, self.is_number_known = canary, num_canaries is not None
        self._seed = fresh_seed(options.pop("seed", None))
        self.choose_number(1 if num_canaries is None else num_canaries)
        self.eps = 0.0
        """The relative precision of gradients."""
        self.layout = ParameterLayout((), ())
        """The named parameters of a gradient; none before the first."""
        self._read_layout = read_layout
        if isinstance(canary, GradientCanary):
            cached = lru_cache(canary.num_variants)
            self._directions = cached(lambda variant: self.plan.directions(variant, self.layout))
            log = ObservedCanaries(canary, self.directions_of, lambda: self.layout, lambda: self.eps)
            options["canaries"] = log
        claim, numbers = claimed_numbers(
            options.pop("claim", None), **{name: options.pop(name, None) for name in NUMBERS}
        )
        self.steps = StepRecorder(
            canary,
            read,
            numbers,
            claim=claim,
            facts=facts,
            batches=batches,
            checks=checks,
            coupled=isinstance(canary, InputCanary),
            num_canaries=num_canaries,
            **options,
        )

    def choose_number(self, num_canaries: int) -> None:
        """Set the number of canaries."""
        self.plan: Any = (
            CanaryCoins(num_canaries, self._seed)
            if isinstance(self.canary, InputCanary)
            else CanaryPlan(self.canary, num_canaries, self._seed)
        )
        """The random choices of the audit, and its kind of gradient canary."""

    def lay_out(self, layout: ParameterLayout) -> None:
        """Lay the canaries out on the parameters of a gradient; raise if the first one had others."""
        first = self.layout if self.layout.names else layout
        if (layout.names, layout.shapes) != (first.names, first.shapes):
            raise InputError(
                f"Gradients must have {first.num_parameters:,} entries in every step, in the same "
                f"{len(first.names)} arrays, got {layout.num_parameters:,} in {len(layout.names)} arrays. "
                "Were layers frozen or unfrozen? Call observe() once for each phase of the training run, "
                "after the change."
            )
        self.layout = first

    @property
    def present(self) -> BoolArray:
        """Which canaries are present in the step in progress."""
        return cast(BoolArray, self.plan.coins(self.steps.index))

    @property
    def directions(self) -> Directions:
        """The directions of the canaries of the step in progress."""
        if self._read_layout is not None:
            self.lay_out(self._read_layout())
        return self.directions_of(self.steps.index)

    def directions_of(self, index: int) -> Directions:
        """Return the directions of the canaries of a step."""
        return cast(Directions, self._directions(self.plan.canary.variant(index)))

    def observe(self, step: ObservedStep) -> None:
        """Record the step in progress."""
        if not self.steps.is_over:
            self.steps.record(step)


@observer
@session
def observe_library(
    library: Library,
    *,
    canary: GradientCanary = MIXTURE,
    num_canaries: int = 64,
    max_grad_norm: float | None = None,
    checks: Sequence[RunCheck] = (),
    not_covered: tuple[str, ...] = (),
    **options: Unpack[AuditOptions],
) -> Iterator[Recorder]:
    """Audit the steps of a library inside the ``with`` block, with every test that its fields allow.

    Args:
        library: What dpaudit must know of the library.
        canary: The kind of canary.
        num_canaries: Their number in each step.
        max_grad_norm: The clipping norm, for likely causes.
        checks: Tests besides those of noise, sums and batches.
        not_covered: Sentences on what the observer cannot test.
        options: :class:`AuditOptions`; a claim that is not passed is what the library states.

    Returns:
        A ``with`` block that gives the recorder.

    Example:
        ``with observe_library(MyLibrary(optimizer), claim=claim) as recorder: train()``

    """
    audited = AuditedSteps(
        canary,
        num_canaries,
        library.claimed,
        facts=lambda: TrainingInfo(canary=canary, max_grad_norm=max_grad_norm),
        batches=BatchRecord(),
        checks=checks,
        not_covered=not_covered,
        read_layout=lambda: library.layout,
        **options,
    )
    with library.install(audited):
        yield audited.steps.recorder
