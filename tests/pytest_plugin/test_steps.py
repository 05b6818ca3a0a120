"""A broken step fails with the cause that explains it; a correct one does not, however it clips."""

from __future__ import annotations

import re

import numpy as np
import pytest
from plugin_calls import fixture
from statistical_limits import most_flagged

import dpaudit

SIZE = 200
CLAIM = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5)


def message(step, verbosity=0, **options):
    """What the test fails with."""
    usual = {"claim": CLAIM, "max_grad_norm": 1.0, "num_steps": 300}
    if "gradients" not in options:
        usual["num_parameters"] = SIZE
    with pytest.raises(pytest.fail.Exception) as failed:
        fixture(verbosity=verbosity)(step, **(usual | options))
    return str(failed.value)


def causes(text):
    """The text of all causes, without its line breaks."""
    rows = re.search(r"^  cause    (.*(?:\n {11}.*)*)", text, re.MULTILINE)
    return "" if rows is None else re.sub(r"\n {11}", " ", rows[1][:1].lower() + rows[1][1:])


def clipped(rows, norm=1.0):
    return rows / np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True) / norm)


def adding(noise):
    """A step that clips and adds noise(rng, number of the call)."""
    rng, calls = np.random.default_rng(3), iter(range(10**6))
    return lambda rows: clipped(rows).sum(axis=0) + noise(rng, next(calls))


def releasing(of_rows):
    """A step with right noise and a sum of its own."""
    rng = np.random.default_rng(3)
    return lambda rows: of_rows(rows) + rng.standard_normal(rows.shape[1])


def normal(rng):
    return rng.standard_normal(SIZE)


