"""The recorder keeps every score once, and its live bound is the bound of the audit, at every moment."""

import json

import numpy as np
import pytest
from statistical_limits import LEVEL, most_flagged

import dpaudit
from dpaudit import _provenance
from dpaudit.diagnostics import NoiseCheck
from dpaudit.recording import DPSGDParams, PerStep, ReadClaim, Recorder, UntestedError, WholeRun
from dpaudit.report import Run

CLAIM = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5)


def recorder_of(num_steps, num_canaries, noise, seed, coupled=False, **options):
    rng, scorer = np.random.default_rng(seed), PerStep(coupled=coupled)
    recorder = dpaudit.Recorder(claim=CLAIM, num_steps=num_steps, scorer=scorer, **options)
    for _ in range(num_steps):
        present = rng.random(num_canaries) < 0.5
        recorder.record(present + noise * rng.standard_normal(num_canaries), present)
    return recorder


def test_the_json_of_an_audit_says_where_its_numbers_come_from_and_only_that_asks_git(monkeypatch):
    asked = []
    state = {"commit": "abc", "dirty": True}
    monkeypatch.setattr(_provenance, "git_state", lambda folder=None: asked.append(folder) or state)
    for recorder in (recorder_of(20, 8, 1.0, 0), whole_run(40)):
        result = recorder.audit()
        assert not asked
        found = json.loads(json.dumps(result.to_dict()))["provenance"]
        assert found["git"] == state
        assert found["packages"]["dpaudit"] == dpaudit.__version__
        assert found["python"]
        assert found["platform"]
        assert found["started"].endswith("+00:00")
        assert found["seconds"] >= 0
        assert Run.of(result, name="a").provenance["git.commit"] == "abc"
        assert len(asked) == 1
        asked.clear()
    assert "provenance" not in dpaudit.audit(recorder.observations, claim=CLAIM).to_dict()


@pytest.mark.parametrize("claim", [None, 8.0, dpaudit.Claim])
def test_a_claim_is_a_claim(claim):
    with pytest.raises(dpaudit.InputError, match=r"claim must be a Claim such as .*, got "):
        Recorder(claim=claim, num_steps=5)


def test_a_claim_and_its_numbers_are_not_both_passed_to_an_audit():
    read = ReadClaim(lambda: DPSGDParams(noise_multiplier=1.0, sample_rate=0.1, delta=1e-5))
    recorder = Recorder(claim=read, num_steps=1)
    recorder.record([0.0, 1.0], [False, True])
    with pytest.raises(dpaudit.InputError, match=r"Pass either claim=\.\.\. or its numbers, not both"):
        recorder.audit(claim=CLAIM, delta=1e-2)
    whole = Recorder(claim=CLAIM, num_steps=1)
    whole.record([0.0, 1.0], [False, True])
    with pytest.raises(dpaudit.InputError, match=r"noise_multiplier cannot be passed, because this"):
        whole.audit(noise_multiplier=2.0)


def test_an_epsilon_beside_a_whole_claim_is_compared_with_it():
    for recorder in (recorder_of(40, 8, 1.0, seed=0), whole_run(40)):
        result = recorder.audit(epsilon=0.1)
        assert [finding.name for finding in result.findings] == ["claimed-epsilon"]
        assert recorder.audit(claim=result.claim, epsilon=0.1).findings == result.findings
        with pytest.raises(dpaudit.InputError, match=r"target_epsilon=2\.0 alone does not determine"):
            recorder.audit(target_epsilon=2.0)


COUNTING = [dpaudit.ClopperPearson(), dpaudit.JointExact(), dpaudit.Posterior(), dpaudit.KatzLog()]


@pytest.mark.parametrize("inference", COUNTING, ids=repr)
def test_coupled_scores_are_not_counted_as_independent(inference):
    recorder = recorder_of(50, 8, 1.0, seed=0, coupled=True)
    with pytest.raises(
        dpaudit.InputError,
        match=r"inference must be Betting\(\) .* which other canaries were present.*; \w+\(\) assumes",
    ):
        recorder.audit(inference=inference)
    assert recorder.audit(inference=dpaudit.Betting()).bound.epsilon == recorder.audit().bound.epsilon
    assert recorder.observations.num_steps == 50


