"""When present canaries score too little for a verdict."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dpaudit.recording._score_log import (
    LengthMoments,
    MissingCanaryError,
    RunningMoments,
    check_signal,
    has_signal,
)


def moments(mean: float, spread: float = 0.0, count: int = 100) -> RunningMoments:
    """Return the moments of scores with this mean and standard deviation, half of them on either side."""
    scores = mean + spread * np.where(np.arange(count) % 2, 1.0, -1.0)
    return RunningMoments().add(scores[:30]).add(scores[30:])


def test_moments_that_are_added_step_by_step_are_those_of_all_scores() -> None:
    found = moments(3.0, 0.5)
    assert (found.count, found.mean) == (100, pytest.approx(3.0))
    assert found.error == pytest.approx(0.5**2 / 100)


@pytest.mark.parametrize(("gap", "is_missing"), [(0.0, True), (0.99, True), (1.01, False), (2.0, False)])
def test_canaries_are_missing_if_they_score_less_than_half_of_the_signal(
    gap: float, is_missing: bool
) -> None:
    present, absent = moments(0.5 + gap), moments(0.5)
    if is_missing:
        with pytest.raises(MissingCanaryError, match=r"Scores must increase by 2 where") as caught:
            check_signal([LengthMoments(present, absent)], 2.0)
        assert caught.value.gap == pytest.approx(gap)
    else:
        check_signal([LengthMoments(present, absent)], 2.0)


@pytest.mark.parametrize(("errors", "is_missing"), [(5.9, False), (6.1, True)])
def test_canaries_are_missing_only_beyond_six_standard_errors(errors: float, is_missing: bool) -> None:
    spread = 0.5 / errors * math.sqrt(100 / 2)  # of the scores on both sides
    present, absent = moments(0.5, spread), moments(0.0, spread)
    assert has_signal([LengthMoments(present, absent)], 1.0) != is_missing
    present = moments(0.0, spread)
    if is_missing:
        with pytest.raises(MissingCanaryError):
            check_signal([LengthMoments(present, absent)], 1.0)
    else:
        check_signal([LengthMoments(present, absent)], 1.0)


@pytest.mark.parametrize(
    ("gap", "noise", "cause"),
    [
        (0.1, 2.0, "so it is clipped again after its rows were added"),
        (0.1, 0.1, "so the noisy sum is clipped"),
        (0.0, 2.0, "does not contain the canaries"),
        (0.0, 0.1, "does not contain the canaries"),
    ],
)
def test_canaries_that_are_scaled_down_have_a_cause_that_depends_on_the_noise(
    gap: float, noise: float, cause: str
) -> None:
    found = LengthMoments(moments(gap, noise, count=10_000), moments(0.0, noise, count=10_000))
    with pytest.raises(MissingCanaryError, match=cause):
        check_signal([found], 1.0, claimed_noise=2.0)


@pytest.mark.parametrize("sides", [(9, 100), (100, 9)])
def test_few_scores_are_not_judged(sides: tuple[int, int]) -> None:
    check_signal([LengthMoments(moments(0.0, count=sides[0]), moments(0.0, count=sides[1]))], 1.0)
    assert has_signal([LengthMoments(RunningMoments(), moments(0.0))], 1.0)
    assert not has_signal([LengthMoments(moments(0.0, count=1), moments(0.0))], 1.0)


@pytest.mark.parametrize(
    ("gap", "expected"), [(1.0009, True), (0.9991, True), (1.0011, False), (0.9989, False)]
)
def test_a_signal_without_noise_may_differ_by_rounding(gap: float, expected: bool) -> None:
    assert has_signal([LengthMoments(moments(gap), moments(0.0))], 1.0) == expected


def test_canaries_of_one_length_that_arrive_allow_a_verdict() -> None:
    absent = moments(0.0, 1.0, 1000)
    missing, arriving = LengthMoments(absent, absent), LengthMoments(moments(0.8, 1.0, 1000), absent)
    check_signal([missing, missing, missing, arriving], 1.0)
    with pytest.raises(MissingCanaryError):
        check_signal([missing, missing, missing], 1.0)
    assert not has_signal([missing, arriving], 1.0)


def test_short_canaries_score_their_length() -> None:
    short = LengthMoments(moments(0.5, 1.0, 10_000), moments(0.0, 1.0, 10_000), expected=0.5)
    assert has_signal([short], 1.0)
    check_signal([short], 1.0)
    assert not has_signal([LengthMoments(moments(1.0, 1.0, 10_000), short.absent, expected=0.5)], 1.0)
