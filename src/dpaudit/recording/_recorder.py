"""The recorder of steps: keeps the scores of every step and turns them into bounds and a verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np

from dpaudit import _validate
from dpaudit._html import labelled
from dpaudit._plotting import draw_trajectory
from dpaudit._provenance import now
from dpaudit._types import FloatArray
from dpaudit.accounting import Claim
from dpaudit.diagnostics import BatchRecord, Diagnosis, ObservedStep, RunCheck
from dpaudit.errors import InputError
from dpaudit.recording._claim_source import ClaimSource, FrozenValue, GivenClaim, ReadClaim, TrainingInfo
from dpaudit.recording._joint_verdict import (
    RunTests,
    SupportsDiagnose,
    claimed_noise,
    has_more_tests,
    is_test_of_noise,
    remaining_level,
    with_clues,
)
from dpaudit.recording._score_log import ObservedCanaries, ScoreLog, recorded_steps
from dpaudit.recording._signal_check import (
    CanaryLengths,
    UntestedError,
    check_signal,
    first_of,
    has_signal,
    require_alike,
    require_resumable,
)
from dpaudit.recording._trajectory import LiveBound, PlacedBets, RunBets, ShownBounds, Trajectory
from dpaudit.stats import (
    STEP,
    CoinCheck,
    Inference,
    Observations,
    Result,
    TradeOff,
    as_flags,
    audit_recorded,
    audit_untuned,
    plain_array,
    scale_notes,
    split_by_coins,
)

_PEEKS = 100  # number of times that the bound of a run of known length is computed
_UNPLANNED_EVERY = 50  # each number of steps needs an epsilon of its own, which is not cheap
_PENDING = 64  # steps that are recorded before bets are placed on them
_NOT_SHOWN = "not shown yet; live() shows it, after which audit() accounts for possible early stopping"
_CHOSEN = "this method was chosen before any bound of the run was shown"
_MAY_HAVE_STOPPED = (
    "The run may have ended because of a bound that was shown before its end, which an estimate of the noise "
    "does not account for."
)


@final
class Recorder:
    """A record of per-step scores, in units of the canary's own signal, and of canary membership.

    ``num_steps`` is the planned number of steps, or None; the bound is valid either way, and tightest if the
    number is right. ``callbacks`` receive a :class:`LiveBound` about a hundred times per run (or every
    ``every`` steps); they may raise to end the run. ``paired``: each step has one score without the canary
    and one with it, from two independent draws, instead of one fair coin per canary. ``coupled``: a score
    depends on which other canaries were present, as after subtracting those that overlap with it.

    Observers pass further parts. A ``ReadClaim`` reads the claim from the training run. ``checks`` test the
    steps that :meth:`observe` passes to them and share the error rate with the bound; with ``tests=False``
    the bound has all of it. A present canary must score ``signal`` or more, otherwise there is no verdict.
    Scores are in units of ``reach`` clipping norms, less than 1 if canaries do not reach all layers.
    ``synchronize`` waits for steps that are not yet recorded. What arrives of ``canaries`` is tested.

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
        confidence: float = 0.95,
        tradeoff: TradeOff | None = None,
        paired: bool = False,
        coupled: bool = False,
        every: int | None = None,
        callbacks: Sequence[Callable[[LiveBound], None]] = (),
        signal: float | None = None,
        reach: float = 1.0,
        facts: Callable[[], TrainingInfo] | None = None,
        not_covered: tuple[str, ...] = (),
        checks: Sequence[RunCheck] = (),
        tests: bool = True,
        synchronize: Callable[[], None] | None = None,
        num_canaries: int | None = None,
        canaries: ObservedCanaries | None = None,
    ) -> None:
        self._claims: ClaimSource = claim if isinstance(claim, ReadClaim) else GivenClaim(claim)
        self.confidence = _validate.confidence(confidence)
        self._started = now()
        self._planned = None if num_steps is None else _validate.integer("num_steps", num_steps)
        self.callbacks = list(callbacks)
        usual = _UNPLANNED_EVERY if self._planned is None else max(1, self._planned // _PEEKS)
        self._every = usual if every is None else _validate.integer("every", every)
        self._tradeoff, self._paired, self._coupled = tradeoff, paired, coupled
        self._num_canaries = None if num_canaries is None else _validate.integer("num_canaries", num_canaries)
        self._signal, self._facts = signal, facts
        batches = first_of(checks, BatchRecord)
        self._batches = BatchRecord() if batches is None else batches
        self._log = ScoreLog(canaries, self._planned, self._num_canaries)
        all_checks = [*checks, *([self._batches] if batches is None else [])]
        of_noise = [check for check in all_checks if is_test_of_noise(check)]
        others = [check for check in all_checks if not is_test_of_noise(check)]
        has_any = bool(checks) or self._log.is_tested
        self._tests = RunTests((*of_noise, self._log, *others) if has_any else (), self._claims, wanted=tests)
        level, self._tests_level = self._tests.levels(self.confidence)
        self._bets = RunBets(
            self._claims,
            tradeoff,
            level=level,
            horizon=None if self._planned is None else self._log.num_counted(self._planned),
            coupled=coupled,
            by_coin=not paired,
        )
        self._lengths = CanaryLengths(signal=1.0 if signal is None else signal, reach=reach)
        self.not_covered = not_covered
        self._synchronize = synchronize
        self._shown = ShownBounds(self._planned)
        self._live: LiveBound | None = None
        self._coins = CoinCheck()

    @property
    def claim(self) -> Claim:
        """The claim that the scores are tested against."""
        return self._claims.claim(self.num_done)

    @property
    def num_done(self) -> int:
        """The number of recorded steps."""
        self._wait()
        return len(self._log)

    @property
    def scores_per_step(self) -> int | None:
        """The number of scores per recorded step; None before the first step."""
        return self._log.scores[0].size if len(self._log) else None

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
        self, scores: Any, present: Any, *, lengths: FloatArray | None = None, notify: bool = True
    ) -> None:
        """Record the scores of one step and whether each canary was present; call the callbacks.

        ``lengths`` are those of the clipped canaries, in clipping norms, if they are not known before the
        first step; they only affect the stated power. Pass ``notify=False`` to postpone the callbacks, and
        call :meth:`notify` later.
        """
        values, mask = np.array(plain_array("scores", scores), dtype=np.float64), as_flags(present)
        require_alike(values, mask, step=self.num_done, first=next(iter(self._log.scores), values))
        self._shown.note_step()
        self._log.add(values, mask)
        self._bets.start(self._log.counted_scores[0].size)
        if lengths is not None:
            self._lengths.add(lengths)
        if len(self._log) % _PENDING == 0:
            self._placed_bets()
        if notify:
            self.notify()

    def observe_batch(self, indices: Any, num_examples: int) -> None:
        """Add the batch of one step, by index in a data set of ``num_examples``, for :meth:`diagnose`."""
        self._batches.add_reported_batch(indices, num_examples)

    def notify(self) -> None:
        """Pass the live bound to the callbacks, if it is due."""
        if self.callbacks and self.num_done % self._every == 0:
            live = self.live()
            for callback in self.callbacks:
                callback(live)

    def close(self) -> None:
        """Mark the run as over: a bound shown from now on cannot have ended it."""
        self._shown.is_closed = True

    def live(self) -> LiveBound:
        """Return the bound from the steps so far."""
        self._note_peek()
        if self._live is None or self._live.num_done != self.num_done:
            self._live = self._bound_after(self.num_done)
        return self._live

    def curve(self, num_steps: Sequence[int] | None = None) -> list[LiveBound]:
        """Return the bound after each of these numbers of steps; by default, after about a hundred of them.

        The bounds hold simultaneously, so the best may be chosen; they never decrease. Before the end of the
        run, this shows the bound like :meth:`live`, and :meth:`audit` then rests on betting.

        >>> recorder = Recorder(claim=Claim.gaussian(noise_multiplier=1.0, delta=1e-5), num_steps=3)
        >>> for _ in range(3):
        ...     recorder.record([0.0, 1.0], [False, True])
        >>> [bound.num_done for bound in recorder.curve()]
        [1, 2, 3]
        """
        self._note_peek()
        if num_steps is None:
            num_steps = range(self._every, self.num_done + 1, self._every)
        for count in num_steps:
            if _validate.integer("num_steps", count) > self.num_done:
                raise InputError(
                    f"Expected num_steps={count} to be at most {self.num_done}, the number of recorded steps."
                )
        return [self._bound_after(count) for count in num_steps]

    def _bound_after(self, count: int) -> LiveBound:
        log = self._log
        counted = log.counted_scores, log.counted_present, log.num_counted(count)
        return replace(self._bets.bound(*counted, self.claim), num_done=count)

    def _placed_bets(self) -> PlacedBets:
        """Bet on all recorded steps; a bet that is placed does not change."""
        return self._bets.placed(self._log.counted_scores, self._log.counted_present)

    def trajectory(self) -> Trajectory:
        """Return the live bound at about sixty points, with its band."""
        self._require_steps()
        self._note_peek()
        hypothesis, num_done = self.claim.hypothesis(self._tradeoff), self._log.step_numbers()
        return self._bets.trajectory(self._placed_bets(), hypothesis, num_done)

    def plot(self, *, ax: Any = None) -> Any:
        """Plot the live bound over time, its band and the claim, with matplotlib.

        Return the axes: ``ax``, or new ones.
        """
        return draw_trajectory(self.trajectory(), self.claim.epsilon, ax)

    def _repr_html_(self) -> str:
        """Return the notebook display. It may be implicit, so a bound that was not shown stays hidden."""
        is_free = self._shown.early or self._shown.is_over(self.num_done)
        self._shown.any = self._shown.any or is_free
        rows = [("steps", f"{self.num_done:,}")]
        if self.num_done:
            rows.append(("scores per step", f"{self.scores_per_step:,}"))
        try:
            rows.append(("claim", self.claim.summary))
            rows.append(("bound so far", str(self._bound_after(self.num_done)) if is_free else _NOT_SHOWN))
        except InputError as error:  # a claim that is not complete yet
            rows.append(("claim", str(error)))
        return labelled(type(self).__name__, "", rows)

    @property
    def observations(self) -> Observations:
        """All scores so far."""
        self._require_steps()
        scores, present = np.stack(self._log.counted_scores), np.stack(self._log.counted_present)
        if self._paired:
            return Observations.from_presence(scores, present, normalized=True, paired=True, scores_of=STEP)
        self._require_fair(is_over=True)
        coupled = self._coupled and scores.shape[1] > 1
        return split_by_coins(scores, present, normalized=True, coupled=coupled)

    def audit(
        self,
        *,
        inference: Inference | None = None,
        claim: Claim | None = None,
        confidence: float | None = None,
        tests: SupportsDiagnose | bool | None = None,
        **method: Any,
    ) -> Result:
        """Return one verdict on the claim from bound and tests; keywords are as in :func:`dpaudit.audit`.

        The recorder of an observer also accepts any part of the claim: ``noise_multiplier``, ``sample_rate``,
        ``num_steps`` or ``delta``. ``confidence`` is that of bound and tests together. A recorder without
        noise accepts ``tests`` of the same run, such as :class:`dpaudit.Diagnostics`; False skips all tests.

        By default the bound rests on the bets behind :meth:`live`: one test, which is valid even if the run
        was stopped because of the live bound, and if the canaries of one step are dependent. Another method
        is a second test: if a bound was shown before, the result states that the method was chosen earlier.
        Counts are refused, and tests are not run, if the number of steps may depend on the bound. Before the
        planned end, tests have half of their error rate, and the rest at the end.
        """
        overrides = self._claims.pop_params(method)
        observations = self.observations  # before the claim, which a run without steps does not have
        claim = claim or self._claims.claim(self.num_done, overrides)
        if self._signal is not None:
            check_signal(self._log.moments(), self._signal, claimed_noise=claimed_noise(claim))
        level, tests_level = self._bets.level, self._tests_level
        if (has_more := has_more_tests(tests)) or confidence is not None:
            joint = self.confidence if confidence is None else _validate.confidence(confidence)
            level, tests_level = self._tests.levels(joint, has_more=has_more)
        method = {"confidence": level, "tradeoff": self._tradeoff} | method
        self._shown.require_stoppable(inference, method.get("threshold"), self.num_done)
        was_shown, self._shown.any = self._shown.any, True
        result = self._bounded(observations, claim, inference, method, was_shown=was_shown)
        gaps = self.not_covered + self._claims.remarks(overrides)
        joined = self._tests.join(
            replace(result, not_covered=gaps, times=(self._started, now())),
            tests_level,
            more=tests,
            num_done=self.num_done,
            is_last=self._shown.is_last(self.num_done),
            may_have_stopped=self._may_have_stopped,
            has_signal=self._has_signal,
        )
        if self._signal is not None and not joined.refuted:  # then nothing else speaks for those that count
            check_signal(self._log.counted_moments(), self._signal, claimed_noise=claimed_noise(claim))
        return with_clues(joined, self._log, self.facts)

    def _bounded(
        self,
        observations: Observations,
        claim: Claim,
        inference: Inference | None,
        method: dict[str, Any],
        *,
        was_shown: bool,
    ) -> Result:
        """Return the result of the bound alone."""
        placed, is_same_curve = self._placed_bets(), method["tradeoff"] == self._tradeoff
        chosen = placed.completed(inference, is_same_curve=is_same_curve)
        # bets on another curve are tuned for it, placed bets stay as they are
        judge = audit_untuned if is_same_curve else audit_recorded
        result = judge(observations, claim=claim, inference=chosen, **method)
        if was_shown and not placed.is_behind(result.bound):
            assumptions = *result.bound.assumptions, _CHOSEN
            result = replace(result, bound=replace(result.bound, assumptions=assumptions))
        if self._signal is not None:  # below 1 for canaries shorter than the clipping norm
            result = replace(result, notes=scale_notes(observations, self._signal))
        return replace(
            result,
            design=self._lengths.in_design(result.design),
            no_estimate=_MAY_HAVE_STOPPED if self._may_have_stopped else None,
        )

    def diagnose(self, *, noise_multiplier: float | None = None, confidence: float = 0.95) -> Diagnosis:
        """Run the tests alone, against ``noise_multiplier``, by default the claimed one.

        Raise an ``InputError`` if no noise was logged, or if the run may have ended because of its noise.
        """
        if self.tests_noise and self._may_have_stopped:
            problem = "tests of the noise would not have their stated error rate. Pass"
            raise UntestedError(self._shown.stopped(problem, self.num_done))
        diagnosis = self._tests.diagnose(noise_multiplier, confidence, has_signal=self._has_signal)
        self._shown.any = True
        return diagnosis

    def _has_signal(self) -> bool:
        return self._signal is None or has_signal(self._log.moments(), self._signal)

    def state_dict(self) -> dict[str, Any]:
        """Return the recorded state, for ``load_state_dict`` of an identically created recorder."""
        self._wait()
        return {
            "scores": np.asarray(self._log.scores),
            "present": np.asarray(self._log.present),
            "looked": self._shown.early,
            "shown": self._shown.any,
            **({"joint_confidence": self.confidence} if len(self._log) else {}),
            **({"tests_spent": self._tests.spent} if self._tests.spent else {}),
            **({"checks": checks} if (checks := self._tests.state_dict()) else {}),
            **self._bets.state_dict(),
            **({"lengths": self._lengths.counts} if self._lengths.counts.any() else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``, with the bets and the confidence that it was started with."""
        with _validate.state_dict_errors("a recorder", state):
            scores, present = recorded_steps(state["scores"], state["present"])
            require_resumable(scores, self._num_canaries)
            self._bets.load_state_dict(state)
            if "confidence" in state:
                self.confidence = _validate.confidence(state["joint_confidence"])
                self._tests_level = remaining_level(self._bets.level, self.confidence)
            self._log.load(scores, present)
            self._tests.load_state_dict(state.get("checks", {}), len(self._log))
            self._tests.spent = _validate.at_least("tests_spent", state.get("tests_spent", 0.0), 0.0)
            self._shown.early = _validate.flag("looked", state["looked"])
            self._shown.any = _validate.flag("shown", state["shown"])
            self._lengths.counts = np.array(state.get("lengths", np.zeros_like(self._lengths.counts)))
        self._live = None
        self._coins = CoinCheck()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs, which can be audited but belongs to no training run."""
        self._wait()
        facts = None if self._facts is None else FrozenValue(self._facts())
        return {**vars(self), "_facts": facts, "_synchronize": None, "callbacks": []}

    def _wait(self) -> None:
        if self._synchronize is not None:
            self._synchronize()

    def _require_steps(self) -> None:
        if self.num_done == 0:
            raise InputError("Expected at least one recorded step, got none: did training run?")

    def _note_peek(self) -> None:
        """Note that the bound is shown."""
        self._require_fair(is_over=self._shown.is_over(self.num_done))
        self._shown.note(self.num_done)

    def _require_fair(self, *, is_over: bool) -> None:
        """Raise if the coins so far are very unlikely to be fair."""
        if self._paired:
            return
        if new := self._log.counted_present[self._coins.num_steps :]:
            self._coins.add(np.stack(new))
        self._coins.require_fair(is_over=is_over)

    @property
    def _may_have_stopped(self) -> bool:
        return self._shown.may_have_stopped(self.num_done)
