"""``dpaudit plan``: how many observations find a leak, or which leak so many find."""

from __future__ import annotations

from typing import Annotated

import typer

from dpaudit.cli._claim import ClaimOptions
from dpaudit.cli._console import output, print_json, working
from dpaudit.cli._exit import UNDERPOWERED
from dpaudit.cli._options import (
    Confidence,
    Delta,
    EndToEnd,
    Epsilon,
    Json,
    NoiseMultiplier,
    NumSteps,
    SampleRate,
)
from dpaudit.cli._plan_table import print_planned
from dpaudit.cli._planned import PlanOptions

__all__ = ["plan"]

_LEAK, _SIZE = "The leak to find", "Or the size, to see which leak it finds"

_NoiseFactor = Annotated[
    float | None, typer.Option(help="The true noise over the claimed, below 1.", rich_help_panel=_LEAK)
]
_TrueEpsilon = Annotated[
    float | None, typer.Option(help="The true epsilon, above the claimed.", rich_help_panel=_LEAK)
]
_Observations = Annotated[int | None, typer.Option(help="Independent scores a side.", rich_help_panel=_SIZE)]
_Steps = Annotated[
    int | None,
    typer.Option(
        help="Observed steps. With a leak: how many canaries find it in these.", rich_help_panel=_SIZE
    ),
]
_Canaries = Annotated[
    int | None,
    typer.Option(
        help="Canaries a step and side. With a leak: how many steps find it with these.",
        rich_help_panel=_SIZE,
    ),
]
_Power = Annotated[float, typer.Option(help="The probability of finding the leak.")]


def plan(
    *,
    epsilon: Epsilon = None,
    delta: Delta = None,
    noise_multiplier: NoiseMultiplier = None,
    sample_rate: SampleRate = None,
    num_steps: NumSteps = None,
    end_to_end: EndToEnd = False,
    noise_factor: _NoiseFactor = None,
    true_epsilon: _TrueEpsilon = None,
    observations: _Observations = None,
    steps: _Steps = None,
    canaries: _Canaries = None,
    power: _Power = 0.8,
    confidence: Confidence = 0.95,
    as_json: Json = False,
) -> None:
    """Plan an audit of a claim: the size that finds a leak, or the leak that a size finds.

    For an ideal attack with the threshold at the scores' midpoint.

    Exit status: 0 if a method finds a leak, 2 bad input, 3 if none does
    within 10 million observations.
    """
    claimed = ClaimOptions(epsilon, delta, noise_multiplier, sample_rate, num_steps, end_to_end)
    asked = PlanOptions(claimed, noise_factor, true_epsilon, observations, steps, canaries, power, confidence)
    asked.check()
    with working("Planning"):
        planned = asked.planned()
    if as_json:
        print_json(planned.to_dict())
    else:
        print_planned(output(), planned)
    if not planned.is_found:
        raise typer.Exit(UNDERPOWERED)