def test_one_score_a_step_is_coupled_with_none():
    recorder = recorder_of(200, 1, 1.0, seed=0, coupled=True)
    assert "JointExact" in recorder.audit(inference=dpaudit.JointExact()).bound.method


def test_the_live_bound_never_falls_and_ends_near_the_truth():
    seen = []
    recorder_of(1000, 128, 1.0, seed=1, callbacks=[seen.append])
    assert [live.num_done for live in seen] == list(range(10, 1001, 10))
    assert (np.diff([live.epsilon for live in seen]) > -1e-6).all()
    assert seen[-1].epsilon > 0.93 * CLAIM.epsilon
    assert not any(live.is_violation for live in seen)


def test_a_leak_is_flagged_early_and_the_stopped_run_keeps_its_verdict():
    class FoundError(Exception):
        pass

    def stop(live):
        if live.is_violation:
            raise FoundError

    rng = np.random.default_rng(0)
    recorder = dpaudit.Recorder(claim=CLAIM, num_steps=1000, callbacks=[stop])

    def train():
        for _ in range(1000):
            present = rng.random(64) < 0.5
            recorder.record(present + 0.7 * rng.standard_normal(64), present)

    with pytest.raises(FoundError):
        train()
    assert recorder.num_done < 500
    result = recorder.audit()
    assert result.verdict is dpaudit.Verdict.VIOLATION
    assert result.bound.method == "Betting(horizon=1000, expected=1.0)"


def test_the_curve_is_what_the_live_bound_was():
    seen = []
    recorder = recorder_of(200, 16, 1.0, seed=2, every=20, callbacks=[seen.append])
    assert recorder.curve() == seen
    assert recorder.curve([40, 200]) == [seen[1], seen[-1]]
    assert recorder.curve([200])[0] == recorder.live()


def test_no_point_of_the_curve_of_a_correct_mechanism_is_a_violation_in_95_percent_of_runs():
    flagged = sum(
        any(bound.is_violation for bound in recorder_of(60, 8, 1.0, seed, every=1).curve())
        for seed in range(300, 400)
    )
    assert flagged <= most_flagged(100)


@pytest.mark.parametrize(
    ("count", "sentence"),
    [
        (0, "num_steps must be at least 1, got 0"),
        (21, "num_steps must be at most 20, the number of recorded steps, got 21"),
        (1.5, r"num_steps must be a whole number, got 1\.5"),
    ],
)
def test_a_curve_of_steps_that_were_not_made_gets_a_sentence(count, sentence):
    with pytest.raises(dpaudit.InputError, match=sentence):
        recorder_of(20, 4, 1.0, seed=0).curve([count])


def pairs(num_steps, seed=0, **options):
    rng = np.random.default_rng(seed)
    recorder = dpaudit.Recorder(claim=CLAIM, num_steps=100, **options, scorer=PerStep(paired=True))
    for _ in range(num_steps):
        recorder.record([rng.standard_normal(), 1 + rng.standard_normal()], [False, True])
    return recorder


@pytest.mark.parametrize("num_steps", [99, 100])
def test_the_verdict_on_pairs_rests_on_the_bets_behind_their_live_bound(num_steps):
    """Counting them as well would be a second test, and would assume independent steps."""
    recorder = pairs(num_steps)
    assert recorder.observations.with_canary.shape == (num_steps, 1)
    result = recorder.audit()
    assert isinstance(result.bound.inference, dpaudit.Betting)
    assert result.bound.epsilon == recorder.live().epsilon
    assert recorder.audit(inference=dpaudit.Betting()).bound == result.bound


def test_a_recorder_keeps_copies():
    recorder = dpaudit.Recorder(claim=CLAIM, num_steps=2)
    scores, present = np.zeros(2), np.asarray([True, False])
    recorder.record(scores, present)
    scores[:], present[:] = 9.0, [False, True]
    recorder.record(scores, present)
    np.testing.assert_array_equal(recorder.state_dict()["scores"], [[0, 0], [9, 9]])
    np.testing.assert_array_equal(recorder.state_dict()["present"], [[True, False], [False, True]])


