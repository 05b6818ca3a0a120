"""The recorder of steps: keeps the scores of every step and turns them into bounds and a verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np

from dpaudit import _validate
from dpaudit._html import labelled
from dpaudit._plotting import draw_trajectory
from dpaudit._types import BoolArray, FloatArray
from dpaudit.accounting import Claim
from dpaudit.diagnostics import Diagnosis
from dpaudit.errors import InputError
from dpaudit.recording._claim_source import ClaimSource, GivenClaim, ReadClaim, TrainingInfo
from dpaudit.recording._signal_and_noise import (
    NO_NOISE,
    CanaryLengths,
    NoiseLog,
    NoiseTests,
    RunningMoments,
    UntestedError,
    check_signal,
    has_signal,
    require_alike,
)
from dpaudit.recording._trajectory import LiveBound, Trajectory
from dpaudit.stats import Betting, Inference, Observations, Result, TradeOff, audit
from dpaudit.stats._coins import CoinCheck
from dpaudit.stats._counts import StepErrors, StepScores
from dpaudit.stats._observations import scale_notes, split_by_coins
from dpaudit.stats.inference import BoundQuery
from dpaudit.stats.inference._tails import FarRates, far_rates

_PEEKS = 100  # number of times that the bound of a run of known length is computed
_UNPLANNED_EVERY = 50  # each number of steps needs an epsilon of its own, which is not cheap
_MIDPOINT = 0.5  # between an absent canary's mean score, 0, and a present one's, 1
_PENDING = 64  # steps that are recorded before bets are placed on them
_NOT_SHOWN = "not shown yet; live() shows it, after which audit() accounts for possible early stopping"


@final
class Recorder:
    """A record of per-step scores, in units of the canary's own signal, and of canary membership.

    ``num_steps`` is the planned number of steps, or None; the bound is valid either way, and tightest if the
    number is right. ``callbacks`` receive a :class:`LiveBound` about a hundred times per run (or every
    ``every`` steps); they may raise to end the run. ``paired``: each step has one score without the canary
    and one with it, from two independent draws, instead of one fair coin per canary. ``shares_noise``:
    the scores of one step are dependent, because their canaries are not orthogonal.

    Observers pass further parts. A ``ReadClaim`` reads the claim from the training run. ``noise`` tests the
    noise for :meth:`diagnose`. A present canary must score ``signal`` or more, otherwise there is no verdict.
    Scores are in units of ``reach`` clipping norms, which is less than 1 if canaries do not reach all layers.
    ``facts`` returns a :class:`TrainingInfo`. ``not_covered`` are sentences that name the parts of the
    training run that canaries bypass. ``synchronize`` waits for steps that were started but are not yet
    recorded.

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
        shares_noise: bool = False,
        every: int | None = None,
        callbacks: Sequence[Callable[[LiveBound], None]] = (),
        noise: NoiseTests | None = None,
        signal: float | None = None,
        reach: float = 1.0,
        facts: Callable[[], TrainingInfo] | None = None,
        not_covered: tuple[str, ...] = (),
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        self._claims: ClaimSource = claim if isinstance(claim, ReadClaim) else GivenClaim(claim)
        self.confidence = _validate.confidence(confidence)
        self._planned = None if num_steps is None else _validate.whole("num_steps", num_steps)
        self.callbacks = list(callbacks)
        usual = _UNPLANNED_EVERY if self._planned is None else max(1, self._planned // _PEEKS)
        self._every = usual if every is None else _validate.whole("every", every)
        self._tradeoff = tradeoff
        self._paired = paired
        self._shares_noise = shares_noise
        self._noise, self._signal, self._facts = noise, signal, facts
        self._lengths = CanaryLengths(signal=1.0 if signal is None else signal, reach=reach)
        self.not_covered = not_covered
        self._synchronize = synchronize
        self._peeked = self._closed = self._shown = False
        self._scores: list[FloatArray] = []
        self._present: list[BoolArray] = []
        self._bets: _PlacedBets | None = None
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
        return len(self._scores)

    @property
    def num_steps(self) -> int:
        """The planned number of steps; if not known, the number of recorded steps."""
        return self._planned or self.num_done

    @property
    def facts(self) -> TrainingInfo | None:
        """Facts about the training run besides its claim."""
        return None if self._facts is None else self._facts()

    @property
    def noise(self) -> NoiseLog:
        """The log to which an observer adds the noise of each step."""
        if not isinstance(self._noise, NoiseLog):
            raise UntestedError(NO_NOISE)
        return self._noise

    @property
    def tests_noise(self) -> bool:
        """Whether noise is logged for :meth:`diagnose`."""
        return self._noise is not None

    def record(
        self, scores: Any, present: Any, *, lengths: FloatArray | None = None, notify: bool = True
    ) -> None:
        """Record the scores of one step and whether each canary was present; call the callbacks.

        ``lengths`` are those of the clipped canaries, in clipping norms, if they are not known before the
        first step; they only affect the stated power. Pass ``notify=False`` to postpone the callbacks, and
        call :meth:`notify` later.
        """
        values, mask = np.array(scores, dtype=np.float64), np.array(present, dtype=np.bool_)
        require_alike(values, mask, step=self.num_done, first=self._scores[0] if self._scores else values)
        # a run that continues after its bound was shown had not ended, and may continue because of the bound
        self._peeked, self._closed = self._peeked or self._shown, False
        if self._bets is None:
            self._bets = self._start_bets(values.size)
        self._scores.append(values)
        self._present.append(mask)
        if lengths is not None:
            self._lengths.add(lengths)
        if len(self._scores) % _PENDING == 0:
            self._place_bets()
        if notify:
            self.notify()

    def notify(self) -> None:
        """Pass the live bound to the callbacks, if it is due."""
        if self.callbacks and self.num_done % self._every == 0:
            live = self.live()
            for callback in self.callbacks:
                callback(live)

    def close(self) -> None:
        """Mark the run as over: a bound shown from now on cannot have ended it."""
        self._closed = True

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
            if _validate.whole("num_steps", count) > self.num_done:
                raise InputError(
                    f"Expected num_steps={count} to be at most {self.num_done}, the number of recorded steps."
                )
        return [self._bound_after(count) for count in num_steps]

    def _bound_after(self, count: int) -> LiveBound:
        hypothesis = self.claim.hypothesis(self._tradeoff)
        parameter = self._place_bets().parameter(count) if count else 0.0
        return LiveBound(
            num_done=count,
            epsilon=hypothesis.epsilon(parameter),
            claimed_epsilon=self.claim.epsilon,
            delta=self.claim.delta,
            confidence=self.confidence,
            is_violation=parameter > hypothesis.parameter,
        )

    def _place_bets(self) -> _PlacedBets:
        """Bet on all recorded steps; a bet that is placed does not change."""
        if self._bets is None:
            self._bets = self._start_bets(self._scores[0].size)
        self._bets.extend(self._scores, self._present)
        return self._bets

    def _start_bets(self, num_guesses: int) -> _PlacedBets:
        tradeoff = self._tradeoff or self._claims.step_tradeoff()
        query = BoundQuery(tradeoff, 0.0, 1 - self.confidence)
        betting = Betting(
            horizon=self._planned,
            expected=self._claims.step_parameter(self._tradeoff),
            stop_loss=not self._shares_noise,
        )
        return _PlacedBets(betting, query, num_guesses, by_coin=not self._paired)

    def trajectory(self) -> Trajectory:
        """Return the live bound at about sixty points, with its band."""
        self._require_steps()
        self._note_peek()
        placed = self._place_bets()
        return Trajectory.of(
            placed.bets,
            placed.advantages,
            hypothesis=self.claim.hypothesis(self._tradeoff),
            confidence=self.confidence,
            horizon=self._planned,
        )

    def plot(self, *, ax: Any = None) -> Any:
        """Plot the live bound over time, its band and the claim, with matplotlib.

        Return the axes: ``ax``, or new ones.
        """
        return draw_trajectory(self.trajectory(), self.claim.epsilon, ax)

    def _repr_html_(self) -> str:
        """Return the notebook display. It may be implicit, so a bound that was not shown stays hidden."""
        is_free = self._peeked or self._is_over
        self._shown = self._shown or is_free
        rows = [("steps", f"{self.num_done:,}")]
        if self._scores:
            rows.append(("scores per step", f"{self._scores[0].size:,}"))
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
        scores, present = np.stack(self._scores), np.stack(self._present)
        if self._paired:
            return Observations.from_presence(scores, present, normalized=True, paired=True)
        self._require_fair(is_over=True)
        coupled = self._shares_noise and self._scores[0].size > 1
        return split_by_coins(scores, present, normalized=True, coupled=coupled)

    def audit(
        self, *, inference: Inference | None = None, claim: Claim | None = None, **method: Any
    ) -> Result:
        """Return the verdict on the claim; keywords are as in :func:`dpaudit.audit`.

        The recorder of an observer also accepts any part of the claim: ``noise_multiplier``, ``sample_rate``,
        ``num_steps`` or ``delta``.

        By default the verdict rests on the bets behind :meth:`live`: one test, which is valid even if the run
        was stopped because of the live bound, and if the canaries of one step are dependent.
        """
        given = self._claims.pop_params(method)
        observations = self.observations  # before the claim, which a run without steps does not have
        claim = claim or self._claims.claim(self.num_done, given)
        if self._signal is not None:
            check_signal(*_moments(observations), self._signal)
        usual: dict[str, Any] = {
            "claim": claim,
            "confidence": self.confidence,
            "tradeoff": self._tradeoff,
            "inference": self._place_bets().completed(inference),
        }
        self._shown = True
        result = audit(observations, **(usual | method))
        if self._signal is not None:  # below 1 for canaries shorter than the clipping norm
            result = replace(result, notes=scale_notes(observations, self._signal))
        return replace(
            result,
            design=self._lengths.in_design(result.design),
            not_covered=self.not_covered + self._claims.remarks(given),
        )

    def diagnose(self, *, noise_multiplier: float | None = None, confidence: float = 0.95) -> Diagnosis:
        """Test the noise of all steps against ``noise_multiplier``, by default the claimed one.

        Raise an ``InputError`` if no noise was logged, or if the run may have been ended because of its
        noise: the tests have their error rate only if the number of steps does not depend on the noise.
        """
        if self._noise is None:
            raise UntestedError(NO_NOISE)
        self._require_fixed_length()
        self._shown = True
        return self._noise.diagnose(
            noise_multiplier=self._claims.noise_multiplier(noise_multiplier),
            confidence=confidence,
            has_signal=self._has_signal,
        )

    def _has_signal(self) -> bool:
        return self._signal is None or has_signal(*_moments(self.observations), self._signal)

    def state_dict(self) -> dict[str, Any]:
        """Return the recorded state, for ``load_state_dict`` of an identically created recorder."""
        self._wait()
        return {
            "scores": np.asarray(self._scores),
            "present": np.asarray(self._present),
            "looked": self._peeked,
            "shown": self._shown,
            **({"lengths": self._lengths.counts} if self._lengths.counts.any() else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``."""
        self._scores = list(state["scores"])
        self._present = list(state["present"])
        # a state that does not record whether the bound was shown counts as shown
        self._peeked, self._shown = state["looked"], state.get("shown", True)
        self._lengths.counts = np.array(state.get("lengths", np.zeros_like(self._lengths.counts)))
        self._bets = self._live = None
        self._coins = CoinCheck()

    def _wait(self) -> None:
        if self._synchronize is not None:
            self._synchronize()

    def _require_steps(self) -> None:
        if self.num_done == 0:
            raise InputError("Expected at least one recorded step, got none: did training run?")

    @property
    def _is_over(self) -> bool:
        return self._closed or self.num_done == self._planned

    def _note_peek(self) -> None:
        """Note that the bound is shown; unless the run is over, it may be ended because of that."""
        self._require_fair(is_over=self._is_over)
        self._shown = True
        self._peeked = self._peeked or not self._is_over

    def _require_fair(self, *, is_over: bool) -> None:
        """Raise if the coins so far are very unlikely to be fair."""
        if self._paired:
            return
        if new := self._present[self._coins.num_steps : self.num_done]:
            self._coins.add(np.stack(new))
        self._coins.require_fair(is_over=is_over)

    def _require_fixed_length(self) -> None:
        """Raise if the run may have been stopped because of its noise."""
        if not self._peeked or self.num_done == self._planned:
            return
        planned = self._planned
        ends = "a run of unplanned length" if planned is None else f"{self.num_done} of {planned} steps"
        raise UntestedError(
            f"Expected a number of steps that does not depend on the scores, got {ends} and a bound that was "
            "shown before the end: tests of the noise would not have their stated error rate. Pass "
            "num_steps= to the observer and run all of them, or show the bound only after the end."
        )


class _PlacedBets:
    """The bets on the steps of a run, which are placed in batches as steps are recorded."""

    def __init__(self, betting: Betting, query: BoundQuery, guesses: int, *, by_coin: bool) -> None:
        self.betting, self._query, self._by_coin = betting, query, by_coin
        with_tails = bool(betting.far_guesses(query))
        self.bets = betting.start(guesses, query, by_coin=by_coin, with_tails=with_tails)
        self._advantages: list[FloatArray] = []
        self._num_done = 0

    def completed(self, inference: Inference | None) -> Inference:
        """Return the inference, by default these bets; other bets get the horizon and tuning of these."""
        if inference is None:
            return self.betting
        if not isinstance(inference, Betting):
            return inference
        mine = self.betting
        expected = mine.expected if inference.expected is None else inference.expected
        return replace(inference, horizon=inference.horizon or mine.horizon, expected=expected)

    @property
    def advantages(self) -> FloatArray:
        """Fraction of right minus fraction of wrong guesses, in each step."""
        return np.concatenate(self._advantages)

    def extend(self, scores: Sequence[FloatArray], present: Sequence[BoolArray]) -> None:
        """Bet on the steps among all recorded ones that are new."""
        if len(scores) == self._num_done:
            return
        values, mask = np.stack(scores[self._num_done :]), np.stack(present[self._num_done :])
        errors = StepErrors.of(values, mask, _MIDPOINT, by_coin=self._by_coin)
        self._advantages.append(1 - 2 * errors.balanced())
        self.bets.extend(self._advantages[-1], self._far_rates(values, mask, errors))
        self._num_done = len(scores)

    def _far_rates(self, scores: FloatArray, present: BoolArray, errors: StepErrors) -> list[FarRates]:
        intervals = self.betting.far_intervals(self._query)
        if not intervals:
            return []
        far = StepScores.outside(scores, present, intervals[0], by_coin=self._by_coin)
        return far_rates(far, errors, intervals)

    def parameter(self, count: int) -> float:
        """Return the largest parameter that the first ``count`` steps refute."""
        return self.bets.parameter(count)


def _moments(observations: Observations) -> tuple[RunningMoments, RunningMoments]:
    sides = observations.with_canary, observations.without_canary
    present, absent = (RunningMoments().add(scores) for scores in sides)
    return present, absent
