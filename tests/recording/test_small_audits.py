"""Small audits: what their scores, claims and canaries imply is in the results."""

import copy
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

import dpaudit
from dpaudit.canaries import CanaryPlan, ParameterLayout
from dpaudit.diagnostics import NoiseCheck, ObservedStep
from dpaudit.recording import DPSGDParams, ObservedCanaries, PerStep, ReadClaim, Recorder, WholeRun
from dpaudit.recording._claim_source import TrainingInfo, UntestedError
from dpaudit.recording._joint_verdict import ScoreSummary
from dpaudit.recording._score_log import MissingCanaryError

CLAIM = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5)
READ = DPSGDParams(noise_multiplier=0.8, sample_rate=1.0, num_steps=4, delta=1e-5)
LAYOUT = ParameterLayout(("fc1.weight", "fc1.bias", "fc2.weight"), ((12, 20), (300,), (3, 24)))
OWNERS = np.repeat(np.arange(3), LAYOUT.sizes)
ROWS = np.repeat(np.arange(16), [20] * 12 + [300] + [24] * 3)


def per_group(groups):
    """Clip each group of coordinates on its own."""

    def clip(rows):
        norms = np.stack([np.linalg.norm(rows * (groups == group), axis=1) for group in np.unique(groups)], 1)
        return rows / np.maximum(1.0, norms[:, groups])

    return clip


def mixture(clip=None, *, num_steps=192, noise=lambda _: 1.0, reach=1.0, scale=np.ones_like):
    """Record canaries of all shapes and lengths, clipped like this, among 100 to 300 other rows."""
    plan = CanaryPlan(dpaudit.Mixture(), 64, 0)
    plans = [plan.directions(index, LAYOUT) for index in range(12)]
    clip = clip or per_group(np.zeros(OWNERS.size, int))
    arriving = [clip(each.lengths[:, None] * each.dense()) @ each.dense().T for each in plans]
    rng = np.random.default_rng(0)
    others = rng.integers(100, 300, num_steps)
    of_step, num_others = lambda index: plans[index % 12], others.__getitem__
    observed = ObservedCanaries(plan.canary, of_step, lambda: LAYOUT, reach=reach, num_others=num_others)
    scorer, facts = PerStep(canaries=observed, signal=1.0), TrainingInfo(canary=plan.canary)
    recorder = Recorder(claim=CLAIM, num_steps=num_steps, scorer=scorer, facts=lambda: facts)
    for index in range(num_steps):
        present = plan.coins(index)
        total = scale(others[index] + present.sum()) * (present @ arriving[index % 12])
        drawn = noise(present) / reach * rng.standard_normal(64)
        recorder.observe(ObservedStep(scores=total + drawn, present=present))
    return recorder


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, None),
        ({"reach": 0.5}, None),
        ({"noise": np.any}, "the noise of steps without canaries is 0 of the noise of the other steps"),
        ({"noise": lambda present: present.sum() > 3}, "the noise of steps"),
        ({"clip": per_group(OWNERS)}, "each parameter is clipped separately"),
        ({"clip": per_group(ROWS)}, "each row of a parameter is clipped separately"),
        ({"scale": lambda rows: 232 / rows}, "is the sum divided by the number of examples"),
    ],
)
def test_what_arrives_of_canaries_is_compared_with_what_was_inserted(options, sentence):
    recorder = mixture(**options)
    for run in (recorder, copy.deepcopy(recorder)):  # a copy outlives the training run
        result = run.audit()
        assert len(result.findings) == (sentence is not None)
        assert not sentence or sentence in f"{result.findings[0]} {result.findings[0].cause}"
        assert not any("signal" in name for name in result.clues)  # the tests know more
        assert result.bound.inference.horizon == 168
    scores = recorder.observations  # without short canaries, and without steps that have no others
    assert scores.with_canary.size + scores.without_canary.size == 168 * 61


def test_a_claim_is_not_accepted_because_of_canaries_that_do_not_count():
    recorder = mixture(lambda rows: rows * (np.linalg.norm(rows, axis=1, keepdims=True) < 1), num_steps=640)
    with pytest.raises(MissingCanaryError, match="Scores must increase by 1 where a canary"):
        recorder.audit()


