"""Claims are mechanisms at a delta: values that say what they sample, which noise they add, and for whom."""

from __future__ import annotations

import dp_accounting
import numpy as np
import pytest

import dpaudit
from dpaudit.accounting import (
    Accounted,
    AnyMechanism,
    DPSGDRun,
    Full,
    GaussianStep,
    Mechanism,
    Poisson,
    White,
)

DELTA = 1e-5
RUN = DPSGDRun(noise=White(1.5), sampling=Poisson(0.1), num_steps=50)


@pytest.mark.parametrize(
    ("claim", "mechanism"),
    [
        (
            dpaudit.Claim.dpsgd(noise_multiplier=1.5, sample_rate=0.1, num_steps=50, delta=DELTA),
            RUN,
        ),
        (dpaudit.Claim.gaussian(noise_multiplier=2.0, delta=DELTA), GaussianStep(noise=White(2.0))),
        (dpaudit.Claim.approximate_dp(epsilon=3.0, delta=DELTA), AnyMechanism(dpaudit.ApproximateDP(), 3.0)),
        (
            dpaudit.Claim.curve(dpaudit.Laplace(), parameter=2.0, delta=DELTA),
            AnyMechanism(dpaudit.Laplace(), 2.0),
        ),
        (
            dpaudit.Claim.accounted(dp_accounting.LaplaceDpEvent(1.0), delta=DELTA),
            Accounted(dp_accounting.LaplaceDpEvent(1.0)),
        ),
    ],
)
def test_every_constructor_names_its_mechanism(claim: dpaudit.Claim, mechanism: Mechanism) -> None:
    same = dpaudit.Claim(mechanism, delta=DELTA)
    assert claim.mechanism == mechanism
    assert (same.summary, same.epsilon, same.parts) == (claim.summary, claim.epsilon, claim.parts)
    assert same.unit == "example"


def test_the_parts_of_a_claim_are_those_of_its_mechanism_and_delta() -> None:
    names = [part.name for part in dpaudit.Claim(RUN, delta=DELTA).parts]
    assert names == ["noise_multiplier", "sample_rate", "num_steps", "delta"]
    assert dpaudit.Claim.approximate_dp(epsilon=1.0, delta=DELTA).parts == ()


def test_a_run_that_uses_all_examples_is_one_at_rate_1() -> None:
    full, poisson = (
        dpaudit.Claim(DPSGDRun(noise=White(3.0), sampling=sampling, num_steps=4), delta=DELTA)
        for sampling in (Full(), Poisson(1.0))
    )
    assert full.epsilon == poisson.epsilon
    assert full.training == dpaudit.SubsampledGaussian(1.0, 4)


@pytest.mark.parametrize(
    "mechanism",
    [
        GaussianStep(noise=White(1.0), unit="client"),
        DPSGDRun(noise=White(1.0), sampling=Full(), num_steps=1, unit="client"),
        AnyMechanism(dpaudit.Laplace(), unit="client"),
        Accounted(dp_accounting.LaplaceDpEvent(1.0), unit="client"),
    ],
)
def test_sentences_name_the_unit_that_is_protected(mechanism: Mechanism) -> None:
    claim = dpaudit.Claim(mechanism, delta=DELTA)
    assert claim.unit == "client"
    assert ", for each client: epsilon = " in claim.summary


def test_what_a_mechanism_does_not_say_is_none() -> None:
    event = Accounted(dp_accounting.LaplaceDpEvent(1.0))
    assert (event.noise, event.sampling, event.step_curve(DELTA)) == (None, None, None)
    assert AnyMechanism(dpaudit.Gaussian(), 0.5).noise == White(2.0)
    assert AnyMechanism(dpaudit.Gaussian(), 0.0).noise is None
    assert AnyMechanism(dpaudit.Laplace(), 0.5).noise is None


def test_white_noise_is_whitened_by_its_standard_deviation() -> None:
    residuals = np.array([2.0, -4.0])
    np.testing.assert_array_equal(RUN.noise.whiten(7, residuals), residuals / 1.5)
    assert RUN.noise.std == 1.5


@pytest.mark.parametrize("mechanism", [RUN, GaussianStep(noise=White(1.0))])
def test_gaussian_noise_needs_a_delta(mechanism: Mechanism) -> None:
    with pytest.raises(dpaudit.InputError, match="no finite epsilon at delta 0"):
        dpaudit.Claim(mechanism, delta=0.0)
