"""The fast part of `make soundness`: no confidence method exceeds the truth more often than it says."""

import numpy as np
import pytest
from scipy import special
from score_samples import bound, gaussian_claim
from simulated_coverage import Coverage, coverage, ideal_observations, tally
from statistical_limits import covers, room, share_room

import dpaudit
from dpaudit.recording import PerStep, Recorder

QUICK = [
    (dpaudit.ClopperPearson(), dpaudit.Fixed(0.5), 300),
    (dpaudit.ClopperPearson(), dpaudit.Simultaneous(), 300),
    (dpaudit.ClopperPearson(), dpaudit.HeldOut(), 300),
    (dpaudit.JointExact(), dpaudit.Fixed(0.5), 120),
    (dpaudit.JointExact(), dpaudit.HeldOut(0.1), 80),
    (dpaudit.Betting(), dpaudit.Fixed(0.5), 120),
    (dpaudit.Betting(), dpaudit.Predictable(), 100),
]
quick = pytest.mark.parametrize(("inference", "rule", "repetitions"), QUICK, ids=str)


@pytest.mark.few(5)
@quick
@pytest.mark.parametrize("mu", [0.39, *(pytest.param(mu, marks=pytest.mark.long) for mu in (0.0, 3.0))])
@pytest.mark.parametrize("size", [50, 500])
def test_confidence_bounds_cover(inference, rule, repetitions, mu, size):
    found = coverage(
        tradeoff=dpaudit.Gaussian(),
        parameter=mu,
        size=size,
        inference=inference,
        threshold=rule,
        repetitions=repetitions,
        seed=7,
    )
    assert covers(found), found


@pytest.mark.few(6)
@quick
@pytest.mark.parametrize("size", [50, 1000, pytest.param(5000, marks=pytest.mark.long)])
def test_identical_distributions_leak_nothing_in_95_of_100_audits(inference, rule, repetitions, size):
    def once(rng):
        observations = dpaudit.Observations(
            with_canary=rng.normal(size=size), without_canary=rng.normal(size=size)
        )
        return dpaudit.lower_bound(
            observations, delta=1e-5, tradeoff=dpaudit.Gaussian(), inference=inference, threshold=rule
        ).epsilon

    assert covers(tally(once, 0.0, repetitions=min(repetitions, 100), seed=size))


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "family",
    [
        dpaudit.Laplace(),
        dpaudit.ApproximateDP(),
        dpaudit.RandomizedResponse(4),
        dpaudit.PiecewiseLinear((0.0, 0.5, 2.0), (0.3, 0.1, 1e-5)),
    ],
    ids=repr,
)
@pytest.mark.parametrize(
    ("inference", "rule"),
    [
        (dpaudit.JointExact(), dpaudit.Fixed(0.5)),
        (dpaudit.Betting(), dpaudit.Fixed(0.5)),
        (dpaudit.ClopperPearson(), dpaudit.Simultaneous()),
    ],
    ids=str,
)
def test_other_families_cover_too(family, inference, rule):
    found = coverage(
        tradeoff=family,
        parameter=1.0,
        size=200,
        inference=inference,
        threshold=rule,
        delta=0.01,
        repetitions=120,
        seed=11,
    )
    assert covers(found), found
    assert found.mean_ratio > 0.1


def test_betting_covers_when_the_canaries_of_a_step_are_one_and_the_same():
    """The worst dependence: pooled counts would believe 64 times the observations there are."""

    def once(inference):
        def copied(rng):
            one = ideal_observations(dpaudit.Gaussian(), 1.0, (60, 1), (60, 1), rng)
            copies = dpaudit.Observations(
                with_canary=np.repeat(one.with_canary, 64, axis=1),
                without_canary=np.repeat(one.without_canary, 64, axis=1),
            )
            return bound(copies, inference, dpaudit.Fixed(0.5)).parameter

        return copied

    assert covers(tally(once(dpaudit.Betting()), 1.0, 300, seed=1))
    assert not covers(tally(once(dpaudit.ClopperPearson()), 1.0, 100, seed=1))


def test_coins_cover():
    def once(rng):
        present = rng.random((80, 32)) < 0.5
        scores = rng.normal(size=(80, 32)) + present
        observations = dpaudit.Observations.from_presence(scores, present)
        return bound(observations, dpaudit.Betting(), dpaudit.Fixed(0.5)).parameter

    found = tally(once, 1.0, 300, seed=2)
    assert covers(found)
    assert found.mean_ratio > 0.8


def test_betting_may_be_looked_at_after_every_step():
    """Stopping as soon as the truth is refuted happens in at most 5 % of runs, not in more."""

    def ever_refuted(rng):
        observations = ideal_observations(dpaudit.Gaussian(), 1.0, (100, 4), (100, 4), rng)
        bounds = [
            bound(
                dpaudit.Observations(
                    with_canary=observations.with_canary[:steps],
                    without_canary=observations.without_canary[:steps],
                ),
                dpaudit.Betting(horizon=100),
                dpaudit.Fixed(0.5),
            ).parameter
            for steps in (20, 40, 60, 80, 100)
        ]
        return max(bounds)

    assert covers(tally(ever_refuted, 1.0, 100, seed=5))


