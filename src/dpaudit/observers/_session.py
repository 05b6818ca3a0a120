"""One audit of one training run: what every observer needs, whatever library trains the model.

A :class:`Library` knows where a framework clips, sums and adds noise. An :class:`AuditSession` has the rest:
which canaries are present in a step, the recorder with its checks, and when the observer is installed. A
``with`` block or :meth:`AuditSession.start` and :meth:`AuditSession.stop` enclose the steps to audit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import TracebackType
from typing import Generic, NoReturn, ParamSpec, Protocol, TypeVar

from dpaudit._types import BoolArray
from dpaudit.accounting import Claim
from dpaudit.canaries import CanaryPlan, Directions, GradientCanary, Mixture, ParameterLayout, fresh_seed
from dpaudit.diagnostics import BatchRecord, NoiseCheck, ObservedStep, RunCheck, SumRecord
from dpaudit.errors import InputError
from dpaudit.recording import (
    DPSGDParams,
    LiveBound,
    ObservedCanaries,
    ReadClaim,
    Recorder,
    TrainingInfo,
    WholeRunRecorder,
)

AnyRecorder = TypeVar("AnyRecorder", bound=Recorder | WholeRunRecorder)
P = ParamSpec("P")
MIXTURE = Mixture()
_NUM_CANARIES = 64


class AuditSession(AbstractContextManager[AnyRecorder], Generic[AnyRecorder]):
    """The time in which steps are audited: a ``with`` block, or from ``start()`` to ``stop()``.

    A session is used once, because its recorder holds the steps of one training run.
    """

    _recorder: AnyRecorder | None = None

    def __init__(self, name: str, inside: AbstractContextManager[AnyRecorder]) -> None:
        self._name, self._inside, self._was_started = name, inside, False

    def start(self) -> AnyRecorder:
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

    def __enter__(self) -> AnyRecorder:
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


def session(observe: Callable[P, Iterator[AnyRecorder]]) -> Callable[P, AuditSession[AnyRecorder]]:
    """Make an :class:`AuditSession` of a function that installs an observer and yields its recorder."""
    manager = contextmanager(observe)

    @wraps(observe)
    def around(*args: P.args, **options: P.kwargs) -> AuditSession[AnyRecorder]:
        return AuditSession(observe.__name__, manager(*args, **options))

    return around


class Library(Protocol):
    """What an observer must know of a framework."""

    @property
    def layout(self) -> ParameterLayout:
        """The parameters of a gradient, in order; read in the first step."""

    def claimed(self) -> DPSGDParams:
        """Return the numbers of the claim that the training run states."""

    def install(self, audited: AuditedSteps) -> AbstractContextManager[None]:
        """Return a block in which each step has its canaries, and is passed to ``audited.observe``."""


class AuditedSteps:
    """The canaries and the recorder of a session, which a library asks in every step.

    The directions of canaries are drawn once for each variant and kept.
    """

    def __init__(self, plan: CanaryPlan, layout: Callable[[], ParameterLayout]) -> None:
        self.plan, self._layout = plan, layout
        self._directions: dict[int, Directions] = {}
        self.recorder: Recorder

    @property
    def index(self) -> int:
        """The number of the step in progress."""
        return self.recorder.num_done

    @property
    def present(self) -> BoolArray:
        """Which canaries are present in the step in progress."""
        return self.plan.coins(self.index)

    @property
    def directions(self) -> Directions:
        """The directions of the canaries of the step in progress."""
        return self.directions_of(self.index)

    def directions_of(self, index: int) -> Directions:
        """Return the directions of the canaries of any step."""
        variant = self.plan.canary.variant(index)
        if variant not in self._directions:
            if self.plan.canary.moving:
                self._directions.clear()
            self._directions[variant] = self.plan.directions(index, self._layout())
        return self._directions[variant]

    def observe(self, step: ObservedStep) -> None:
        """Record the step in progress."""
        self.recorder.observe(step)


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
    audited = AuditedSteps(CanaryPlan(canary, num_canaries, fresh_seed(seed)), lambda: library.layout)
    passed_params = DPSGDParams(
        noise_multiplier=noise_multiplier, sample_rate=sample_rate, num_steps=num_steps, delta=delta
    )
    audited.recorder = Recorder(
        claim=ReadClaim(library.claimed, passed_params) if claim is None else claim,
        num_steps=num_steps,
        confidence=confidence,
        tests=tests,
        every=every,
        callbacks=callbacks,
        checks=[NoiseCheck(), SumRecord(), BatchRecord(), *checks],
        not_covered=not_covered,
        signal=min(canary.scale, 1.0),
        facts=lambda: TrainingInfo(canary=canary, max_grad_norm=max_grad_norm),
        num_canaries=num_canaries,
        canaries=ObservedCanaries(canary, audited.directions_of, lambda: library.layout),
    )
    with library.install(audited):
        yield audited.recorder
