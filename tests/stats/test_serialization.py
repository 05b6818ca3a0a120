"""Methods and bounds as plain values: what is written is read back, and nothing else can be read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from score_samples import counts

import dpaudit
from dpaudit.errors import InputError
from dpaudit.stats import Bound, Kind
from dpaudit.stats.thresholds import BestOf

TRADEOFFS = [
    dpaudit.Gaussian(),
    dpaudit.ApproximateDP(1e-5),
    dpaudit.PureDP(),
    dpaudit.Laplace(),
    dpaudit.RandomizedResponse(3),
    dpaudit.SubsampledGaussian(0.1, 50),
    dpaudit.PiecewiseLinear(epsilons=(0.5, 2.0), deltas=(0.1, 1e-5)),
]
INFERENCES = [
    dpaudit.ClopperPearson(),
    dpaudit.JointExact(),
    dpaudit.Betting(horizon=100),
    dpaudit.Posterior(),
    dpaudit.KatzLog(),
]
RULES = [
    dpaudit.Fixed(0.25),
    dpaudit.Optimal(0.5),
    dpaudit.HeldOut(0.1, seed=3),
    dpaudit.Simultaneous(16),
    dpaudit.Predictable(),
    dpaudit.SameData(),
    dpaudit.Tails(),
    BestOf((dpaudit.Fixed(0.5), dpaudit.Tails()), (0.9, 0.1)),
    BestOf((dpaudit.Fixed(0.0), dpaudit.Simultaneous()), (0.8, 0.2), dpaudit.Fixed(0.0)),
]
INTERFACES = {dpaudit.TradeOff: TRADEOFFS, dpaudit.Inference: INFERENCES, dpaudit.ThresholdRule: RULES}
PARTS = [(interface, part) for interface, parts in INTERFACES.items() for part in parts]


def through_json(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(values, allow_nan=False))
    return found


@pytest.mark.parametrize(("interface", "part"), PARTS, ids=str)
def test_what_is_written_is_read_back(interface: Any, part: Any) -> None:
    values = part.to_dict()
    assert values["type"] == type(part).__name__
    assert interface.from_dict(through_json(values)) == part


def test_a_part_of_another_interface_is_refused() -> None:
    with pytest.raises(InputError, match="These are the values of Fixed, not of TradeOff"):
        dpaudit.TradeOff.from_dict({"type": "Fixed"})


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"type": 3},
        {"type": "Fixed", "limit": 1},
        {"type": "Fixed", "threshold": "a"},
        {"type": "TradeOff"},
    ],
)
def test_values_that_no_part_has_are_refused_in_a_sentence(values: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        dpaudit.ThresholdRule.from_dict(values)
    assert "\n" not in str(caught.value)


def test_a_type_that_is_not_defined_here_can_be_shown() -> None:
    values = {"type": "Unheard", "size": 50, "of": {"type": "Fixed", "threshold": 0.5}}
    found = dpaudit.ThresholdRule.from_dict(values)
    assert repr(found) == "Unheard(size=50, of=Fixed(threshold=0.5))"
    assert found.to_dict() == values


def test_a_class_of_the_user_is_read_as_soon_as_it_is_defined() -> None:
    @dataclass(frozen=True)
    class Shifted(dpaudit.Laplace):
        shift: float = 0.0

    assert dpaudit.TradeOff.from_dict({"type": "Shifted", "shift": 2.0}) == Shifted(2.0)


def bounds() -> list[Bound]:
    rng = np.random.default_rng(0)
    observations = dpaudit.Observations(
        with_canary=rng.normal(1, 1, 50), without_canary=rng.normal(0, 1, 50), normalized=True
    )
    guesses = dpaudit.Guesses(num_canaries=100, num_guesses=20, num_correct=18)
    errors = counts(3, 50, 2, 50)
    method: dict[str, Any] = {
        "delta": 1e-5,
        "tradeoff": dpaudit.Gaussian(),
        "inference": dpaudit.JointExact(),
    }
    return [
        dpaudit.lower_bound(observations, threshold=dpaudit.Fixed(0.5), **method),
        dpaudit.lower_bound(errors, **method),
        dpaudit.lower_bound(errors, delta=0, tradeoff=dpaudit.Gaussian(), inference=dpaudit.JointExact()),
        dpaudit.one_run_bound(guesses, delta=1e-5),
        dpaudit.one_run_fdp_bound(guesses, tradeoff=dpaudit.Gaussian(), delta=1e-5),
    ]


@pytest.mark.parametrize("bound", bounds(), ids=lambda bound: bound.label)
def test_a_bound_is_read_back(bound: Bound) -> None:
    assert Bound.from_dict(through_json(bound.to_dict())) == bound


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epsilon", -1.0),
        ("epsilon", "many"),
        ("epsilon", True),
        ("epsilon", 10**400),
        ("delta", 2.0),
        ("confidence", 1.0),
        ("kind", "certain"),
        ("counts", {"false_positives": 1}),
        ("counts", None),
        ("tradeoff", "Gaussian()"),
        ("assumptions", "none"),
        ("threshold", [0.5]),
    ],
)
def test_a_bound_with_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    values = bounds()[0].to_dict()
    with pytest.raises(InputError, match=f"(?i){name}"):
        Bound.from_dict({**values, name: value})


def test_every_kind_has_a_meaning_of_its_own() -> None:
    assert len({kind.meaning for kind in Kind}) == len(Kind)


def test_labels_are_short_names_for_columns() -> None:
    labels = ["fixed 0.25", "optimal", "held out", "bands", "predictable", "same data", "tails"]
    labels += ["best of fixed 0.5, tails", "fixed 0"]
    assert [rule.label for rule in RULES] == labels


@pytest.mark.parametrize(
    ("rules", "shares"),
    [
        ((), ()),
        ((dpaudit.Fixed(0.5),), (0.5, 0.5)),
        ((dpaudit.Fixed(0.5), dpaudit.Tails()), (0.9, 0.2)),
        ((dpaudit.Fixed(0.5), dpaudit.Tails()), (1.0, 0.0)),
        ((dpaudit.SameData(),), (1.0,)),
    ],
    ids=str,
)
def test_shares_that_would_prove_nothing_are_refused(
    rules: tuple[Any, ...], shares: tuple[float, ...]
) -> None:
    with pytest.raises(InputError):
        BestOf(rules, shares)


def test_the_best_of_unknown_rules_describes_a_bound_and_makes_none() -> None:
    observations = dpaudit.Observations(with_canary=[1.0, 2.0], without_canary=[0.0, 0.5])
    stored = {
        "type": "BestOf",
        "rules": [{"type": "Unheard"}],
        "shares": [1.0],
        "chosen": {"type": "Unheard"},
    }
    best = dpaudit.ThresholdRule.from_dict(stored)
    assert isinstance(best, BestOf)
    assert best.label == "Unheard"
    method: dict[str, Any] = {"tradeoff": dpaudit.Gaussian(), "inference": dpaudit.ClopperPearson()}
    with pytest.raises(InputError, match="does not choose a threshold"):
        dpaudit.lower_bound(observations, delta=1e-5, threshold=best, **method)