def same_distance(rng, present, mu):
    """Return Gaussian scores that are equally far from the threshold within a step."""
    distance = np.abs(rng.normal(size=(len(present), 1)) + mu / 2)
    is_right = rng.random(present.shape) < special.expit(mu * distance)
    return 0.5 + np.where(is_right == present, 1.0, -1.0) * distance / mu


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("planned", "steps"),
    [(20, 40), pytest.param(40, 40, marks=pytest.mark.long), pytest.param(None, 40, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("paired", [False, True])
def test_a_run_may_be_stopped_or_continued_because_of_its_live_bound(planned, steps, paired, is_long):
    """The live bounds and the verdict at the end are one test, also for a mechanism that reacts to them."""
    mu, canaries = 1.0, 2 if paired else 16

    def once(rng):
        recorder = Recorder(claim=gaussian_claim(mu), num_steps=planned, scorer=PerStep(paired=paired))
        is_bold = False
        for step in range(steps):
            present = np.asarray([[False, True]]) if paired else rng.random((1, canaries)) < 0.5
            scores = present + rng.normal(size=present.shape) / mu
            if is_bold and not paired:
                scores = same_distance(rng, present, mu)
            recorder.record(scores[0], present[0])
            if step % 5 == 4:
                live = recorder.live()
                if live.is_violation:
                    return 2 * mu
                is_bold = live.epsilon < 0.8 * live.claimed_epsilon
        return recorder.audit().bound.parameter

    assert covers(tally(once, mu, 400 if is_long else 60, seed=12))


def test_audits_may_be_repeated_on_growing_data(is_long):
    def once(rng):
        present = rng.random((60, 16)) < 0.5
        scores = present + rng.normal(size=present.shape)
        parts = (
            dpaudit.Observations.from_presence(scores[:count], present[:count], normalized=True)
            for count in ((10, 20, 30, 40, 50, 60) if is_long else (20, 40, 60))
        )
        return max(dpaudit.audit(part, claim=gaussian_claim(1.0)).bound.parameter for part in parts)

    assert covers(tally(once, 1.0, 400 if is_long else 60, seed=13))


@pytest.mark.parametrize(("mu", "normalized"), [(0.39, True), (3.0, False)])
def test_steps_that_are_certain_for_all_canaries_or_for_none_are_covered(mu, normalized, is_long):
    """Far scores come in whole steps, which the bets on tails must survive."""

    def once(rng):
        present = rng.random((60, 64)) < 0.5
        scores = same_distance(rng, present, mu)
        observations = dpaudit.Observations.from_presence(scores, present, normalized=normalized)
        return dpaudit.audit(observations, claim=gaussian_claim(mu)).bound.parameter

    assert covers(tally(once, mu, 400 if is_long else 60, seed=14))


@pytest.mark.parametrize("dimensions", [1, pytest.param(4, marks=pytest.mark.long)])
def test_canaries_that_overlap_are_covered(dimensions, is_long):
    """Other present canaries are subtracted, so scores share noise; canaries have different lengths."""
    mu, canaries = 1.0, 16

    def once(rng):
        recorder = Recorder(claim=gaussian_claim(mu), num_steps=40, scorer=PerStep(coupled=True))
        directions = rng.normal(size=(canaries, dimensions))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        lengths = np.where(rng.random(canaries) < 0.5, 0.5, 1.0)
        for present in rng.random((40, canaries)) < 0.5:
            noise = directions @ rng.normal(size=dimensions) / mu
            recorder.record(present + noise / lengths, present)
        return recorder.audit().bound.parameter

    assert covers(tally(once, mu, 400 if is_long else 60, seed=15))


def drifting(rng, size=400):
    """No leak, but both sides drift together: low fpr at one time, low fnr at another."""
    offset = np.linspace(1.5, -1.5, size)
    return dpaudit.Observations(
        with_canary=rng.normal(size=size) + offset, without_canary=rng.normal(size=size) + offset
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("rule", [dpaudit.Fixed(0.0), dpaudit.Predictable(), dpaudit.HeldOut(0.3)], ids=repr)
def test_betting_covers_when_scores_drift(rule):
    def once(rng):
        return bound(drifting(rng), dpaudit.Betting(), rule).parameter

    assert covers(tally(once, 0.0, 200, seed=9))


def test_betting_on_a_held_out_part_covers_when_later_steps_depend_on_earlier_ones():
    """Each score is fair given the past, but the future tells of the past."""

    def once(rng):
        noise = rng.normal(size=(2, 200))
        shift = np.concatenate([[0.0], np.cumsum(noise[0] - noise[1])[:-1]]) / 4
        observations = dpaudit.Observations(with_canary=noise[0] + shift, without_canary=noise[1] + shift)
        return bound(observations, dpaudit.Betting(), dpaudit.HeldOut(0.3)).parameter

    assert covers(tally(once, 0.0, 300, seed=10))


@pytest.mark.long
def test_the_papers_practice_exceeds_the_truth_far_more_often_than_it_says():
    found = coverage(
        tradeoff=dpaudit.Gaussian(),
        parameter=0.39,
        size=1000,
        inference=dpaudit.Posterior(),
        threshold=dpaudit.SameData(),
        repetitions=100,
    )
    assert not covers(found)


def test_coverage_counts_what_it_says():
    found = tally(lambda rng: float(rng.random()), 0.75, repetitions=2000, seed=0)
    assert found.exceeded == pytest.approx(0.25, abs=share_room(0.25, 2000, comparisons=2))
    error = 12**-0.5 / 2000**0.5
    assert found.mean_ratio == pytest.approx(0.5 / 0.75, abs=room(error / 0.75, comparisons=2))
    assert found.standard_error == pytest.approx((found.exceeded * (1 - found.exceeded) / 2000) ** 0.5)
    assert tally(lambda _: 0.0, 0.0, repetitions=10, seed=0).exceeded == 0


def test_coverage_is_sound_up_to_three_standard_errors_of_the_rate():
    share = 0.05 + 3 * (0.05 * 0.95 / 1000) ** 0.5
    for exceeded, is_sound in ((0.0, True), (share - 1e-6, True), (share + 1e-6, False), (0.25, False)):
        found = Coverage(repetitions=1000, exceeded=exceeded, mean_ratio=1.0)
        assert found.is_sound(0.95) is is_sound
