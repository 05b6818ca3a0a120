"""Testing by betting: bet against the claim, step by step (Waudby-Smith and Ramdas 2024).

Starting from a wealth of 1, every step bets that guesses are right more often than the claim allows. Under
the claim, the probability that the wealth ever reaches 1 / error is at most ``error``. Any bet that depends
only on the past keeps the game fair, so bets are chosen for growth; ``_stop_loss`` has the main bet, and
``_tails`` those on rare but near-certain guesses, which share a fraction of the error. Bets do not depend on
the tested parameter, beyond a limit on the stake, so the wealth decreases with it and the refuted parameters
form an interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

from dpaudit import _validate
from dpaudit._types import FloatArray
from dpaudit.errors import InputError
from dpaudit.stats._counts import ErrorCounts, StepErrors, StepScores
from dpaudit.stats._observations import Observations
from dpaudit.stats.inference._base import BoundQuery, Inference, Kind, ThresholdResult
from dpaudit.stats.inference._stop_loss import AdvantageBets, StopLosses
from dpaudit.stats.inference._tails import FarGuess, FarRates, TailBets, far_rates
from dpaudit.stats.tradeoffs import Gaussian

# assumptions, which docs/verdicts.md explains
_SINGLE = "each observation satisfies its curve given the earlier ones"
_UNINFORMED = "each guess depends on the released values, not on the presence of other canaries"
_STEPPED = (
    "each step satisfies its curve given the earlier steps and the presence of other canaries; scores within "
    "a step may be dependent"
)


@dataclass(frozen=True, repr=False)
class Betting(Inference):
    """Testing by betting: bets that errors are rarer than the trade-off allows; enough wealth refutes it.

    The bet is on the balanced error (fpr + fnr) / 2 of each step, which loses nothing at the threshold where
    both rates are equal. The bound is valid at any stopping time, and if the canaries within a step are
    dependent. (Separate bets on the two rates would not be valid: each rate may be low at different steps.)

    ``horizon`` is the planned number of steps: the bound is tightest there, and valid at any number.
    ``expected`` is the parameter that bets are tuned for; :func:`dpaudit.audit` passes the claimed one. The
    fraction ``tails`` of the error is bet on scores far from the threshold, which needs a Gaussian trade-off
    and an expected parameter. ``stop_loss=False`` is for guesses that depend on the presence of other
    canaries, such as scores from which the other canaries' contributions were subtracted.

    >>> Betting(horizon=500)
    Betting(horizon=500)
    """

    horizon: int | None = None
    expected: float | None = None
    tails: float = 0.1
    stop_loss: bool = True
    kind: ClassVar[Kind] = Kind.CONFIDENCE

    def __post_init__(self) -> None:
        if self.horizon is not None:
            # a file may claim any number of steps
            _validate.integer("horizon", self.horizon, high=(10**12))
        if self.expected is not None:
            _validate.at_least("expected", self.expected, 0.0)
        if isinstance(self.tails, bool) or not isinstance(self.tails, int | float) or not 0 <= self.tails < 1:
            raise InputError(f"Expected tails={self.tails!r} in [0, 1).")
        if not isinstance(self.stop_loss, bool):
            raise InputError(f"Expected stop_loss={self.stop_loss!r} to be True or False.")

    def __repr__(self) -> str:
        values = ((field, getattr(self, field.name)) for field in fields(self))
        shown = ", ".join(f"{field.name}={value!r}" for field, value in values if value != field.default)
        return f"Betting({shown})"

    def assumption(self, observations: Observations | ErrorCounts, *, is_fixed: bool) -> str:
        del is_fixed  # any threshold that depends on the past alone
        if not isinstance(observations, Observations) or not observations.is_stepped:
            return _SINGLE
        # without coins there is no stop-loss
        return f"{_STEPPED}; {_UNINFORMED}" if self.stop_loss and observations.by_coin else _STEPPED

    def at_threshold(
        self, observations: Observations, threshold: float, query: BoundQuery
    ) -> ThresholdResult:
        steps = StepScores.of(observations)
        errors = steps.errors(threshold)
        far = far_rates(steps, errors, self.far_intervals(query)) if observations.normalized else []
        bets = self.place(errors, query, far)
        return ThresholdResult(bets.parameter(), threshold, errors.total(), p_value=bets.p_value)

    def place(self, errors: StepErrors, query: BoundQuery, far: Sequence[FarRates] = ()) -> StepBets:
        """Bet on every step in order."""
        sizes = errors.num_absent + errors.num_present
        by_coin = errors.by_coin and bool((sizes == sizes[0]).all())
        bets = self.start(round(float(sizes.mean())), query, by_coin=by_coin, with_tails=bool(far))
        bets.extend(1 - 2 * errors.balanced(), far)
        return bets

    def far_intervals(self, query: BoundQuery) -> list[tuple[float, float]]:
        """Return the intervals outside of which a normalized score is far, the narrowest first."""
        return [guess.interval(self.expected or 0.0) for guess in self.far_guesses(query)]

    def far_guesses(self, query: BoundQuery) -> tuple[FarGuess, ...]:
        """Return the far guesses to bet on, none if the tails have no share of the error."""
        if not self.tails or not self.expected or not isinstance(query.tradeoff, Gaussian):
            return ()
        return FarGuess.levels(self.expected)

    def start(self, guesses: int, query: BoundQuery, *, by_coin: bool, with_tails: bool) -> StepBets:
        """Return bets without any step so far, for this number of guesses per step."""
        return StepBets(self, guesses, query, by_coin=by_coin, with_tails=with_tails)


class StepBets:
    """All bets of a run, to which steps may be added at any time."""

    def __init__(
        self, betting: Betting, guesses: int, query: BoundQuery, *, by_coin: bool, with_tails: bool
    ) -> None:
        self._tradeoff, self._error = query.tradeoff, query.error_rate
        far = betting.far_guesses(query) if with_tails else ()
        stop_loss = betting.stop_loss and by_coin
        share = betting.tails if far else 0.0
        expected = betting.expected
        self._main = AdvantageBets(
            guesses,
            stops=StopLosses.of(guesses) if stop_loss else StopLosses.none(),
            error=(1 - share) * query.error_rate,
            horizon=betting.horizon,
            expected=None if expected is None else 1 - 2 * self._tradeoff.balanced_error(expected),
        )
        self._tails = [
            TailBets(
                guess,
                expected=expected or 0.0,
                error=share * query.error_rate / len(far),
                size=guesses,
                stops=stop_loss,
                horizon=betting.horizon,
            )
            for guess in far
        ]

    def extend(self, advantages: FloatArray, far: Sequence[FarRates] = ()) -> None:
        """Add steps: fraction of right minus fraction of wrong guesses, and the rates of far guesses."""
        self._main.extend(advantages)
        for bets, (right, wrong) in zip(self._tails, far, strict=True):
            bets.extend(right, wrong)

    def parameter(self, count: int | None = None) -> float:
        """Return the largest parameter that the first ``count`` steps refute, by default all."""
        parameter = self._tradeoff.from_balanced_error((1 - self._main.refuted(count)) / 2)
        for bets in self._tails:
            parameter = bets.parameter(parameter, count)
        return parameter

    def p_value(self, claimed: float) -> float:
        """Return the smallest error rate at which the bets, as they were placed, refute ``claimed``.

        It is one over the largest wealth of any bet, divided by the share of the error that the bet has.
        """
        evidence = [self._main.evidence(1 - 2 * self._tradeoff.balanced_error(claimed))]
        evidence += [bets.evidence(claimed) for bets in self._tails]
        return min(self._error * math.exp(-max(evidence)), 1.0)
