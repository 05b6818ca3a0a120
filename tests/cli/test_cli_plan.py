"""What ``dpaudit plan`` and the functions behind it say."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np
import pytest

import dpaudit
from dpaudit import Betting, Claim, ClopperPearson, InputError, JointExact, Leak, PureDP

GAUSSIAN = ["--noise-multiplier", "1", "--delta", "1e-5"]
DPSGD = [*GAUSSIAN, "--sample-rate", "0.1", "--num-steps", "20"]
CLAIM = Claim.gaussian(noise_multiplier=1.0, delta=1e-5)


def _plans(result: Any) -> list[tuple[str, int | None, int | None]]:
    assert result.exit_code == 0, result.output
    plans = json.loads(result.stdout)["plans"]
    return [(plan["inference"]["type"], plan["num_canaries"], plan["num_steps"]) for plan in plans]


@pytest.mark.long
def test_a_leak_gives_the_sizes_that_find_it(run: Any) -> None:
    plans = _plans(run("plan", *DPSGD, "--noise-factor", "0.6", "--json"))
    leak = Leak(noise_factor=0.6)
    joint = dpaudit.plan_observations(CLAIM, leak).num_steps
    assert plans[:3] == [
        ("ClopperPearson", 1, dpaudit.plan_observations(CLAIM, leak, inference=ClopperPearson()).num_steps),
        ("JointExact", 1, joint),
        ("Betting", 1, dpaudit.plan_steps(CLAIM, leak, num_canaries=1).num_steps),
    ]
    assert [canaries for _, canaries, _ in plans[3:6]] == [8, 64, 512]
    assert joint is not None
    assert plans[6] == ("JointExact", -(-joint // 20), 20)
    assert plans[7] == ("Betting", dpaudit.plan_canaries(CLAIM, leak, num_steps=20).num_canaries, 20)


@pytest.mark.long
def test_a_true_epsilon_is_the_noise_that_has_it(run: Any) -> None:
    epsilon = Claim.dpsgd(noise_multiplier=0.6, sample_rate=0.1, num_steps=20, delta=1e-5).epsilon
    result = run("plan", *DPSGD, "--true-epsilon", epsilon, "--json")
    leak = json.loads(result.stdout)["plans"][0]["leak"]
    assert leak["noise_factor"] == pytest.approx(0.6, rel=1e-3)


def test_steps_or_canaries_may_be_given_with_a_leak(run: Any) -> None:
    by_canaries = _plans(run("plan", *DPSGD, "--noise-factor", "0.6", "--canaries", "4", "--json"))
    assert {canaries for _, canaries, _ in by_canaries} == {4}
    by_steps = _plans(run("plan", *DPSGD, "--noise-factor", "0.6", "--steps", "30", "--json"))
    assert {steps for *_, steps in by_steps} == {30}


@pytest.mark.parametrize("size", [["--observations", "400"], ["--steps", "50", "--canaries", "8"]])
def test_a_size_gives_the_smallest_leak(size: list[str], run: Any) -> None:
    result = run("plan", *GAUSSIAN, *size, "--json")
    found = json.loads(result.stdout)["smallest_leaks"]
    factors = [row["leak"]["noise_factor"] for row in found]
    assert len(factors) == 3
    assert all(0.5 < factor < 1 for factor in factors)
    assert factors[1] > factors[0]  # joint exact sees more than Clopper-Pearson


def test_the_smallest_leak_needs_just_the_planned_size() -> None:
    for inference in (ClopperPearson(), JointExact(), Betting()):
        leak = dpaudit.smallest_leak(CLAIM, num_steps=500, inference=inference)
        assert leak.noise_factor is not None
        plan = dpaudit.plan_steps(
            CLAIM, Leak(noise_factor=leak.noise_factor), num_canaries=1, inference=inference
        )
        assert plan.num_steps == pytest.approx(500, rel=0.06)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "plan",
    [
        dpaudit.plan_observations,
        partial(dpaudit.plan_steps, num_canaries=4),
        partial(dpaudit.plan_canaries, num_steps=40),
    ],
    ids=["observations", "steps", "canaries"],
)
def test_a_plan_is_for_the_given_method_power_confidence_and_trade_off(plan: Any) -> None:
    leak = Leak(noise_factor=0.6)
    found = plan(CLAIM, leak)
    assert found.leak.probability == 0.8
    for inference in (ClopperPearson(), JointExact(), Betting()):
        assert plan(CLAIM, leak, inference=inference).inference == inference
    for options in ({"power": 0.95}, {"confidence": 0.99}):
        assert plan(CLAIM, leak, **options).num_observations > found.num_observations
    with pytest.raises(InputError, match="state the leak by its true epsilon"):
        plan(CLAIM, leak, tradeoff=PureDP())
    assert plan(CLAIM, leak, power=0.95).leak.probability == 0.95


def test_the_table_names_the_claim_and_the_leak(run: Any) -> None:
    result = run("plan", *DPSGD, "--noise-factor", "0.6")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "(noise at 60 % of the claim)" in " ".join(result.stdout.split())
    assert "DP-SGD, noise multiplier 1, sample rate 0.1, 20 steps" in result.stdout
    reverse = run("plan", *DPSGD, "--observations", "300")
    assert max(map(len, reverse.stdout.splitlines())) <= 80
    assert "noise factor" in reverse.stdout


@pytest.mark.long
def test_a_claim_without_noise_is_planned_by_epsilon(run: Any) -> None:
    claim = ["--epsilon", "1", "--delta", "1e-5"]
    found = _plans(run("plan", *claim, "--true-epsilon", "3", "--json"))
    assert len(found) == 6
    assert "noise factor" not in run("plan", *claim, "--observations", "300").stdout


@pytest.mark.long
def test_whole_runs_can_be_planned(run: Any) -> None:
    found = _plans(run("plan", *DPSGD, "--end-to-end", "--noise-factor", "0.6", "--json"))
    assert len(found) == 6  # the claim's steps are not what is observed
    assert found[1] != ("JointExact", 1, dpaudit.plan_observations(CLAIM, Leak(noise_factor=0.6)).num_steps)


def test_a_leak_that_no_method_finds_is_said_to_be_one(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpaudit.stats._planning._MOST", 50)
    result = run("plan", *GAUSSIAN, "--noise-factor", "0.99")
    assert result.exit_code == 3
    assert "> 50" in result.stdout
    words = "No method detects epsilon 4.43 (noise at 99 % of the claim) with up to 50 scores per side."
    assert words in " ".join(result.stdout.split())
    sentence = str(dpaudit.plan_observations(CLAIM, Leak(noise_factor=0.99)))
    assert "JointExact does not detect noise at 99 % of the claim" in sentence
    assert "within 50 steps" in sentence


def test_a_size_is_judged_by_the_method_that_audits_of_it_use(run: Any) -> None:
    """Pooled counts detect a leak in 5 steps, but audits of steps with several canaries bet."""
    result = run("plan", *GAUSSIAN, "--steps", "5", "--canaries", "64", "--json")
    assert result.exit_code == 3
    leaks = {row["inference"]["type"]: row["leak"] for row in json.loads(result.stdout)["smallest_leaks"]}
    assert leaks["JointExact"]["epsilon"] < 2 * CLAIM.epsilon
    assert leaks["Betting"]["parameter"] == "inf"


def test_a_size_that_may_miss_twice_the_claimed_epsilon_has_status_3(run: Any) -> None:
    result = run("plan", "--epsilon", "8", "--delta", "1e-5", "--observations", "20")
    assert result.exit_code == 3
    said = " ".join(result.stdout.split())
    words = "20 scores per side are too few for this claim: they would detect no leak, however large."
    assert said.startswith(words)
    assert "Try a larger size, or pass --true-epsilon to compute how many scores are needed." in said
    claim = ("plan", "--noise-multiplier", "1", "--delta", "1e-5")
    found = [run(*claim, "--steps", steps, "--canaries", "4") for steps in ("3", "60")]
    assert [one.exit_code for one in found] == [3, 0]


def test_a_plan_and_an_audit_of_the_same_size_state_the_same_leak() -> None:
    rng = np.random.default_rng(0)
    for num_steps in (12, 60):
        present = rng.random((num_steps, 32)) < 0.5
        scores = present + rng.standard_normal(present.shape)
        observations = dpaudit.Observations.from_presence(scores, present, normalized=True)
        planned = dpaudit.smallest_leak(CLAIM, num_steps=num_steps, num_canaries=16)
        assert dpaudit.audit(observations, claim=CLAIM).power == planned
    scores = rng.standard_normal((2, 300))
    single = dpaudit.Observations(with_canary=1 + scores[0], without_canary=scores[1], normalized=True)
    assert dpaudit.audit(single, claim=CLAIM).power == dpaudit.smallest_leak(CLAIM, num_steps=300)


def test_more_canaries_in_few_steps_are_planned_with_the_power_of_few_steps() -> None:
    """Before, margins of one size were scaled to another; in 12 steps they are not."""
    plan = dpaudit.plan_canaries(CLAIM, Leak(noise_factor=0.5), num_steps=12)
    assert plan.num_canaries is not None
    for count, is_enough in ((plan.num_canaries, True), (plan.num_canaries * 2 // 3, False)):
        leak = dpaudit.smallest_leak(CLAIM, num_steps=12, num_canaries=count)
        assert (leak.parameter <= 1.03 * plan.leak.parameter) == is_enough


MISTAKES = {
    "no claim": (["--noise-factor", "0.8"], "A claim is required: --epsilon and --delta"),
    "nothing": (GAUSSIAN, "or --steps and --canaries), got neither"),
    "both": ([*GAUSSIAN, "--noise-factor", "0.8", "--observations", "9"], "and --canaries), got both"),
    "two leaks": (
        [*GAUSSIAN, "--noise-factor", "0.8", "--true-epsilon", "9"],
        "Pass either --noise-factor or --true-epsilon, not both.",
    ),
    "no leak": ([*GAUSSIAN, "--noise-factor", "1.1"], "--noise-factor must be above 0 and below 1, got 1.1"),
    "no more": (
        [*GAUSSIAN, "--true-epsilon", "2"],
        "The true epsilon must be above the claimed 4.377 to be a leak, got 2.",
    ),
    "no noise": (
        ["--epsilon", "1", "--delta", "0", "--noise-factor", "0.8"],
        "needs a curve with a noise level",
    ),
    "half a size": ([*GAUSSIAN, "--steps", "9"], "either --observations, or --steps and --canaries"),
    "no scores": ([*GAUSSIAN, "--observations", "0"], "--observations must be at least 1, got 0."),
    "power": (
        [*GAUSSIAN, "--noise-factor", "0.8", "--power", "2"],
        "power must be above 0 and below 1, got 2.",
    ),
    "confidence": (
        [*GAUSSIAN, "--noise-factor", "0.8", "--confidence", "0"],
        "--confidence must be at least 0.5 and below 1, got 0",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_a_sentence(mistake: str, run: Any) -> None:
    words, expected = MISTAKES[mistake]
    result = run("plan", *words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert expected in result.stderr.splitlines()[-1]
    # whether an epsilon is above that of a noise takes an accountant: only then is planning announced
    assert len(result.stderr.splitlines()) == (2 if mistake == "no more" else 1)


def test_only_inferences_with_a_known_power_are_planned() -> None:
    with pytest.raises(dpaudit.InputError, match=r"whose power is known.*got Posterior\(\)"):
        dpaudit.plan_observations(CLAIM, Leak(noise_factor=0.5), inference=dpaudit.Posterior())


def test_a_leak_is_one_of_two_things() -> None:
    for given in ({}, {"noise_factor": 0.5, "epsilon": 3.0}):
        with pytest.raises(dpaudit.InputError, match="either noise_factor or epsilon"):
            Leak(**given)
