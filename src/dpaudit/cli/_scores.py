"""``dpaudit scores``: from files of scores to bounds and a verdict."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from dpaudit import _validate
from dpaudit.cli._claim import ClaimOptions
from dpaudit.cli._columns import Columns
from dpaudit.cli._console import output, print_json, working
from dpaudit.cli._exit import status
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
from dpaudit.cli._read import Source
from dpaudit.cli._scores_table import print_examined
from dpaudit.methods import examine, is_large
from dpaudit.stats import Observations

__all__ = ["scores"]

_USUAL_DELTA = 1e-5
_QUICK = 1_000_000  # fewer scores a side take no time

_Table = Annotated[
    Path | None,
    typer.Argument(
        help="A .csv, .parquet or .npz file with a score and a presence column.", show_default=False
    ),
]
_With = Annotated[
    Path | None,
    typer.Option("--with", metavar="FILE", help="Scores with the canary: .npy, .npz, .csv or .parquet."),
]
_Without = Annotated[
    Path | None, typer.Option("--without", metavar="FILE", help="Scores without the canary.")
]
_Score = Annotated[str, typer.Option(help="The name of the column (or array) of scores.")]
_Presence = Annotated[
    str, typer.Option(help="The name of the column of 0/1 or true/false: was the canary present?")
]
_Normalized = Annotated[
    bool,
    typer.Option(
        "--normalized",
        help="White-box scores in units of the canary's signal: 1/2 is the midpoint and the threshold.",
    ),
]
_Threshold = Annotated[
    float | None,
    typer.Option(help='Call a score above this "present". It must have been chosen before the data.'),
]


def scores(
    *,
    table: _Table = None,
    with_file: _With = None,
    without_file: _Without = None,
    score_column: _Score = Columns.score,
    presence_column: _Presence = Columns.presence,
    normalized: _Normalized = False,
    threshold: _Threshold = None,
    confidence: Confidence = 0.95,
    epsilon: Epsilon = None,
    delta: Delta = None,
    noise_multiplier: NoiseMultiplier = None,
    sample_rate: SampleRate = None,
    num_steps: NumSteps = None,
    end_to_end: EndToEnd = False,
    as_json: Json = False,
) -> None:
    """Bound the leak that scores show, by every method, and test a claim on them.

    Scores are of steps or runs with and without a canary.
    A higher score means "present". Two-dimensional arrays are steps x canaries.

    Exit status: 0 no violation or no claim, 1 violation, 2 bad input,
    3 underpowered.
    """
    options = ClaimOptions(epsilon, delta, noise_multiplier, sample_rate, num_steps, end_to_end)
    _check(options, threshold, confidence)
    source = Source(table, with_file, without_file, Columns(score_column, presence_column))
    observations = source.read(normalized=normalized)
    with _announced(observations, options):
        examined = examine(
            observations,
            delta=_USUAL_DELTA if delta is None else delta,
            confidence=confidence,
            claim=options.claim,
            tradeoff=options.tradeoff,
            of_steps=options.is_of_steps,
            threshold=threshold,
        )
        values = examined.to_dict()  # finds the power too
    if as_json:
        print_json(values)
    else:
        print_examined(output(), values, left_out=is_large(examined.observations))
    if examined.result is not None:
        raise typer.Exit(status(examined.result.verdict))


def _check(options: ClaimOptions, threshold: float | None, confidence: float) -> None:
    """Find mistakes in the options before reading what may be large files."""
    _ = options.claim
    _validate.confidence(confidence)
    if options.delta is not None:
        _validate.delta(options.delta)
    if threshold is not None:
        _validate.finite("threshold", threshold)


def _announced(observations: Observations, options: ClaimOptions) -> AbstractContextManager[None]:
    """Say what is done where it takes more than a few seconds."""
    sizes = observations.with_canary.size, observations.without_canary.size
    if max(sizes) < _QUICK and not options.end_to_end:
        return nullcontext()
    return working(f"Examining {sizes[0]:,} and {sizes[1]:,} scores")
