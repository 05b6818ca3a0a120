"""The recorder of whole runs: one score per canary, its log-likelihood ratio over all steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import Any, final

import numpy as np

from dpaudit import _validate
from dpaudit._provenance import now
from dpaudit._types import BoolArray, FloatArray
from dpaudit.accounting import Claim, SubsampledGaussian, log_ratio_attack
from dpaudit.diagnostics import Diagnosis, ObservedStep, RunCheck
from dpaudit.errors import InputError
from dpaudit.recording._claim_source import ClaimSource, FrozenValue, GivenClaim, ReadClaim, TrainingInfo
from dpaudit.recording._joint_verdict import RunTests, SupportsDiagnose, has_more_tests
from dpaudit.recording._signal_check import (
    LengthMoments,
    RunningMoments,
    check_signal,
    require_resumable,
)
from dpaudit.recording._trajectory import LiveBound
from dpaudit.stats import (
    RUN,
    AuditDesign,
    BestOf,
    Bound,
    Fixed,
    Guesses,
    Observations,
    Result,
    Simultaneous,
    as_flags,
    as_mask,
    audit_recorded,
    one_run_fdp_bound,
    plain_array,
)
from dpaudit.stats.tradeoffs import Attack

# Sampling faults need most of the error probability; too little noise is detected with less.
WHOLE_RUN_RULE = BestOf((Fixed(0.0), Simultaneous()), (0.8, 0.2))
_LARGEST = 1e100  # log likelihood ratio of a step: sums of larger ones would overflow
_LEAST_NOISE = 1e-3  # with less, scores reveal every draw anyway
_MANY_DRAWS = 20  # expected draws; the probability of seeing none is then two in a billion


class LikelihoodRatios:
    """The logarithm of each canary's likelihood ratio over the steps so far.

    The score x of a step has mean 1 if the canary is in the batch, mean 0 if not, and Gaussian noise. With
    sample rate q, the likelihood ratio of the step is 1 - q + q exp((2 x - 1) / (2 noise^2)).
    """

    def __init__(self, present: BoolArray, *, noise_multiplier: float, sample_rate: float) -> None:
        self.present = as_flags(present)
        self.num_done = 0
        self.values: FloatArray = np.zeros(self.present.size)
        self.noise_multiplier = _validate.noise_multiplier(noise_multiplier)
        self.sample_rate = _validate.sample_rate(sample_rate)

    def record(self, scores: Any) -> None:
        """Add the scores of all canaries in one step, whether or not they were in the batch."""
        step_scores = plain_array("scores", scores).astype(np.float64, copy=False)
        if step_scores.shape != self.present.shape or not np.isfinite(step_scores).all():
            raise InputError(
                f"Expected {self.present.size} finite scores in step {self.num_done}, got shape "
                f"{step_scores.shape} with {int(np.isfinite(step_scores).sum())} of them finite."
            )
        # divide: log(1 - 1), where every batch includes every canary
        with np.errstate(divide="ignore", over="ignore"):
            present = np.clip((step_scores - 0.5) / self.noise_multiplier**2, -_LARGEST, _LARGEST)
            self.values += np.logaddexp(np.log1p(-self.sample_rate), np.log(self.sample_rate) + present)
        self.num_done += 1

    def observations(self, num_steps: int) -> Observations:
        """Return one score per canary; available after the last step only, because the claim covers all."""
        if self.num_done < num_steps or self.num_done == 0:
            raise InputError(
                f"Expected all {num_steps} steps to be recorded before the whole run is audited, got "
                f"{self.num_done}."
            )
        return Observations.from_presence(self.values, self.present, scores_of=RUN)

    def state_dict(self) -> dict[str, Any]:
        """Return the recorded state, for ``load_state_dict`` of an identically created object."""
        return {"num_done": self.num_done, "ratios": self.values.copy(), "present": self.present}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``."""
        with _validate.state_dict_errors("likelihood ratios", state):
            values, present = np.array(state["ratios"], dtype=np.float64), state["present"]
            if values.shape != self.present.shape or not np.isfinite(values).all():
                raise InputError(
                    f"Expected {self.present.size} finite ratios in the state, got shape {values.shape}."
                )
            self.num_done = _validate.integer("num_done", state["num_done"], low=0)
            self.present, self.values = as_mask(present, values.shape), values


