"""Going through all thresholds cleverly finds what going through each of them finds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dpaudit
from dpaudit.stats.inference._classical import upper_rate, upper_rate_chords

DELTA = 1e-3
METHODS = [
    (dpaudit.Gaussian(), dpaudit.ClopperPearson()),
    (dpaudit.ApproximateDP(), dpaudit.ClopperPearson()),
    (dpaudit.Laplace(), dpaudit.ClopperPearson()),
    (dpaudit.PureDP(), dpaudit.KatzLog()),
]
# Few different values, so that most scores are tied with others of both sides.
TIED = st.lists(st.integers(0, 6).map(float), min_size=1, max_size=40)
UNTIED = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40)
SIDES = st.tuples(TIED, TIED) | st.tuples(UNTIED, UNTIED) | st.tuples(TIED, UNTIED)


def observed(present, absent):
    return dpaudit.Observations(with_canary=present, without_canary=absent)


def gaussian_sides(mu, size, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(mu, 1, size), rng.normal(0, 1, size)


def bound(observations, method, rule, confidence=0.95):
    tradeoff, inference = method
    delta = 0.0 if isinstance(inference, dpaudit.KatzLog) else DELTA
    return dpaudit.lower_bound(
        observations,
        delta=delta,
        confidence=confidence,
        tradeoff=tradeoff,
        inference=inference,
        threshold=rule,
    )


def best_of_all_thresholds(observations, method, confidence=0.95):
    """The slow way: a bound at every score, between scores, and outside of them."""
    scores = np.unique(np.concatenate([observations.with_canary, observations.without_canary]))
    between = (scores[:-1] + scores[1:]) / 2
    thresholds = np.asarray([scores[0] - 1, *scores, *between, scores[-1] + 1])
    if isinstance(method[1], dpaudit.KatzLog):
        # Katz's interval gets better with an error more where there are none; only at absent scores, then.
        thresholds = np.unique(observations.without_canary)
    fixed = [dpaudit.Fixed(float(threshold)) for threshold in thresholds]
    return max(bound(observations, method, rule, confidence).parameter for rule in fixed)


@pytest.mark.parametrize("method", METHODS, ids=repr)
@given(sides=SIDES, confidence=st.sampled_from([0.5, 0.8, 0.95, 0.999]))
def test_the_scan_finds_the_best_threshold(method, sides, confidence):
    observations = observed(*sides)
    found = bound(observations, method, dpaudit.SameData(), confidence)
    assert found.parameter == best_of_all_thresholds(observations, method, confidence)


@pytest.mark.few(8)
@pytest.mark.parametrize("mu", [-1.0, 0.0, 0.39, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_the_scan_finds_the_best_of_many_thresholds(method, mu):
    present, absent = gaussian_sides(mu, 700)
    observations = observed(present[:500], absent)
    found = bound(observations, method, dpaudit.SameData())
    assert found.parameter == best_of_all_thresholds(observations, method)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_the_scan_finds_the_best_of_many_tied_thresholds(method):
    observations = observed(*(np.round(side, 1) for side in gaussian_sides(1.0, 3000)))
    found = bound(observations, method, dpaudit.SameData())
    assert found.parameter == best_of_all_thresholds(observations, method)


def test_the_scan_reports_the_threshold_and_counts_of_its_bound():
    observations = observed(*gaussian_sides(1.0, 1000))
    found = bound(observations, METHODS[0], dpaudit.SameData())
    again = bound(observations, METHODS[0], dpaudit.Fixed(found.threshold))
    assert (again.parameter, again.counts) == (found.parameter, found.counts)


def test_the_scan_of_files_is_the_scan_of_their_scores(tmp_path):
    sides = [np.float32(side) for side in gaussian_sides(1.0, 5000)]
    files = [tmp_path / "present.npy", tmp_path / "absent.npy"]
    for path, side in zip(files, sides, strict=True):
        np.save(path, side)
    mapped = observed(*(np.load(path, mmap_mode="r") for path in files))
    for rule in (dpaudit.SameData(), dpaudit.Simultaneous()):
        assert bound(mapped, METHODS[0], rule) == bound(observed(*sides), METHODS[0], rule)


@pytest.mark.parametrize("error", [1e-9, 0.025, 0.25])
@pytest.mark.parametrize("trials", [1, 7, 256, 513, 3000, 100_000])
def test_chords_are_close_below_the_upper_end(trials, error):
    errors = np.unique(np.linspace(0, trials, 3001).astype(np.int64))
    exact, chords = upper_rate(errors, trials, error), upper_rate_chords(errors, trials, error)
    assert (chords <= exact * (1 + 1e-13)).all()
    assert (chords >= exact * (1 - 2e-5)).all()


@pytest.mark.parametrize("tradeoff", [dpaudit.Gaussian(), dpaudit.ApproximateDP()], ids=repr)
@pytest.mark.parametrize("mu", [0.0, 0.1, 0.39, 1.0, 3.0])
def test_the_scan_computes_few_bounds(tradeoff, mu, monkeypatch):
    computed = []
    rank = dpaudit.ClopperPearson.rank

    def counting(self, false_positives, *rest):
        computed.append(np.size(false_positives))
        return rank(self, false_positives, *rest)

    monkeypatch.setattr(dpaudit.ClopperPearson, "rank", counting)
    observations = observed(*gaussian_sides(mu, 100_000))
    bound(observations, (tradeoff, dpaudit.ClopperPearson()), dpaudit.SameData())
    assert sum(computed) < 1000