@pytest.mark.parametrize(
    ("scores", "present", "sentence"),
    [
        (
            [0.1, np.nan],
            [True, False],
            r"Scores must be finite, got scores\[1\]=nan in step 1\. Did training diverge\?",
        ),
        (
            [0.1, 0.2, 0.3],
            [True, False, True],
            "Step 1 needs a score and a presence flag for each of 2 canaries, got shapes",
        ),
        ([0.1, 0.2], [True], r"shapes \(2,\) and \(1,\)"),
        ([0.1, 0.2], [0.7, 1.0], "present must contain only 0 and 1, or False and True"),
        ([0.1, 0.2], ["no", "yes"], "present must be numbers, got an array of type <U3"),
        (
            [0.1, 0.2],
            np.ma.masked_array([0, 1], [0, 1]),
            r"present must not be a masked array; pass present\.compressed\(\), the values",
        ),
    ],
)
def test_a_step_that_cannot_be_recorded_gets_a_sentence_and_leaves_the_rest(scores, present, sentence):
    recorder = dpaudit.Recorder(claim=CLAIM, num_steps=10)
    recorder.record([0.5, 1.0], [False, True])
    with pytest.raises(dpaudit.InputError, match=sentence):
        recorder.record(scores, present)
    assert recorder.num_done == 1


def test_presence_may_be_numbers_0_and_1_everywhere():
    flags, scores = np.asarray([False, True, True, False]), np.asarray([0.2, 1.1, 0.7, -0.3])
    for present in (flags, flags.astype(np.int64), flags.astype(float)):
        recorder = dpaudit.Recorder(claim=CLAIM, num_steps=10)
        recorder.record(scores, present)
        assert recorder.state_dict()["present"].tolist() == [flags.tolist()]
        whole = Recorder(
            claim=dpaudit.Claim.dpsgd(noise_multiplier=1.0, sample_rate=0.5, num_steps=1, delta=1e-5),
            num_steps=1,
            scorer=WholeRun(present),
        )
        assert whole.state_dict()["present"].tolist() == flags.tolist()
        whole.record(scores)
        assert whole.observations.with_canary.size == 2
    with pytest.raises(dpaudit.InputError, match="present must contain only 0 and 1, or False and True"):
        Recorder(
            claim=dpaudit.Claim.dpsgd(noise_multiplier=1.0, sample_rate=0.5, num_steps=1, delta=1e-5),
            num_steps=1,
            scorer=WholeRun(2 * flags),
        )


def test_a_recorder_without_a_step_says_so():
    recorder = dpaudit.Recorder(claim=CLAIM, num_steps=10)
    assert recorder.live().epsilon == 0
    with pytest.raises(dpaudit.InputError, match=r"No step was recorded\. Did training run\?"):
        recorder.audit()


def whole_run(num_canaries, *, num_steps=50, rate=0.1, noise=0.8, seed=0, factor=1.0):
    rng = np.random.default_rng(seed)
    present = rng.random(num_canaries) < 0.5
    recorder = Recorder(
        claim=dpaudit.Claim.dpsgd(noise_multiplier=noise, sample_rate=rate, num_steps=num_steps, delta=1e-5),
        num_steps=num_steps,
        scorer=WholeRun(present),
    )
    for _ in range(num_steps):
        is_in = present & (rng.random(num_canaries) < rate)
        recorder.record(is_in + factor * noise * rng.standard_normal(num_canaries))
    return recorder


def test_a_whole_run_is_not_resumed_with_other_canaries_in_its_data():
    recorder, other = whole_run(40), whole_run(40, seed=1)
    with pytest.raises(
        dpaudit.InputError, match="The state is of a run with other canaries in its data; pass the same seed"
    ):
        other.load_state_dict(recorder.state_dict())
    recorder.load_state_dict(recorder.state_dict())


def test_log_likelihood_ratios_are_those_of_the_whole_run():
    scores = np.asarray([[0.3, 1.2], [-0.4, 2.0]])
    recorder = Recorder(
        claim=dpaudit.Claim.dpsgd(noise_multiplier=0.7, sample_rate=0.2, num_steps=2, delta=1e-5),
        num_steps=2,
        scorer=WholeRun(np.asarray([True, False])),
    )
    for row in scores:
        recorder.record(row)
    density = lambda x, mean: np.exp(-((x - mean) ** 2) / (2 * 0.7**2))  # noqa: E731
    ratio = np.prod(0.8 + 0.2 * density(scores, 1) / density(scores, 0), axis=0)
    observed = recorder.observations
    np.testing.assert_allclose([observed.with_canary[0], observed.without_canary[0]], np.log(ratio))