NOISES = {
    "the same in every step": (lambda *_: normal(np.random.default_rng(0)), "reseeded"),
    "on half of the coordinates": (
        lambda rng, _: normal(rng) * (np.arange(SIZE) < SIZE // 2),
        "are some coordinates",
    ),
    "not in every twentieth step": (
        lambda rng, call: normal(rng) * (call % 20 > 0),
        "is a step released without noise",
    ),
    "of five workers": (
        lambda rng, _: sum(normal(rng) for _ in range(5)) / 5,
        "1/sqrt(5): is it added by each of 5",
    ),
    "none": (lambda *_: 0.0, "no noise: was the private step called"),
}


@pytest.mark.parametrize("fault", NOISES)
def test_broken_noise_is_named_first(fault):
    noise, expected = NOISES[fault]
    assert expected in causes(message(adding(noise)))


SUMS = {
    "not clipped": (lambda rows: rows.sum(axis=0), {}, "gradients are not clipped"),
    "each coordinate clipped": (
        lambda rows: np.clip(rows, -1, 1).sum(axis=0),
        {},
        "the largest number of a gradient is limited",
    ),
    "others not clipped": (
        lambda rows: rows.sum(axis=0),
        {"gradients": np.random.default_rng(0).standard_normal((20, SIZE))},
        "gradients are not clipped",
    ),
}


@pytest.mark.parametrize("fault", SUMS)
def test_broken_clipping_is_a_violation_that_is_named_and_no_fault_of_the_noise(fault):
    of_rows, options, expected = SUMS[fault]
    text = message(releasing(of_rows), verbosity=1, **options)
    assert text.startswith(("VIOLATION (privacy): epsilon >= ", "VIOLATION (mechanism): "))
    assert expected in causes(text)
    assert ("other gradients were replaced by zeros" in text) == (fault == "others not clipped")


def test_gradients_whose_norm_overflows_are_found():
    """Only canaries that are a million times too long show it, which ``observe_step`` has by default."""

    def limited(rows):
        with np.errstate(over="ignore"):
            norms = np.linalg.norm(rows, axis=1, keepdims=True).astype(np.float16)
        return np.where(np.isfinite(norms), rows / np.maximum(1.0, norms), rows).sum(axis=0)

    assert "Canaries of 1e+06 clipping norms" in message(releasing(limited))


def test_an_epsilon_that_the_claim_does_not_have_fails_a_correct_step():
    text = message(adding(lambda rng, _: rng.standard_normal(SIZE)), epsilon=2.0, num_steps=100)
    assert "claimed-epsilon: Epsilon 2 was claimed; these parameters have 4.38" in text


def test_a_mean_of_batch_size_ten_is_not_taken_for_a_canary_of_length_ten():
    step = adding(lambda rng, _: 0.7 * normal(rng))
    text = causes(message(lambda rows: step(rows) / 10, batch_size=10))
    assert "the noise multiplier in use" in text
    assert text.count("?") == 1


@pytest.mark.parametrize(
    ("of_rows", "expected"),
    [
        (
            lambda rows: clipped(rows).sum(axis=0) / 64,
            "if a mean is released, pass batch_size=",
        ),
        (
            lambda rows: clipped(rows.sum(axis=0, keepdims=True))[0],
            "is the mean or the sum of the batch clipped",
        ),
        (lambda rows: 0 * rows.sum(axis=0), "the canary does not reach the release"),
    ],
    ids=["a mean", "the sum clipped", "dropped"],
)
def test_canaries_that_do_not_arrive_end_the_test_without_a_verdict_and_with_guesses(of_rows, expected):
    rng = np.random.default_rng(3)
    text = message(lambda rows: of_rows(rows) + rng.standard_normal(SIZE) / 64)
    assert text.startswith("NO VERDICT")
    assert expected in causes(text)
    assert "rerun    pytest 't.py::test' --dp-audit-seed 0" in text


def test_another_sum_of_others_that_leaks_nothing_gets_no_verdict():
    rows = np.ones((20, SIZE))
    text = message(releasing(lambda rows: clipped(rows, 0.8).sum(axis=0)), gradients=rows)
    assert text.startswith("NO VERDICT")
    assert "the sum differs" in text


def test_a_claim_that_is_not_of_gaussian_noise_still_has_numbers_and_causes():
    claim = dpaudit.Claim.approximate_dp(epsilon=1.0, delta=1e-5)
    text = message(lambda rows: rows.sum(axis=0), claim=claim, num_steps=500, verbosity=1)
    assert "but these have 0 and 1.74e+05" in text  # the details state the signal of the canary
    assert "reaches the release unclipped" in causes(text)
    short, _, details = text.partition("\n\n")
    assert "no noise" not in short  # the block has one cause
    assert "possible cause: no noise" in details


def test_parameters_with_one_seed_are_named_if_the_step_says_how_long_they_are():
    def tiled(rng, _):
        return np.tile(rng.standard_normal(SIZE // 2), 2)

    text = message(adding(tiled), leaves={"weight": SIZE // 2, "bias": SIZE // 2})
    assert "leaves weight and bias" in text
    assert "does every parameter get the same PRNG key or seed?" in causes(text)


CAREFUL = {
    "exactly": clipped,
    "to a smaller norm": lambda rows: clipped(rows, 0.5),
    "each half to its part": lambda rows: np.hstack(
        [clipped(half, 0.5**0.5) for half in np.split(rows, 2, axis=1)]
    ),
    "by absolute values": lambda rows: rows / np.maximum(1.0, np.abs(rows).sum(axis=1, keepdims=True)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("clip", "noise", "canary"),
    [
        ("to a smaller norm", 1.0, dpaudit.Mixture(short=False)),
        *(
            pytest.param(clip, 1.0, dpaudit.Mixture(short=False), marks=pytest.mark.long)
            for clip in [*CAREFUL][1:]
        ),
        ("each half to its part", 3.0, dpaudit.Dirac()),
    ],
)
def test_a_step_that_clips_enough_is_flagged_no_more_often_than_it_may_be(clip, noise, canary):
    """At 50 % confidence, of whose error the first call of a test has a half: in a quarter of 40 audits."""
    rng, alarms = np.random.default_rng(0), 0
    for seed in range(40):
        try:
            fixture(seed).step(
                lambda rows: CAREFUL[clip](rows).sum(axis=0) + noise * rng.standard_normal(24),
                claim=CLAIM,
                max_grad_norm=1.0,
                num_parameters=24,
                num_canaries=8,
                num_steps=60,
                canary=canary,
                confidence=0.5,
            )
        except pytest.fail.Exception as failed:
            alarms += "NO VERDICT" not in str(failed)
    assert alarms <= most_flagged(40, 0.25, broken=0.7)


WRONG = {
    "claim": "epsilon 3",
    "gradients": [[0.0] * 30],
    "max_grad_norm": "10",
    "confidence": 0.0,
    "num_parameters": -3,
    "num_steps": 2.5,
    "batch_size": 0,
}


@pytest.mark.parametrize("name", WRONG)
def test_an_option_that_cannot_be_used_is_told_in_a_sentence(name):
    usual = {"claim": CLAIM, "max_grad_norm": 1.0, "num_parameters": 30, "num_steps": 20}
    if name == "gradients":
        del usual["num_parameters"]
    with pytest.raises(dpaudit.InputError, match=name):
        fixture()(adding(lambda rng, _: rng.standard_normal(30)), **(usual | {name: WRONG[name]}))
