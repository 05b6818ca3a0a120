"""A claimed epsilon is compared with its parameters, and a figure that an accountant gives is not accused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from opacus.accountants import PRVAccountant, RDPAccountant
from typer.testing import CliRunner

import dpaudit
from dpaudit import Claim, Observations
from dpaudit.accounting._claimed_epsilon import DPSGDNumbers
from dpaudit.cli._app import app
from dpaudit.diagnostics import CheckResults
from dpaudit.stats import ONE_RUN, STEP

DELTA = 1e-5
# noise multiplier, sample rate, steps: epsilons from 0.2 to 22
SETTINGS = [(1.0, 0.05, 300), (0.8, 0.01, 300), (2.0, 0.02, 1000), (1.5, 0.05, 3000), (1.0, 0.002, 300)]
NUMBERS: dict[str, Any] = {"noise_multiplier": 1.0, "sample_rate": 0.05, "num_steps": 300, "delta": DELTA}


def of_opacus(accountant: Any, noise: float, rate: float, steps: int) -> float:
    accountant.history = [(noise, rate, steps)]
    return float(accountant.get_epsilon(DELTA))


def of_dp_accounting(accountant: Any, noise: float, rate: float, steps: int) -> float:
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    return float(accountant.compose(step, steps).get_epsilon(DELTA))


ACCOUNTANTS: dict[str, Callable[..., float]] = {
    "Opacus PRV": lambda *numbers: of_opacus(PRVAccountant(), *numbers),
    "Opacus RDP": lambda *numbers: of_opacus(RDPAccountant(), *numbers),
    "dp-accounting PLD": lambda *numbers: of_dp_accounting(PLDAccountant(), *numbers),
    "dp-accounting RDP": lambda *numbers: of_dp_accounting(RdpAccountant(), *numbers),
}


def rounded_down(epsilon: float) -> Iterator[float]:
    """The figure with all digits, with 1 to 3 decimals and with 1 to 3 digits, where any is left."""
    figures = (epsilon, *(round(epsilon, digits) for digits in (1, 2, 3)))
    yield from (figure for figure in figures if figure > 0)
    yield from (float(f"{epsilon:.{digits}g}") for digits in (1, 2, 3))


def dpsgd(epsilon: float | None, **numbers: Any) -> Claim:
    return Claim.dpsgd(**{**NUMBERS, **numbers}, epsilon=epsilon)


def names(facts: CheckResults) -> list[str]:
    return [finding.name for finding in (*facts.certain, *facts.to_check)]


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_figure_of_any_accountant_is_not_accused_however_it_is_rounded(
    accountant: str, setting: tuple[float, float, int]
) -> None:
    noise, rate, steps = setting
    for epsilon in rounded_down(ACCOUNTANTS[accountant](noise, rate, steps)):
        facts = dpsgd(epsilon, noise_multiplier=noise, sample_rate=rate, num_steps=steps).facts
        assert facts.certain == ()
        assert facts.notes == ()
        if facts.to_check:  # only a whole number that is smaller by more than 0.05
            assert epsilon == round(epsilon)


def test_moments_are_those_of_opacus() -> None:
    for noise, rate, steps in SETTINGS[:4]:
        ours = DPSGDNumbers(noise=noise, sample_rate=rate, num_steps=steps, delta=DELTA).by_moments
        theirs = of_opacus(RDPAccountant(), noise, rate, steps)
        assert theirs * (1 - 1e-6) <= ours <= 1.03 * theirs
    whole = DPSGDNumbers(noise=2.0, sample_rate=1.0, num_steps=10, delta=DELTA).by_moments
    assert whole >= Claim.dpsgd(noise_multiplier=2.0, sample_rate=1.0, num_steps=10, delta=DELTA).epsilon


def test_parameters_with_a_larger_epsilon_than_claimed_are_a_finding() -> None:
    facts = dpsgd(3.0).facts
    assert [finding.name for finding in facts.certain] == ["claimed-epsilon"]
    assert facts.certain[0].sentence == "Epsilon 3 was claimed; these parameters have 5.80 at delta 1e-05."
    assert facts.certain[0].cause == ""


@pytest.mark.parametrize(
    ("stated", "name"),
    [(3.05, ""), (3.0, ""), (5.8, ""), (5.75, ""), (5.6, "claimed-epsilon"), (5.0, "claimed-epsilon")],
)
def test_digits_decide_what_is_rounding(stated: float, name: str) -> None:
    noise = (
        1.0 if stated >= 5 else dpaudit.noise_for_epsilon(3.04, sample_rate=0.05, num_steps=300, delta=DELTA)
    )
    assert names(dpsgd(stated, noise_multiplier=noise).facts) == ([name] if name else [])


def test_a_whole_number_that_is_rounded_down_is_to_check() -> None:
    noise = dpaudit.noise_for_epsilon(3.4, sample_rate=0.05, num_steps=300, delta=DELTA)
    facts = dpsgd(3, noise_multiplier=noise).facts
    assert [fact.name for fact in facts.to_check] == ["rounded-epsilon"]
    assert facts.certain == ()


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ({"num_steps": 15}, "is epsilon {} that of 15 steps, the number of epochs?"),
        ({"delta": 1e-3}, "is epsilon {} that of delta 0.001?"),
        (
            {"sample_rate": 0.0125},
            "is epsilon {} that of sample rate 0.0125, that of a batch of 1/4 of the size?",
        ),
    ],
)
def test_a_figure_that_is_exactly_that_of_a_usual_mistake_names_it(
    mistake: dict[str, Any], words: str
) -> None:
    stated = round(Claim.dpsgd(**{**NUMBERS, **mistake}).epsilon, 2)
    assert dpsgd(stated).facts.certain[0].cause == words.format(f"{stated:g}")


def test_the_moments_of_a_usual_mistake_name_it_too() -> None:
    stated = round(of_opacus(RDPAccountant(), 1.0, 0.0125, 300), 2)
    assert "sample rate 0.0125, that of a batch of 1/4 of the size" in dpsgd(stated).facts.certain[0].cause


def test_an_epsilon_that_noise_was_fitted_to_for_another_run_names_the_mistake() -> None:
    noise = dpaudit.noise_for_epsilon(3.0, sample_rate=0.05, num_steps=25, delta=DELTA)
    cause = dpsgd(3.0, noise_multiplier=noise, num_steps=500).facts.certain[0].cause
    assert cause == "is epsilon 3 that of 25 steps, the number of epochs?"


def test_a_claim_that_is_looser_than_any_accountant_is_a_note() -> None:
    assert "looser" in dpsgd(20.0).facts.notes[0]
    unplanned = dpsgd(20.0).with_sources({"num_steps": ("default", "the number of recorded steps")})
    assert "pass num_steps=..." in unplanned.facts.notes[0]


def test_other_claims_are_compared_too() -> None:
    gaussian = Claim.gaussian(noise_multiplier=1.0, delta=DELTA, epsilon=2.0)
    assert names(gaussian.facts) == ["claimed-epsilon"]
    event = dp_accounting.GaussianDpEvent(1.0)
    assert names(Claim.accounted(event, delta=DELTA, epsilon=2.0).facts) == ["claimed-epsilon"]
    assert dpsgd(None).facts == CheckResults()


def test_a_figure_is_stated_once() -> None:
    assert dpsgd(None).with_epsilon(3.0).facts == dpsgd(3.0).facts
    assert dpsgd(3.0).with_epsilon(3.0).facts == dpsgd(3.0).facts
    with pytest.raises(dpaudit.InputError, match=r"epsilon must be that of the claim, 3, got 4\."):
        dpsgd(3.0).with_epsilon(4.0)
    with pytest.raises(dpaudit.InputError, match="epsilon must be positive, got 0"):
        dpsgd(0.0)


def audited(epsilon: float | None, noise: float = 1.0, scores_of: str = STEP, size: int = 500) -> Any:
    scores = noise * np.random.default_rng(0).standard_normal((2, size))
    observations = Observations(
        with_canary=1 + scores[0], without_canary=scores[1], normalized=True, scores_of=scores_of
    )
    return dpaudit.audit(observations, claim=dpsgd(epsilon))


@pytest.mark.parametrize("scores_of", [STEP, ONE_RUN])
def test_a_claim_that_contradicts_itself_is_a_violation_whatever_the_scores(scores_of: str) -> None:
    result = audited(3.0, noise=10.0, scores_of=scores_of, size=50)
    assert result.refuted == ("mechanism",)
    assert result.p_value == 0
    assert result.confidence == 0.95
    assert "the claimed 3 is for another mechanism" in str(result)
    assert "claimed-epsilon: Epsilon 3 was claimed" in str(result)


def test_a_bound_above_the_claimed_figure_refutes_privacy_though_not_that_of_the_parameters() -> None:
    result = audited(3.0, size=2000)
    assert 3 < result.bound.epsilon < dpsgd(None).epsilon
    assert result.refuted == ("privacy", "mechanism")
    assert result.block.numbers.endswith("but 3 is claimed (these parameters: 5.80)")
    assert audited(5.8, size=2000).refuted == ()


def test_the_claimed_figure_is_shown_beside_that_of_the_parameters() -> None:
    result = audited(6.0)
    assert result.verdict is not dpaudit.Verdict.VIOLATION
    assert "epsilon = 5.795 at delta = 1e-05, claimed as 6" in result.details()
    assert result.block.numbers.endswith("6 claimed (these parameters: 5.80)")
    assert "; delta = 1e-05, epsilon = 6" in str(result)
    assert math.isclose(result.to_dict()["claim"]["epsilon"], 5.795, rel_tol=1e-3)
    assert result.to_dict()["diagnosis"] is None


def test_a_looser_claim_whose_parameters_are_refuted_says_so() -> None:
    result = audited(30.0, noise=0.7, size=2000)
    assert result.refuted == ("privacy",)
    assert "but these parameters have 5.80 (30 is claimed)" in str(result)


OPTIONS = ["--noise-multiplier", "1", "--sample-rate", "0.05", "--num-steps", "300", "--delta", "1e-5"]


def test_the_command_line_compares_an_epsilon_beside_parameters(tmp_path: Any) -> None:
    for name, shift in (("with", 1.0), ("without", 0.0)):
        np.save(tmp_path / f"{name}.npy", shift + np.random.default_rng(0).standard_normal(300))
    files = ["--with", str(tmp_path / "with.npy"), "--without", str(tmp_path / "without.npy")]
    done = CliRunner().invoke(app, ["scores", *files, *OPTIONS, "--per-step", "--epsilon", "3"])
    assert done.exit_code == 1
    assert "claimed-epsilon" in done.stdout
    done = CliRunner().invoke(app, ["scores", *files, *OPTIONS, "--per-step", "--epsilon", "5.8"])
    assert done.exit_code in {0, 3}
    planned = CliRunner().invoke(app, ["plan", *OPTIONS, "--epsilon", "3", "--observations", "100"])
    assert "Epsilon 3 was claimed; these" in planned.stdout
