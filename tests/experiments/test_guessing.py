"""What an audit of one final model could have seen."""

from __future__ import annotations

import numpy as np
import pytest

from dpaudit.accounting import SubsampledGaussian
from dpaudit.experiments.black_box._final_model import OneRunAnalysis
from dpaudit.stats import Guesses

CURVE = SubsampledGaussian(0.08, 40)
ANALYSIS = OneRunAnalysis(noise_multiplier=0.8, curve=CURVE, delta=1e-5, confidence=0.95)


def guesses(number: int) -> Guesses:
    return Guesses(num_canaries=100, num_guesses=number, num_correct=number // 2)


@pytest.mark.parametrize("number", [10, 40, 80])
def test_the_share_of_right_guesses_is_that_of_a_search_over_all_thresholds(number: int) -> None:
    rates = np.linspace(1e-6, 1, 200_001)
    for parameter in (0.5, 1.25):
        above = 1 - CURVE.fnr(parameter, rates)
        place = int(np.searchsorted(rates + above, number / 100))
        expected = above[place] / (rates[place] + above[place])
        assert ANALYSIS._accuracy(guesses(number), parameter) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("number", [1, 10, 40])
def test_a_training_that_tells_all_makes_every_guess_right(number: int) -> None:
    shares = [ANALYSIS._accuracy(guesses(number), parameter) for parameter in (0.5, 2.0, 50.0, 1e3)]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0, abs=1e-6)