def test_a_trajectory_consists_of_the_bounds_up_to_each_step_with_an_estimate_between_its_ends():
    recorder = mixture()
    points = recorder.trajectory().points
    assert len(points) == 60
    assert [points[0].num_done, points[-1].num_done] == [1, 191]  # the last step that counts
    bounds = recorder.curve([point.num_done for point in points])
    assert [point.epsilon for point in points] == [bound.epsilon for bound in bounds]
    assert all(point.epsilon <= point.estimate <= point.upper for point in points)
    scores = recorder.observations
    wrong = ((scores.with_canary < 0.5).mean() + (scores.without_canary >= 0.5).mean()) / 2
    epsilon = CLAIM.hypothesis(None).epsilon(-2 * stats.norm.ppf(wrong))
    assert points[-1].estimate == pytest.approx(epsilon, rel=0.02)
    assert points[-1].upper == pytest.approx(4.604, rel=1e-3)


def pattern(num_steps=60, signal=1.0, crowd=0.0, noise=0.5):
    """Return steps with 16 or 48 of 64 canaries, once with 0, 1 and 64, and noise of exactly this level."""
    rng, sizes = np.random.default_rng(0), [0, 1, 64] + [16, 48] * (num_steps // 2) + [16] * (num_steps % 2)
    present = np.stack([rng.permutation(64) < size for size in sizes])
    signs = rng.permuted(np.tile([-1.0, 1.0], (len(sizes), 32)), axis=1)
    return present * (signal + crowd * (present.sum(axis=1, keepdims=True) / 32 - 1)) + noise * signs, present


LONG = np.where(np.arange(64) < 32, 9.0, 1.0)
FULL = {"signal", "is_crowded", "canary_scale", "batch_size", "max_grad_norm"}
HALF = {"noise_ratio": 0.5, "interval": (0.475, 0.527), "noise_multiplier": 1.0, "is_crowded": False}
TENTH = HALF | {"noise_ratio": 0.1, "interval": (0.093, 0.108)}


@pytest.mark.parametrize(
    ("options", "canary", "clues"),
    [
        ({}, dpaudit.Dirac(), HALF | {"signal": 0.991, "canary_scale": 10.0}),
        ({"noise": 0.0}, dpaudit.Dirac(), {"noise_ratio": 0.0}),
        ({"noise": 0.98}, dpaudit.Dirac(), {"noise_multiplier": 1.0}),  # the interval includes the claim
        ({"crowd": 0.25}, dpaudit.Dirac(), HALF | {"is_crowded": True}),
        ({"crowd": 0.15}, dpaudit.Dirac(), HALF),
        ({"crowd": 0.25, "noise": 0.1, "num_steps": 29}, dpaudit.Dirac(), TENTH | {"is_crowded": True}),
        ({"crowd": 0.25, "noise": 0.1, "num_steps": 28}, dpaudit.Dirac(), TENTH),  # too few steps
        ({"signal": LONG}, dpaudit.Constant(), HALF | {"signal": 4.951}),
        ({"signal": LONG}, dpaudit.Mixture(), HALF | {"signal": 5.147}),  # 5 with the short ones at the end
    ],
)
def test_clues_are_what_the_scores_show_of_noise_and_signal(options, canary, clues):
    facts = TrainingInfo(canary=canary, max_grad_norm=2.0, batch_size=50.0)
    shown = ScoreSummary.of(*pattern(**options), facts).known(1.0)
    assert set(shown) == FULL | set(clues)
    clues = {"max_grad_norm": 2.0, "batch_size": 50.0} | clues
    assert {name: shown[name] for name in clues} == {
        name: pytest.approx(clue, abs=0.005) for name, clue in clues.items()
    }


def whole(num_steps=4, *, num_canaries=100, reach=1.0, is_drawn=True, size=1.0, rate=None):
    """Record a whole run whose canaries are in every batch."""
    rng = np.random.default_rng(0)
    present = rng.random(num_canaries) < 0.5
    claim = ReadClaim(lambda: READ, DPSGDParams(sample_rate=rate))
    recorder = Recorder(claim=claim, num_steps=4, scorer=WholeRun(present, signal=1.0, reach=reach))
    for _ in range(num_steps):
        drawn = present & is_drawn
        recorder.record(size * drawn + 0.8 / reach * rng.standard_normal(num_canaries), drawn)
    return recorder


def test_bound_and_power_of_a_whole_run_are_those_of_its_canaries():
    recorders = [whole(), whole(reach=0.5)]
    results = [recorder.audit() for recorder in recorders]
    assert [result.bound.parameter for result in results] == pytest.approx([1.031, 0.621], rel=1e-3)
    assert [result.power.parameter for result in results] == pytest.approx([1.822, 3.640], rel=1e-3)
    for recorder, result in zip(recorders, results, strict=True):
        resumed = whole(0)
        resumed.load_state_dict(recorder.state_dict())
        for other in (copy.deepcopy(recorder), resumed):
            assert other.num_done == 4
            assert other.audit().bound == result.bound
    with pytest.raises(dpaudit.InputError, match="pass num_canaries=100"):
        whole(0, num_canaries=99).load_state_dict(recorders[0].state_dict())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"size": -0.2}, "Scores must increase by 1 where a canary is present"),
        ({"is_drawn": False}, "The sampler drew no canary, instead of about 176: it does not draw from all"),
        ({"num_steps": 3}, "The whole run can be audited only after all 4 steps, got 3"),
    ],
)
def test_a_whole_run_without_its_canaries_has_no_verdict(options, sentence):
    with pytest.raises(dpaudit.InputError, match=sentence):
        whole(**options).audit()


