"""Options that several commands share, described once."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

__all__ = ["Confidence", "Delta", "EndToEnd", "Epsilon", "Json", "NoiseMultiplier", "NumSteps", "SampleRate"]

_CLAIM = "The claim"

Epsilon: TypeAlias = Annotated[
    float | None,
    typer.Option(help="The claimed epsilon of whatever one score is of.", rich_help_panel=_CLAIM),
]
Delta: TypeAlias = Annotated[
    float | None,
    typer.Option(
        help="The claim's delta; every claim needs one. Bounds without a claim are at 1e-5.",
        rich_help_panel=_CLAIM,
    ),
]
NoiseMultiplier: TypeAlias = Annotated[
    float | None,
    typer.Option(
        help="The claimed noise over the sensitivity. Alone: the claim is of one Gaussian step.",
        rich_help_panel=_CLAIM,
    ),
]
SampleRate: TypeAlias = Annotated[
    float | None,
    typer.Option(help="The Poisson sample rate of DP-SGD.", rich_help_panel=_CLAIM),
]
NumSteps: TypeAlias = Annotated[
    int | None,
    typer.Option(help="The number of steps of DP-SGD.", rich_help_panel=_CLAIM),
]
EndToEnd: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--end-to-end",
        help="Each score is of a whole DP-SGD run, not of a step.",
        rich_help_panel=_CLAIM,
    ),
]
Confidence: TypeAlias = Annotated[float, typer.Option(help="The confidence of bounds and verdicts.")]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
