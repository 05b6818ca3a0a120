"""The quick maximum of lines is the slow one, to the last bit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpaudit.accounting._subsampled import LineEnvelope, _exact_curve
from dpaudit.stats.tradeoffs import PiecewiseLinear

RATES = np.concatenate([[0.0], np.logspace(-13, -0.01, 200), 1 - np.logspace(-13, -0.01, 200), [1.0]])
GUARANTEES = st.lists(st.tuples(st.floats(0, 50), st.floats(0, 1)), min_size=1, max_size=12)


@given(GUARANTEES)
def test_any_guarantees_have_the_curve_of_piecewise_linear(guarantees: list[tuple[float, float]]) -> None:
    epsilons, deltas = np.asarray(guarantees).T
    slow = PiecewiseLinear(tuple(epsilons), tuple(deltas)).fnr(1.0, RATES)
    np.testing.assert_allclose(LineEnvelope.of(epsilons, deltas).fnr(RATES), slow, rtol=0, atol=1e-15)


@pytest.mark.parametrize("noise", [0.2, 1.0, 5.0])
def test_a_composed_training_has_it_to_the_last_bit(noise: float) -> None:
    quick = _exact_curve(noise, 0.5, 5)
    slow = PiecewiseLinear(tuple(quick._epsilons), tuple(quick._deltas)).fnr(1.0, RATES)
    np.testing.assert_array_equal(quick.fnr(RATES), slow)
