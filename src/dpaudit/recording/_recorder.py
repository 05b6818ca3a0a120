"""The scores of every step, and the bound they make so far.

The scores of one step: whether they can be recorded, and how many guesses by them are wrong. The bound while
the training runs. How a recorder shows itself in a notebook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpaudit import _validate
from dpaudit._html import labelled
from dpaudit._plotting import draw_course
from dpaudit._types import BoolArray, FloatArray
from dpaudit.accounting import Claim
from dpaudit.errors import InputError
from dpaudit.recording._trajectory import Course
from dpaudit.recording._whole_run import require_no_epsilon
from dpaudit.stats import Betting, Inference, Observations, Result, TradeOff, audit
from dpaudit.stats.inference._base import CountInference
from dpaudit.stats.inference._betting import upper_mean


@dataclass(frozen=True, kw_only=True)
class LiveBound:
    """A lower bound that holds at this and at every other moment of the run, all together.

    So the run may be stopped because of what it says.
    """

    num_done: int
    epsilon: float
    claimed_epsilon: float
    delta: float
    confidence: float
    is_violation: bool

    def __str__(self) -> str:
        relation = ">" if self.is_violation else "of"
        return f"epsilon >= {self.epsilon:.3g} {relation} {self.claimed_epsilon:.3g} claimed"


_NOT_SHOWN = "not looked at; live() shows it, and audit() then allows for a run that was ended because of it"


def recorder_html(
    name: str,
    *,
    num_done: int,
    num_scores: int | None,
    claim: Callable[[], Claim],
    bound: Callable[[], LiveBound] | None,
) -> str:
    """What was recorded, what is claimed, and the ``bound`` where showing it changes nothing."""
    rows = [("steps", f"{num_done:,}")]
    if num_scores is not None:
        rows.append(("scores a step", f"{num_scores:,}"))
    try:
        rows.append(("claim", claim().summary))
        rows.append(("bound so far", _NOT_SHOWN if bound is None else str(bound())))
    except InputError as error:  # a claim that is not complete yet
        rows.append(("claim", str(error)))
    return labelled(name, "", rows)


_MIDPOINT = 0.5  # between an absent canary's mean score, 0, and a present one's, 1


def require_alike(scores: FloatArray, present: BoolArray, *, step: int, first: FloatArray) -> None:
    """Refuse scores that are not as many as those of the ``first`` step, or not finite."""
    expected = first.shape if first.ndim == 1 else (first.size,)
    if scores.size == 0 or scores.shape != present.shape or scores.shape != expected:
        raise InputError(
            f"Expected one score and one presence for each of {expected[0] or 'some'} canaries in step "
            f"{step}, got shapes {scores.shape} and {present.shape}."
        )
    if not np.isfinite(scores).all():
        index = int(np.flatnonzero(~np.isfinite(scores))[0])
        raise InputError(
            f"Expected finite scores in step {step}, got scores[{index}]={scores[index]}: "
            "did the training diverge?"
        )


def share_wrong(scores: FloatArray, present: BoolArray) -> float:
    """How often a guess by the midpoint is wrong; counted, which is faster than a mean in every step."""
    return int(np.count_nonzero((scores > _MIDPOINT) != present)) / scores.size


def require_bets(inference: Inference | None) -> None:
    """Counts of scores that share noise vary more than a binomial: no bound by them holds."""
    if isinstance(inference, CountInference):
        raise InputError(
            "Expected inference=Betting() for scores of one step that share its noise, as those of input "
            f"canaries do, got {inference!r}, which counts them as independent."
        )


_LOOKS = 100  # how often a run of known length is looked at


class Recorder:
    """Collects, step by step, scores in units of the canary's own signal, and who was present.

    ``num_steps`` is how many steps are planned; the bound is tightest if it is right, and holds if it is
    not. ``callbacks`` get a :class:`LiveBound` about a hundred times a run (or ``every`` so many steps);
    they may raise to end the training. ``paired`` says that every step has one score without the canary and
    one with it, of two independent draws, and not canaries that are present by fair coins. ``shares_noise``
    says that the scores of one step depend on each other, because their canaries are not orthogonal.
    ``may_stop`` says whether the run may be ended because of the live bound; without it, it may if anybody
    looks before the end: before all planned steps are done, or :meth:`close` was called.

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
        claim: Claim,
        num_steps: int,
        confidence: float = 0.95,
        tradeoff: TradeOff | None = None,
        paired: bool = False,
        shares_noise: bool = False,
        may_stop: bool | None = None,
        every: int | None = None,
        callbacks: Sequence[Callable[[LiveBound], None]] = (),
    ) -> None:
        self._claim = claim
        self.confidence = _validate.confidence(confidence)
        self.num_steps = _validate.whole("num_steps", num_steps)
        self.callbacks = list(callbacks)
        self._every = max(1, self.num_steps // _LOOKS if every is None else _validate.whole("every", every))
        self._tradeoff = tradeoff
        self._paired = paired
        self._shares_noise, self._may_stop = shares_noise, may_stop
        self._looked = self._closed = self._shown = False
        self._scores: list[FloatArray] = []
        self._present: list[BoolArray] = []
        self._wrong: list[float] = []
        self._live: LiveBound | None = None

    @property
    def claim(self) -> Claim:
        """What is held against the scores."""
        return self._claim

    @property
    def num_done(self) -> int:
        """How many steps were recorded."""
        return len(self._scores)

    def record(self, scores: Any, present: Any, *, tell: bool = True) -> None:
        """The scores of one step, and whether the canary of each was present; callbacks are told of it.

        Who has something to finish first says ``tell=False`` and calls :meth:`tell` afterwards.
        """
        values, mask = np.array(scores, dtype=np.float64), np.array(present, dtype=np.bool_)
        require_alike(values, mask, step=self.num_done, first=self._scores[0] if self._scores else values)
        # whoever saw a bound and goes on may do so because of it: what was taken for the end was none
        self._looked, self._closed = self._looked or self._shown, False
        self._scores.append(values)
        self._present.append(mask)
        self._wrong.append(share_wrong(values, mask))
        if tell:
            self.tell()

    def tell(self) -> None:
        """Give the live bound to the callbacks, if it is time for it."""
        if self.callbacks and self.num_done % self._every == 0:
            live = self.live()
            for callback in self.callbacks:
                callback(live)

    def live(self) -> LiveBound:
        """The bound of the steps so far."""
        self._note_look()
        if self._live is None or self._live.num_done != self.num_done:
            self._live = self._look(self.num_done)
        return self._live

    def curve(self, num_steps: Sequence[int] | None = None) -> list[LiveBound]:
        """The bounds of the first so many steps, for each of these numbers; by default about a hundred.

        They hold all together, so that the best may be chosen; none is below one before it. Before the end it
        is a look like :meth:`live`, after which :meth:`audit` rests on bets.

        >>> recorder = Recorder(claim=Claim.gaussian(noise_multiplier=1.0, delta=1e-5), num_steps=3)
        >>> for _ in range(3):
        ...     recorder.record([0.0, 1.0], [False, True])
        >>> [bound.num_done for bound in recorder.curve()]
        [1, 2, 3]
        """
        self._note_look()
        if num_steps is None:
            num_steps = range(self._every, self.num_done + 1, self._every)
        for count in num_steps:
            if _validate.whole("num_steps", count) > self.num_done:
                raise InputError(
                    f"Expected num_steps={count} to be at most {self.num_done}, the recorded steps."
                )
        return [self._look(count) for count in num_steps]

    def _look(self, count: int) -> LiveBound:
        hypothesis = self.claim.hypothesis(self._tradeoff)
        parameter = 0.0
        if count:
            guesses, wrong = self._scores[0].size, np.asarray(self._wrong[:count])
            upper = upper_mean(wrong, 1 - self.confidence, guesses, self.num_steps)
            parameter = hypothesis.tradeoff.from_balanced_error(upper)
        return LiveBound(
            num_done=count,
            epsilon=hypothesis.epsilon(parameter),
            claimed_epsilon=self.claim.epsilon,
            delta=self.claim.delta,
            confidence=self.confidence,
            is_violation=parameter > hypothesis.parameter,
        )

    def course(self) -> Course:
        """How the bound came about: the live bound at about sixty moments, with its band."""
        if not self._wrong:
            raise InputError("Expected at least one recorded step, got none: did the training run?")
        self._note_look()
        return Course.of(
            np.asarray(self._wrong),
            hypothesis=self.claim.hypothesis(self._tradeoff),
            confidence=self.confidence,
            guesses=self._scores[0].size,
            horizon=self.num_steps,
        )

    def plot(self, *, ax: Any = None) -> Any:
        """Draw the live bound over time, its band and the claim.

        Needs matplotlib. Gives the axes back: ``ax``, or new ones.
        """
        return draw_course(self.course(), self.claim.epsilon, ax)

    def _repr_html_(self) -> str:
        """As a notebook shows it. That may happen unasked, so it is no look: what nobody saw stays unseen."""
        is_free = self._looked or self._is_over
        self._shown = self._shown or is_free
        return recorder_html(
            type(self).__name__,
            num_done=self.num_done,
            num_scores=self._scores[0].size if self._scores else None,
            claim=lambda: self.claim,
            bound=(lambda: self._look(self.num_done)) if is_free else None,
        )

    def close(self) -> None:
        """Say that the run is over: who looks from now on cannot have ended it."""
        self._closed = True

    @property
    def _is_over(self) -> bool:
        return self._closed or self.num_done == self.num_steps

    def _note_look(self) -> None:
        """Whoever sees the bound before the end may end the run because of it."""
        self._shown = True
        self._looked = self._looked or not self._is_over

    @property
    def observations(self) -> Observations:
        """All scores so far."""
        if not self._scores:
            raise InputError("Expected at least one recorded step, got none: did the training run?")
        scores, present = np.stack(self._scores), np.stack(self._present)
        if self._paired:
            scores, present = scores.reshape(-1), present.reshape(-1)
        return Observations.from_presence(scores, present, normalized=True)

    def audit(
        self, *, inference: Inference | None = None, claim: Claim | None = None, **method: Any
    ) -> Result:
        """The verdict on the claim; keywords are those of :func:`dpaudit.audit`.

        By default it rests on bets, which hold also if the run could have been stopped because of the live
        bound, and if the canaries of one step depend on each other. A finished run of pairs that nobody
        looked into needs neither: there the counts of all steps tell more.
        """
        require_no_epsilon(method)
        if self._shares_noise and self._scores and self._scores[0].size > 1:
            require_bets(inference)
        if inference is None and not (self._paired and self._is_of_fixed_length):
            inference = Betting(horizon=self.num_steps)
        self._shown = True
        usual: dict[str, Any] = {
            "claim": self.claim if claim is None else claim,
            "confidence": self.confidence,
            "tradeoff": self._tradeoff,
        }
        return audit(self.observations, inference=inference, **(usual | method))

    @property
    def _is_of_fixed_length(self) -> bool:
        """Whether the number of steps cannot depend on what they showed.

        A run that would have been stopped at a violation and was not has had one test already: counting
        it as well would make two tests of 5 % each.
        """
        may_stop = self._looked if self._may_stop is None else self._may_stop
        return self.num_done == self.num_steps and not may_stop

    def state_dict(self) -> dict[str, Any]:
        """What was recorded; give it to ``load_state_dict`` of an equal recorder."""
        return {
            "scores": np.asarray(self._scores),
            "present": np.asarray(self._present),
            "looked": self._looked,
            "shown": self._shown,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where ``state_dict`` was taken."""
        self._scores = list(state["scores"])
        self._present = list(state["present"])
        pairs = zip(self._scores, self._present, strict=True)
        self._wrong = [share_wrong(scores, present) for scores, present in pairs]
        # who does not know whether the bound was shown supposes that it was
        self._looked, self._shown = state["looked"], state.get("shown", True)
        self._live = None
