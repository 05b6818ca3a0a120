"""The recorder of steps: scores them, passes them to tests and turns all of it into one verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, final

from dpaudit import _validate
from dpaudit._html import alone, banner
from dpaudit._plotting import draw_trajectory
from dpaudit._provenance import now
from dpaudit._types import FloatArray
from dpaudit.accounting import Claim
from dpaudit.diagnostics import BatchRecord, Diagnosis, ObservedStep, RunCheck
from dpaudit.errors import InputError
from dpaudit.recording._claim_source import (
    UNKNOWN,
    WHOLE_CLAIM,
    DPSGDParams,
    FrozenValue,
    ReadClaim,
    TrainingInfo,
    UntestedError,
    no_replay,
)
from dpaudit.recording._joint_verdict import (
    MAY_HAVE_STOPPED,
    RunTests,
    ShownBounds,
    SupportsDiagnose,
    has_more_tests,
    is_test_of_noise,
    remaining_level,
)
from dpaudit.recording._per_step import LiveBound, PerStep, Trajectory
from dpaudit.recording._whole_run import WholeRun
from dpaudit.stats import (
    Bound,
    Inference,
    Observations,
    Result,
    ThresholdRule,
    TradeOff,
)

CanaryScorer: TypeAlias = PerStep | WholeRun
"""What a recorder makes of the scores of its canaries."""

_PEEKS = 100  # number of times that the bound of a run of known length is computed
_UNPLANNED_EVERY = 50  # each number of steps needs an epsilon of its own, which is not cheap
_NOT_SHOWN = "not shown yet; live() shows it, after which audit() accounts for possible early stopping"


@final
class Recorder:
    """A record of the scores of all steps, of canary membership and of what tests saw.

    ``scorer`` is :class:`dpaudit.recording.PerStep` by default. ``num_steps`` is the planned number of steps,
    or None; the bound is valid either way, and tightest if the number is right. ``callbacks`` receive a
    :class:`LiveBound` about a hundred times per run (or every ``every`` steps); they may raise to end the
    run.

    Observers pass further parts. A ``ReadClaim`` reads the claim from the training run. ``checks`` test the
    steps that :meth:`observe` passes to them and share the error rate with the bound; with ``tests=False``
    the bound has all of it. ``synchronize`` waits for steps that are not yet recorded.

    >>> import numpy as np
    >>> recorder = Recorder(claim=Claim.gaussian(noise_multiplier=1.0, delta=1e-5), num_steps=200)
    >>> rng = np.random.default_rng(0)
    >>> for _ in range(200):
    ...     present = rng.random(64) < 0.5
    ...     recorder.record(present + 0.5 * rng.standard_normal(64), present)
    >>> recorder.live().is_violation
    True
    """

    def __init__(
        self,
        *,
        claim: Claim | ReadClaim,
        num_steps: int | None,
        scorer: CanaryScorer | None = None,
        confidence: float = 0.95,
        every: int | None = None,
        callbacks: Sequence[Callable[[LiveBound], None]] = (),
        facts: Callable[[], TrainingInfo] | None = None,
        not_covered: tuple[str, ...] = (),
        checks: Sequence[RunCheck] = (),
        tests: bool = True,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        self._claims, self._started = ReadClaim.of(claim), now()
        self.scorer: CanaryScorer = PerStep() if scorer is None else scorer
        self.confidence = _validate.confidence(confidence)
        self._planned = None if num_steps is None else _validate.integer("num_steps", num_steps)
        self.callbacks = list(callbacks)
        usual = _UNPLANNED_EVERY if self._planned is None else max(1, self._planned // _PEEKS)
        self._every = usual if every is None else _validate.integer("every", every)
        self._facts, self.not_covered, self._synchronize = facts, not_covered, synchronize
        self.ended: tuple[str, ...] = ()  # why the observation ended before the training run, if it did
        self.stopped_by: Exception | None = None  # what a callback raised to end the training run
        self.replayer: Callable[..., RunCheck] = no_replay  # runs a step of the training run again
        batches = next((check for check in checks if isinstance(check, BatchRecord)), None)
        self._batches = batches or BatchRecord()
        all_checks = [*self.scorer.checks, *checks, *(() if batches else (self._batches,))]
        all_checks.sort(key=is_test_of_noise, reverse=True)
        has_any = bool(checks) or self.scorer.has_tests
        self._tests = RunTests(
            all_checks if has_any else (), self._claims, self.scorer.has_signal, wanted=tests
        )
        self._shown = ShownBounds(self._planned)
        self._begin(*self._tests.levels(self.confidence))

    def _begin(self, level: float, tests_level: float | None) -> None:
        """Begin the run with these shares of the error rate."""
        self._level, self._tests_level = level, tests_level
        self.scorer.begin(self._claims, level, self._planned)

    @property
    def claim(self) -> Claim:
        """The claim that the scores are tested against."""
        return self._claims.claim(self.num_done)

    @property
    def num_done(self) -> int:
        """The number of recorded steps."""
        self._wait()
        return self.scorer.num_done

    @property
    def num_canaries(self) -> int | None:
        """The number of scores per step; None if it is not known before the first."""
        return self.scorer.num_canaries

    @property
    def num_steps(self) -> int:
        """The planned number of steps; if not known, the number of recorded steps."""
        return self._planned or self.num_done

    @property
    def facts(self) -> TrainingInfo | None:
        """Facts about the training run besides its claim."""
        return None if self._facts is None else self._facts()

    @property
    def tests_noise(self) -> bool:
        """Whether the noise of steps is tested."""
        return self._tests.noise is not None and self._tests.is_wanted

    def observe(self, step: ObservedStep, *, notify: bool = True) -> None:
        """Record what an observer saw of one step; call the callbacks."""
        if step.scores is not None:
            self.record(step.scores, step.present, lengths=step.lengths, notify=False)
        self._tests.observe(step)
        if notify:
            self.notify()

    def record(
        self, scores: Any, present: Any = None, *, lengths: FloatArray | None = None, notify: bool = True
    ) -> None:
        """Record the scores of one step and whether each canary was present; call the callbacks.

        ``lengths`` are those of the clipped canaries, in clipping norms, if they are not known before the
        first step; they only affect the stated power. Pass ``notify=False`` to postpone the callbacks, and
        call :meth:`notify` later.
        """
        self.scorer.record(scores, present, lengths)
        self._shown.note_step()
        if notify:
            self.notify()

    def observe_batch(self, indices: Any, num_examples: int) -> None:
        """Add the batch of one step, by index in a data set of ``num_examples``, for :meth:`diagnose`."""
        self._batches.add_reported_batch(indices, num_examples)

    def notify(self) -> None:
        """Pass the live bound to the callbacks, if it is due."""
        if self.callbacks and self.num_done % self._every == 0:
            live = self.live()
            try:
                for callback in self.callbacks:
                    callback(live)
            except Exception as error:
                self.stopped_by = error
                raise

    def require_claim(self) -> None:
        """Raise before the first step if callbacks would lack a part of the claim."""
        if self.callbacks:
            self._claims.claim(self.num_done or 1)

    def close(self, reason: str = "") -> None:
        """Mark the run as over: a bound shown now cannot have ended it. A ``reason`` ends its observation."""
        self._shown.is_closed = True
        if reason:
            self.ended = (f"steps from step {self.num_done} on are not audited: {reason}",)

    def live(self) -> LiveBound:
        """Return the bound from the steps so far."""
        bound = self.scorer.bound(self.num_done, self.claim)
        self._note_peek()
        return bound

    def curve(self, num_steps: Sequence[int] | None = None) -> list[LiveBound]:
        """Return the bound after each of these numbers of steps; by default, after about a hundred of them.

        The bounds hold simultaneously, so the best may be chosen; they never decrease. Before the end of the
        run, this shows the bound like :meth:`live`, and :meth:`audit` then rests on betting.
        """
        if num_steps is None:
            num_steps = range(self._every, self.num_done + 1, self._every)
        for count in num_steps:
            if _validate.integer("num_steps", count) > self.num_done:
                raise InputError(
                    f"num_steps must be at most {self.num_done}, the number of recorded steps, got {count}."
                )
        bounds = [self.scorer.bound(count, self.claim) for count in num_steps]
        self._note_peek()
        return bounds

    def trajectory(self) -> Trajectory:
        """Return the live bound at about sixty points, with its band."""
        self._require_steps()
        trajectory = self.scorer.trajectory(self.claim)
        self._note_peek()
        return trajectory

    def plot(self, *, ax: Any = None) -> Any:
        """Plot the live bound over time, its band and the claim, with matplotlib.

        Return the axes: ``ax``, or new ones.
        """
        return draw_trajectory(self.trajectory(), self.claim.epsilon, ax)

    def _repr_html_(self) -> str:
        """Return the notebook display. It may be implicit, so a bound that was not shown stays hidden."""
        is_free = self._shown.early or self._shown.is_over(self.num_done)
        self._shown.any = self._shown.any or (is_free and self.scorer.has_live_bound)
        rows = [("steps", f"{self.num_done:,}")]
        if self.num_done:
            rows.append(("scores per step", f"{self.num_canaries:,}"))
        try:
            rows.append(("claim", self.claim.summary))
            if self.scorer.has_live_bound:
                bound = self.scorer.bound(self.num_done, self.claim) if is_free else _NOT_SHOWN
                rows.append(("bound so far", str(bound)))
        except InputError as error:  # a claim that is not complete yet
            rows.append(("claim", str(error)))
        return alone(banner(type(self).__name__, "", rows))

    @property
    def observations(self) -> Observations:
        """All scores so far; of whole runs one per canary, after the last step."""
        self._require_steps()
        self.scorer.require_fair(is_over=True)
        return self.scorer.observations()

    @_validate.reject_epsilon(WHOLE_CLAIM, "target_epsilon")
    def audit(
        self,
        *,
        claim: Claim | None = None,
        noise_multiplier: float | None = None,
        sample_rate: float | None = None,
        num_steps: int | None = None,
        delta: float | None = None,
        epsilon: float | None = None,
        confidence: float | None = None,
        tests: SupportsDiagnose | bool | None = None,
        tradeoff: TradeOff | None = None,
        inference: Inference | None = None,
        threshold: ThresholdRule | None = None,
    ) -> Result:
        """Return one verdict on the claim from bound and tests.

        By default the bound rests on the bets behind :meth:`live`: one test, which is valid even if the run
        was stopped because of the live bound, and if the canaries of one step are dependent. Another method
        is a second test: if a bound was shown before, the result states that the method was chosen earlier.
        Counts are refused, and tests are not run, if the number of steps may depend on the bound. Before the
        planned end, tests have half of their error rate, and the rest at the end.

        Args:
            claim: What is claimed, by default what the recorder knows.
            noise_multiplier: Instead of ``claim``, a number of it for the recorder of an observer.
            sample_rate: Another such number.
            num_steps: Another such number.
            delta: Another such number.
            epsilon: The figure that was claimed beside them, which is compared with them.
            confidence: The confidence of bound and tests together, by default that of the recorder.
            tests: For a recorder without noise, tests of the same run, such as :class:`dpaudit.Diagnostics`;
                False skips all tests.
            tradeoff: The curve to test, as in :func:`dpaudit.audit`.
            inference: How a bound follows from errors, by default by betting.
            threshold: From which score on a canary counts as present.

        Returns:
            The verdict with its bound, findings and power.

        Raises:
            InputError: No step was recorded, a number of the claim is missing, or scores cannot be tested.

        """
        overrides = self._claims.overrides(
            noise_multiplier=noise_multiplier,
            sample_rate=sample_rate,
            num_steps=num_steps,
            delta=delta,
            epsilon=epsilon,
        )
        claim, observations = self._auditable(claim, overrides)
        level, tests_level = self._level, self._tests_level
        if (has_more := has_more_tests(tests)) or confidence is not None:
            joint = self.confidence if confidence is None else _validate.confidence(confidence)
            level, tests_level = self._tests.levels(joint, has_more=has_more)
        self._shown.require_stoppable(inference, threshold, self.num_done)
        choices = {"tradeoff": tradeoff, "inference": inference, "threshold": threshold}
        method = {"confidence": level} | {name: value for name, value in choices.items() if value is not None}
        result = self.scorer.judge(observations, claim, method, was_shown=self._shown.any)
        self._shown.any = self.scorer.has_live_bound
        stopped, covers_sampling = self._shown.may_have_stopped(self.num_done), self.scorer.covers_sampling
        remarks = () if covers_sampling else self._claims.remarks(overrides)
        joined = self._tests.join(
            replace(
                result,
                notes=(*self.ended, *result.notes),
                not_covered=(*self.ended, *self.not_covered, *remarks),
                times=(self._started, now()),
                no_estimate=MAY_HAVE_STOPPED if stopped else None,
            ),
            tests_level,
            more=tests,
            num_done=self.num_done,
            is_last=self._shown.is_last(self.num_done),
            may_have_stopped=stopped,
            covers_sampling=covers_sampling,
        )
        if joined.refuted:
            return replace(joined, clues=self.scorer.clues(claim, self.facts))
        self.scorer.require_signal(claim, is_accepted=True)
        return joined

    def _auditable(self, claim: Claim | None, overrides: DPSGDParams) -> tuple[Claim, Observations]:
        """Return claim and scores; raise if no verdict can be based on them.

        A run that is longer than claimed is audited if its scores are of the whole run, which shows it.
        """
        self._require_steps()
        self.scorer.require_fair(is_over=True)
        may_be_longer = self.scorer.covers_sampling
        if claim is not None and replace(overrides, epsilon=None) != UNKNOWN:
            raise InputError("Pass either claim=... or its numbers, not both.")
        if claim is not None:
            claim = claim.with_epsilon(overrides.epsilon)
        else:
            if self.ended and may_be_longer:  # the recorded steps alone are a shorter run
                overrides = replace(overrides, num_steps=self.num_done)
            claim = self._claims.claim(self.num_done, overrides, may_be_longer=may_be_longer)
        self.scorer.require_signal(claim)
        return claim, self.scorer.observations(claim)

    def one_run_bound(
        self,
        *,
        noise_multiplier: float | None = None,
        sample_rate: float | None = None,
        num_steps: int | None = None,
        delta: float | None = None,
    ) -> Bound:
        """Return a looser bound that is valid even if the canaries of a whole run are dependent."""
        if not isinstance(self.scorer, WholeRun):
            raise InputError(
                "These are scores of single steps, not one score per canary for the whole run; use audit()."
            )
        overrides = self._claims.overrides(
            noise_multiplier=noise_multiplier, sample_rate=sample_rate, num_steps=num_steps, delta=delta
        )
        claim, _ = self._auditable(None, overrides)
        return self.scorer.one_run_bound(claim, self.confidence)

    def replay(self, *step: Any, **options: Any) -> Any:
        """Run one training step again on neighboring batches; :meth:`audit` includes what they show."""
        self._tests.add_replay(result := self.replayer(*step, **options))
        return result

    def diagnose(self, *, noise_multiplier: float | None = None, confidence: float = 0.95) -> Diagnosis:
        """Run the tests alone, against ``noise_multiplier``, by default the claimed one.

        Raise an ``InputError`` if no noise was logged, or if the run may have ended because of its noise.
        """
        if self.tests_noise and self._shown.may_have_stopped(self.num_done):
            problem = "tests of the noise would not have their stated error rate. Pass"
            raise UntestedError(self._shown.stopped(problem, self.num_done))
        diagnosis = self._tests.diagnose(noise_multiplier, confidence)
        self._shown.any = self.scorer.has_live_bound
        return diagnosis

    def state_dict(self) -> dict[str, Any]:
        """Return the recorded state, for ``load_state_dict`` of an identically created recorder."""
        self._wait()
        return {
            **self.scorer.state_dict(),
            "confidence": self._level,
            "joint_confidence": self.confidence,
            "looked": self._shown.early,
            "shown": self._shown.any,
            "checks": self._tests.state_dict(),
            "tests_spent": self._tests.spent,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``, with the bets and the confidence that it was started with."""
        with _validate.state_dict_errors("a recorder", state):
            level, joint = (_validate.confidence(state[name]) for name in ("confidence", "joint_confidence"))
            self.confidence = joint
            self._begin(level, remaining_level(level, joint))
            self.scorer.load_state_dict(state)
            self._tests.load_state_dict(state["checks"])
            self._tests.spent = _validate.at_least("tests_spent", state["tests_spent"], 0.0)
            self._shown.early = _validate.flag("looked", state["looked"])
            self._shown.any = _validate.flag("shown", state["shown"])

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs, which can be audited but belongs to no training run."""
        self._wait()
        facts = None if self._facts is None else FrozenValue(self._facts())
        return {
            **vars(self),
            "_facts": facts,
            "_synchronize": None,
            "callbacks": [],
            "stopped_by": None,
            "replayer": None,
        }

    def _wait(self) -> None:
        if self._synchronize is not None:
            self._synchronize()

    def _require_steps(self) -> None:
        if self.num_done == 0:
            raise InputError(". ".join(("No step was recorded", *self.ended, "Did training run?")))

    def _note_peek(self) -> None:
        """Note that the bound is shown; an empty curve of a whole run shows none."""
        self.scorer.require_fair(is_over=self._shown.is_over(self.num_done))
        if self.scorer.has_live_bound:
            self._shown.note(self.num_done)