@pytest.mark.long
def test_correct_whole_runs_are_flagged_in_at_most_5_percent(is_long):
    seeds = range(200 if is_long else 40)
    flagged = sum(whole_run(1000, seed=seed).audit().verdict is dpaudit.Verdict.VIOLATION for seed in seeds)
    assert flagged <= most_flagged(len(seeds))


@pytest.mark.long
def test_whole_runs_are_judged_by_the_curve_of_the_whole_training():
    assert whole_run(4000, seed=1).audit(confidence=1 - LEVEL).verdict is dpaudit.Verdict.NO_VIOLATION
    broken = whole_run(4000, seed=1, factor=0.75).audit()
    assert broken.verdict is dpaudit.Verdict.VIOLATION
    assert broken.bound.tradeoff == dpaudit.SubsampledGaussian(0.1, 50)


@pytest.mark.parametrize("factor", [0.0, 0.25, 0.5])
@pytest.mark.long
def test_noise_that_is_missing_does_not_hide_a_whole_run(factor):
    """All ratios are then below the one where present and absent are equally likely."""
    recorder = whole_run(2000, factor=factor, noise=0.5, rate=0.04)
    assert recorder.audit(threshold=dpaudit.Fixed(0.0)).verdict is dpaudit.Verdict.NO_VIOLATION
    result = recorder.audit()
    assert result.verdict is dpaudit.Verdict.VIOLATION
    assert result.bound.confidence == 0.95
    assert "the better of Fixed(threshold=0.0) with 0.8 of the error and Simultaneous" in result.bound.rule


def test_the_bound_without_independence_is_below_the_one_with_it():
    recorder = whole_run(2000)
    assert 0 < recorder.one_run_bound().epsilon < recorder.audit().bound.epsilon


def test_scores_of_steps_and_of_whole_runs_have_bounds_of_their_own():
    with pytest.raises(
        dpaudit.InputError, match="These are scores of single steps, not one score per canary for the whole"
    ):
        recorder_of(5, 8, 1.0, seed=0).one_run_bound()
    whole = whole_run(40, num_steps=5)
    for show in (whole.live, whole.curve, whole.trajectory):
        with pytest.raises(dpaudit.InputError, match=r"[Tt]here is no bound before the last step"):
            show()
    assert "bound so far" not in whole._repr_html_()
    assert whole.curve([]) == []
    state = whole.state_dict()
    assert (state["shown"], state["looked"]) == (False, False)


def test_another_inference_on_whole_runs_counts_at_the_threshold_of_the_claim():
    result = whole_run(40, num_steps=5).audit(inference=dpaudit.ClopperPearson())
    assert result.bound.threshold_rule == dpaudit.Fixed(0.0)


@pytest.mark.parametrize("recorder", [recorder_of(5, 8, 1.0, seed=0), whole_run(8, num_steps=5)], ids=type)
def test_a_recorder_of_scores_alone_has_no_noise_to_test(recorder):
    assert not recorder.tests_noise
    with pytest.raises(
        UntestedError, match=r"This recorder has no noise to test: only those of observers log it\. Pass"
    ):
        recorder.diagnose()


def test_a_claim_that_is_not_of_gaussian_noise_leaves_nothing_to_test():
    claim = dpaudit.Claim.approximate_dp(epsilon=1.0, delta=1e-5)
    recorder = dpaudit.Recorder(claim=claim, num_steps=3, checks=[NoiseCheck()])
    with pytest.raises(
        UntestedError, match=r"against a claim about Gaussian noise, got \(epsilon, delta\)-DP: epsilon = 1 "
    ):
        recorder.diagnose(noise_multiplier=1.0)


def test_a_run_of_no_planned_length_waits_for_its_steps_before_it_is_read():
    started = []

    def finish():
        while started:
            recorder.record(*started.pop())

    recorder = dpaudit.Recorder(claim=CLAIM, num_steps=None, synchronize=finish)
    started.append(([0.0, 1.0], [False, True]))
    assert recorder.num_done == 1
    started.append(([0.5, 1.0], [False, True]))
    assert len(recorder.state_dict()["scores"]) == 2
    started.append(([0.5, 1.5], [False, True]))
    assert recorder.audit().bound.method == "Betting(expected=1.0)"
    assert recorder.observations.num_steps == 3