@pytest.mark.parametrize(("rate", "is_remark"), [(0.5, True), (0.982, True), (0.999, False)])
def test_only_scores_of_single_steps_leave_a_wrong_sample_rate_to_the_reader(rate, is_remark):
    recorder = Recorder(claim=ReadClaim(lambda: READ, DPSGDParams(sample_rate=rate)), num_steps=4)
    for index in range(4):
        recorder.record([0.0, 1.0], [index % 2, 1])
    remark = f"the claimed sample_rate={rate} differs from the 1 of the training run"
    assert recorder.audit().not_covered[0].startswith(remark) == is_remark
    recorder.record([0.0, 1.0], [0, 0])
    with pytest.raises(
        dpaudit.InputError, match="Training ran for 5 steps, but the claim covers num_steps=4: a longer run"
    ):
        recorder.audit()
    longer = whole(5, rate=rate).audit()  # whose scores show the fifth step
    assert not any("sample_rate" in gap for gap in longer.not_covered)


@pytest.mark.parametrize("scores", [[0.0, np.nan], [0.0]])
def test_a_step_of_a_whole_run_has_a_finite_score_of_each_canary(scores):
    with pytest.raises(dpaudit.InputError, match="Step 0 needs 2 finite scores, got shape"):
        whole(0, num_canaries=2).record(scores)


def test_the_power_is_that_of_canaries_with_their_lengths():
    recorder = Recorder(claim=CLAIM, num_steps=4, scorer=PerStep(signal=0.5, reach=0.5))
    for index in range(4):
        recorder.record([0.0, 1.0], [index % 2, 1], lengths=np.array([0.25, 1.5]))
    assert recorder.audit().design.lengths == (0.0625,) * 50 + (0.25,) * 50  # none is above 1


def test_a_run_that_showed_its_bound_has_no_tests_until_its_planned_end():
    seen = []
    recorder = Recorder(claim=CLAIM, num_steps=None, callbacks=[seen.append], checks=[NoiseCheck()])
    rng = np.random.default_rng(0)
    for index in range(120):
        assert ("not shown yet" in recorder._repr_html_()) == (index < 50)
        drawn, present = rng.standard_normal(8), rng.random(8) < 0.5
        release = ObservedStep.of_release(drawn, np.zeros(8), leaves=(8,))
        recorder.observe(replace(release, scores=drawn + present, present=present))
        if index == 48:
            assert recorder.diagnose().findings == ()
    assert [live.num_done for live in seen] == [50, 100]
    with pytest.raises(UntestedError, match="after a run of unplanned length a bound was shown"):
        recorder.diagnose()


def test_scores_that_do_not_fit_into_memory_are_refused_before_the_first_step():
    with pytest.raises(dpaudit.InputError, match=r"need about 1\.8e\+07 GB"):
        Recorder(claim=CLAIM, num_steps=10**9, scorer=PerStep(num_canaries=10**6))