@final
class WholeRunRecorder:
    """Log-likelihood ratios: for each canary, how much more likely its scores are if it is in the data set.

    The product of a canary's likelihood ratios over all steps is the most powerful test of the composed
    mechanism, so each canary is one observation of the whole run. ``present`` is a mask of the canaries in
    the data set. The claim is DP-SGD with the given four numbers. ``ratios`` may come from a run that was
    recorded elsewhere.

    Observers pass further parts. ``claim`` reads the four numbers from the training run; the noise multiplier
    and the sample rate known before the first step determine how scores are weighted. The norm of a canary is
    ``reach`` times the clipping norm, and a canary that was drawn must score ``signal`` or more. ``finished``
    receives the sample rate and raises if the run cannot be audited. ``facts``,
    ``not_covered``, ``checks`` and ``tests`` are as for :class:`Recorder`.
    """

    def __init__(
        self,
        present: BoolArray,
        *,
        noise_multiplier: float | None = None,
        sample_rate: float | None = None,
        num_steps: int | None = None,
        delta: float | None = None,
        confidence: float = 0.95,
        ratios: LikelihoodRatios | None = None,
        claim: ReadClaim | None = None,
        reach: float = 1.0,
        signal: float | None = None,
        finished: Callable[[float], None] | None = None,
        facts: Callable[[], TrainingInfo] | None = None,
        not_covered: tuple[str, ...] = (),
        checks: Sequence[RunCheck] = (),
        tests: bool = True,
    ) -> None:
        self.confidence, self._started = _validate.confidence(confidence), now()
        self._claims: ClaimSource
        if claim is None:
            weights_from: dict[str, Any] = {"noise_multiplier": noise_multiplier, "sample_rate": sample_rate}
            numbers = weights_from | {"num_steps": num_steps, "delta": delta}
            self._claims = GivenClaim(Claim.dpsgd(**numbers))
        else:
            self._claims, weights_from = claim, claim.params(0).known("noise_multiplier", "sample_rate")
        self._reach = reach
        weighed = _validate.positive("noise_multiplier", weights_from["noise_multiplier"]) / reach
        self._ratios = ratios or LikelihoodRatios(
            present, noise_multiplier=weighed, sample_rate=weights_from["sample_rate"]
        )
        self._planned = num_steps
        self._signal, self._finished = signal, finished
        self._facts = facts
        self.not_covered = not_covered
        self._tests = RunTests(checks, self._claims, wanted=tests)
        self._joined, self._absent = RunningMoments(), RunningMoments()

    @property
    def present(self) -> BoolArray:
        """Which canaries are in the data set."""
        return self._ratios.present

    @property
    def num_done(self) -> int:
        """The number of recorded steps."""
        return self._ratios.num_done

    @property
    def num_steps(self) -> int:
        """The planned number of steps; if not known, the number of recorded steps."""
        return self._planned or self.num_done

    @property
    def claim(self) -> Claim:
        """The claim that the scores are tested against."""
        return self._claims.claim(self.num_done)

    @property
    def tradeoff(self) -> SubsampledGaussian:
        """The trade-off curve of the whole run."""
        return _curve(self.claim)

    @property
    def facts(self) -> TrainingInfo | None:
        """Facts about the training run besides its claim."""
        return None if self._facts is None else self._facts()

    @property
    def tests_noise(self) -> bool:
        """Whether the noise of steps is tested."""
        return self._tests.noise is not None and self._tests.is_wanted

    def observe(self, step: ObservedStep) -> None:
        """Record what an observer saw of one step."""
        if step.scores is not None:
            self.record(step.scores, step.present)
        self._tests.observe(step)

    def record(self, scores: Any, joined: BoolArray | None = None) -> None:
        """Add the scores of all canaries in one step, whether or not they were in the batch.

        Observers also pass which canaries ``joined`` the batch, that is, were drawn by the sampler.
        """
        self._ratios.record(scores)
        if joined is not None:
            self._joined.add(scores[joined])
            self._absent.add(scores[~joined])

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs, which can be audited but belongs to no training run."""
        facts, finished = None if self._facts is None else FrozenValue(self._facts()), None
        try:
            if self._finished is not None:
                self._finished(self._ratios.sample_rate)
        except InputError as error:
            finished = partial(_raise, str(error))
        return {**vars(self), "_facts": facts, "_finished": finished}

    def live(self) -> LiveBound:
        """Raise an ``InputError``: there is no bound before the last step."""
        raise InputError(
            "Expected a finished run with sampling=True: there is no bound before the last step."
        )

    def close(self) -> None:
        """Mark the run as over. This has no effect: there is no bound before the end."""

    @property
    def observations(self) -> Observations:
        """One score per canary; available after the last step only, because the claim covers all steps."""
        return self._ratios.observations(self.num_steps)

    def audit(
        self, *, confidence: float | None = None, tests: SupportsDiagnose | bool | None = None, **method: Any
    ) -> Result:
        """Return one verdict on the claim from bound and tests; keywords are as in :func:`dpaudit.audit`.

        The recorder of an observer also accepts any part of the claim: ``noise_multiplier``, ``sample_rate``,
        ``num_steps`` or ``delta``. ``confidence`` and ``tests`` are as for :meth:`Recorder.audit`.

        By default two thresholds share the error probability of the bound. One is where presence and absence
        are equally likely under the claim, which is known before the data; it is the best one for sampling
        faults. With less noise than claimed, all scores shift and it may be useless, so the other is the best
        of many.
        """
        claim, observations = self._claim_and_observations(method)
        joint = self.confidence if confidence is None else _validate.confidence(confidence)
        level, tests_level = self._tests.levels(joint, has_more=has_more_tests(tests))
        usual: dict[str, Any] = {"claim": claim, "confidence": level, "tradeoff": _curve(claim)}
        rule = Fixed(0.0) if "inference" in method else WHOLE_RUN_RULE
        result = audit_recorded(observations, **(usual | {"threshold": rule} | method))
        assert isinstance(result.design, AuditDesign)  # not that of guesses
        design = result.design.for_attack(partial(self._attack, _curve(claim).num_steps))
        times = self._started, now()
        result = replace(result, design=design, not_covered=self.not_covered, times=times)
        return self._tests.join(result, tests_level, more=tests, num_done=self.num_done, covers_sampling=True)

    def _attack(self, num_steps: int, parameter: float) -> Attack:
        """Return the attack by these scores, which assume the claimed noise, on a run with another noise."""
        ratios = self._ratios
        noise = max(1 / (self._reach * parameter), _LEAST_NOISE)
        return log_ratio_attack(noise, ratios.sample_rate, num_steps, ratios.noise_multiplier)

    def one_run_bound(self, **given: Any) -> Bound:
        """Return a looser bound that is valid even if the canaries of the run are dependent.

        As in :meth:`audit`, the recorder of an observer accepts any part of the claim.
        """
        claim, _ = self._claim_and_observations(given)
        if given:
            raise TypeError(f"one_run_bound() got an unexpected keyword argument {next(iter(given))!r}")
        guesses = Guesses.at_threshold(self._ratios.values, self.present, threshold=0.0)
        return one_run_fdp_bound(
            guesses, tradeoff=_curve(claim), delta=claim.delta, confidence=self.confidence
        )

    def _claim_and_observations(self, keywords: dict[str, Any]) -> tuple[Claim, Observations]:
        """Return the claim, completed by the keywords, and the scores of a finished run.

        A run longer than claimed is audited too: its larger leak is visible in the scores.
        """
        overrides = self._claims.pop_params(keywords)
        if self._signal is not None:
            self._require_draws()
        if self._finished is not None:
            self._finished(self._ratios.sample_rate)
        if self._signal is not None:
            check_signal([LengthMoments(self._joined, self._absent)], self._signal)
        claim = self._claims.claim(self.num_done, overrides, may_be_longer=True)
        return claim, self._ratios.observations(_curve(claim).num_steps)

    def _require_draws(self) -> None:
        expected = self._ratios.sample_rate * int(self.present.sum()) * self.num_done
        if self._joined.count == 0 and expected > _MANY_DRAWS:
            raise InputError(
                f"Expected the sampler to draw canaries about {expected:.0f} times, got none: it does not "
                "draw from all of its data set, so it cannot be audited."
            )

    def diagnose(self, *, noise_multiplier: float | None = None, confidence: float = 0.95) -> Diagnosis:
        """Run the tests alone, against ``noise_multiplier``, by default the claimed one."""
        return self._tests.diagnose(noise_multiplier, confidence)

    def state_dict(self) -> dict[str, Any]:
        """Return the recorded state, for ``load_state_dict`` of an identically created recorder."""
        moments = {"joined": astuple(self._joined), "absent": astuple(self._absent)}
        checks = {"checks": self._tests.state_dict()}
        return self._ratios.state_dict() | (moments if self._absent.count else {}) | checks

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``."""
        with _validate.state_dict_errors("a recorder", state):
            require_resumable([state["present"]], self.present.size)
            self._ratios.load_state_dict(state)
            self._tests.load_state_dict(state.get("checks", {}), self.num_done)
            if "joined" in state:
                self._joined, self._absent = (RunningMoments(*state[side]) for side in ("joined", "absent"))


def _curve(claim: Claim) -> SubsampledGaussian:
    """Return the curve of the whole run; only DP-SGD claims are tested against whole runs."""
    assert claim.training is not None
    return claim.training


def _raise(message: str, *_: Any) -> None:
    raise InputError(message)
