"""JointExact over all outcomes of small audits: monotone, symmetric, exact, and consistent with its power."""

import functools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats
from score_samples import counts

import dpaudit
from dpaudit.stats.inference import BoundQuery
from dpaudit.stats.inference._classical import Region
from dpaudit.stats.inference._joint_exact import ClaimedCurve

FAMILIES = [dpaudit.Gaussian(), dpaudit.ApproximateDP(1e-3), dpaudit.Laplace()]
TOLERANCE = 2e-4  # of the search, relative

settings = pytest.mark.parametrize(
    ("family", "error", "sizes"),
    [
        (dpaudit.Gaussian(), 0.05, (6, 6)),
        (dpaudit.Gaussian(), 0.05, (12, 9)),
        (dpaudit.Gaussian(), 0.2, (25, 10)),
        (dpaudit.ApproximateDP(1e-3), 0.05, (12, 9)),
        (dpaudit.ApproximateDP(1e-3), 0.2, (5, 16)),
        (dpaudit.Laplace(), 0.05, (5, 16)),
    ],
    ids=str,
)


def _bound(errors: dpaudit.ErrorCounts, family: dpaudit.TradeOff, error: float = 0.05) -> float:
    return dpaudit.JointExact().parameter(errors, BoundQuery(family, 1e-5, error))


@functools.cache
def _all_bounds(family: dpaudit.TradeOff, error: float, sizes: tuple[int, int]) -> np.ndarray:
    absent, present = sizes
    return np.asarray(
        [
            [_bound(counts(fp, absent, fn, present), family, error) for fn in range(present + 1)]
            for fp in range(absent + 1)
        ]
    )


@settings
def test_fewer_errors_never_lower_a_bound(family, error, sizes):
    bounds = _all_bounds(family, error, sizes)
    for axis in (0, 1):
        more, fewer = np.roll(bounds, -1, axis), bounds
        inside = [slice(None), slice(None)]
        inside[axis] = slice(None, -1)
        assert (more <= fewer * (1 + TOLERANCE) + 1e-6)[tuple(inside)].all()


@settings
def test_exchanging_the_sides_does_not_change_a_bound(family, error, sizes):
    exchanged = _all_bounds(family, error, sizes[::-1]).T
    np.testing.assert_array_equal(_all_bounds(family, error, sizes), exchanged)


@settings
def test_no_rates_on_the_curve_are_refuted_too_often(family, error, sizes):
    bounds = _all_bounds(family, error, sizes)
    finite = np.unique(bounds[np.isfinite(bounds) & (bounds > 0)])
    fpr = np.concatenate([np.linspace(0, 1, 401), np.geomspace(1e-6, 1e-2, 40)])
    first = stats.binom.pmf(np.arange(sizes[0] + 1), sizes[0], fpr[:, None])
    # just below a bound is where most outcomes refute
    for truth in [0.0, *(finite * (1 - 1e-9))]:
        fnr = np.asarray(family.fnr(truth, fpr))
        second = stats.binom.pmf(np.arange(sizes[1] + 1), sizes[1], fnr[:, None])
        flagged = np.einsum("gi,gj,ij->g", first, second, bounds > truth)
        assert flagged.max() <= error


@settings
def test_the_refuting_region_contains_the_outcomes_whose_bound_exceeds_the_claim(family, error, sizes):
    bounds = _all_bounds(family, error, sizes)
    finite = np.unique(bounds[np.isfinite(bounds) & (bounds > 0.01)])
    between = np.sqrt(finite[1:] * finite[:-1])[np.diff(finite) > 0.01 * finite[1:]]
    perfect = counts(0, sizes[0], 0, sizes[1])
    for claimed in [finite[0] / 2, *between[:: max(between.size // 4, 1)]]:
        query = BoundQuery(family, 1e-5, error)
        region = dpaudit.JointExact().refuting_region(float(claimed), perfect, (0.0, 1.0), query)
        expected = (bounds > claimed).sum(axis=1) - 1
        for fpr, fnr in ((0.1, 0.2), (0.3, 0.05), (0.6, 0.3)):
            chances = stats.binom.pmf(np.arange(sizes[0] + 1), sizes[0], fpr)
            enumerated = float(chances @ stats.binom.cdf(expected, sizes[1], fnr))
            assert region.probability(fpr, fnr) == pytest.approx(enumerated, abs=1e-4)


@st.composite
def _outcomes(draw, most=3000):
    absent, present = draw(st.integers(1, most)), draw(st.integers(1, most))
    rate = draw(st.sampled_from([0.001, 0.01, 0.1, 0.5]))
    return counts(
        draw(st.integers(0, int(rate * absent))),
        absent,
        draw(st.integers(0, int(rate * present))),
        present,
    )


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
@given(errors=_outcomes(), more=st.integers(1, 3))
def test_larger_audits_are_monotone_and_symmetric_too(family, errors, more):
    fp, absent, fn, present = (
        errors.false_positives,
        errors.num_absent,
        errors.false_negatives,
        errors.num_present,
    )
    assume(fp + more <= absent and fn + more <= present)
    bound = _bound(errors, family)
    assert _bound(counts(fn, present, fp, absent), family) == bound
    worse = [counts(fp + more, absent, fn, present), counts(fp, absent, fn + more, present)]
    assert max(_bound(more_errors, family) for more_errors in worse) <= bound * (1 + TOLERANCE) + 1e-6


@pytest.mark.parametrize("curve", [dpaudit.Gaussian(), dpaudit.ApproximateDP(1e-3)])
def test_refuting_counts_of_many_scores_are_interpolated_for_power(curve, monkeypatch):
    size, claimed, actual, rates = 100_000, 1.0, 1.05, np.array([1e-4, 1e-3, 0.05, 0.15])
    numbers, query = np.arange(21_000), BoundQuery(curve, 1e-5, 0.05)
    regions = []
    for is_exact in (False, True):
        if is_exact:  # nothing is interpolated
            monkeypatch.setattr("dpaudit.stats.inference._joint_exact._ALL_KNOTS", numbers.size)
        curve_points = ClaimedCurve(claimed, (size, size), query)
        regions.append(Region(numbers, curve_points.most_refuting(numbers, (0.0, 0.2)), (size, size)))
    misses = curve.fnr(actual, rates)
    power = np.array(
        [[one.probability(*pair) for pair in zip(rates, misses, strict=True)] for one in regions]
    )
    assert np.abs(power[0] - power[1]).max() < 0.01
    assert 0.001 < power[1].min() < 0.2 < power[1][2]
    assert not np.array_equal(power[0], power[1])
