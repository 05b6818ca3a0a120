"""``dpaudit scores``: bounds and a verdict from score files."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpaudit.cli import _options as opt
from dpaudit.cli._console import EXIT_STATUS, output, print_json, working
from dpaudit.cli._exit_status import ExitStatus
from dpaudit.cli._options import ClaimOptions
from dpaudit.errors import InputError

if TYPE_CHECKING:  # commands load numpy and scipy when they are called
    from dpaudit import Observations

_file, _analysis = opt.panel(rich_help_panel="Files"), opt.panel(rich_help_panel="Analysis")
_QUICK = 1_000_000  # scores per side; with fewer, the analysis is fast

_Table = Annotated[
    Path | None,
    typer.Argument(
        metavar="TABLE",
        help="A .csv, .parquet or .npz file with a column of scores and one of presence.",
        show_default=False,
    ),
]
_With = Annotated[
    Path | None, _file("--with", metavar="FILE", help="Scores with the canary: .npy, .npz, .csv or .parquet.")
]
_Without = Annotated[Path | None, _file("--without", metavar="FILE", help="Scores without the canary.")]
_Score = Annotated[str, _file(help="Name of the column or array of scores.")]
_Presence = Annotated[str, _file(help="Name of the column of presence: 1 or true, 0 or false.")]
_PresenceFile = Annotated[
    Path | None,
    _file("--presence", metavar="FILE", help="File with the presence, joined with TABLE by --id-column."),
]
_IdColumn = Annotated[
    str | None, _file(help="Name of the column that identifies canaries.", show_default=False)
]
_Paired = Annotated[
    bool,
    _analysis(
        "--paired",
        help="Each step has one score with and one without each canary. Default: a fair coin decides.",
    ),
]
_Coupled = Annotated[
    bool, _analysis("--coupled", help="Scores depend on which other canaries of their step were present.")
]
_Normalized = Annotated[
    bool,
    _analysis(
        "--normalized", help="Scores average 0 without the canary and 1 with it, so the threshold is 1/2."
    ),
]
_LowerIsPresent = Annotated[
    bool,
    _analysis("--lower-is-present", help="A low score means that the canary was present, as with a loss."),
]
_Threshold = Annotated[
    float | None, _analysis(help="Count scores above this as present. Choose it before you see the scores.")
]


def scores(
    *,
    table: _Table = None,
    epsilon: opt.Epsilon = None,
    delta: opt.Delta = None,
    noise_multiplier: opt.NoiseMultiplier = None,
    sample_rate: opt.SampleRate = None,
    num_steps: opt.NumSteps = None,
    per_step: opt.PerStep = False,
    end_to_end: opt.EndToEnd = False,
    one_run: opt.OneRun = False,
    with_file: _With = None,
    without_file: _Without = None,
    score_column: _Score = "score",
    presence_column: _Presence = "present",
    presence: _PresenceFile = None,
    id_column: _IdColumn = None,
    paired: _Paired = False,
    coupled: _Coupled = False,
    normalized: _Normalized = False,
    lower_is_present: _LowerIsPresent = False,
    threshold: _Threshold = None,
    confidence: opt.Confidence = 0.95,
    verbose: opt.Verbose = False,
    quiet: opt.Quiet = False,
    all_methods: opt.AllMethods = False,
    as_json: opt.Json = False,
) -> None:
    """Test a claim with the scores of any attack.

    Pass the scores of steps or runs with and without a canary: one TABLE, or
    --with and --without. A high score means that the canary was present, unless
    you pass --lower-is-present. Two-dimensional arrays are steps x canaries.
    Without a claim, you get a lower bound on epsilon.

    Exit status: 0 no violation or no claim, 1 violation, 2 bad input,
    3 underpowered, 4 not completed.
    """
    from dpaudit import methods  # noqa: PLC0415  # loads scipy
    from dpaudit.cli._result_table import Shown, print_examined  # noqa: PLC0415
    from dpaudit.cli._score_files import Columns, ScoreFiles, negated  # noqa: PLC0415
    from dpaudit.stats import require_higher_is_present  # noqa: PLC0415

    options = ClaimOptions(
        epsilon, delta, noise_multiplier, sample_rate, num_steps, end_to_end, per_step, one_run
    )
    _check(options, threshold, confidence)
    if lower_is_present and normalized:
        raise InputError(
            "--normalized and --lower-is-present cannot be combined: normalized scores are on average 0 "
            "without the canary and 1 with it."
        )
    columns = Columns(score_column, presence_column, id_column)
    files = ScoreFiles(table, with_file, without_file, columns, presence)
    observations = files.read(normalized=normalized, paired=paired, coupled=coupled)
    observations = replace(observations, scores_of=options.scores_of)
    if lower_is_present:
        observations = negated(observations)
        threshold = None if threshold is None else -threshold
    require_higher_is_present(
        observations, "pass --lower-is-present" + (" instead of --normalized" if normalized else "")
    )
    with _announcing(observations, options):
        examined = methods.examine(
            observations,
            delta=1e-5 if delta is None else delta,
            confidence=confidence,
            claim=options.claim,
            threshold=threshold,
        )
        values = examined.to_dict()  # also computes the power
    if as_json:
        print_json(values)
    else:
        left_out = methods.is_large(examined.observations, is_fixed=threshold is not None)
        if examined.result is None and examined.default is not None:
            values["bound"] = examined.default.to_dict()
        print_examined(output(), values, Shown(verbose, quiet, all_methods), left_out=left_out)
    if examined.result is not None:
        raise ExitStatus(EXIT_STATUS[examined.result.verdict.name])


def _check(options: ClaimOptions, threshold: float | None, confidence: float) -> None:
    """Check the options before reading files, which may be large."""
    from dpaudit import _validate  # noqa: PLC0415  # loads numpy

    _ = options.claim, options.scores_of
    _validate.confidence(confidence)
    if options.delta is not None:
        _validate.delta(options.delta)
    if threshold is not None:
        _validate.finite("threshold", threshold)


def _announcing(observations: Observations, options: ClaimOptions) -> AbstractContextManager[None]:
    """Announce an analysis that takes more than a few seconds."""
    sizes = observations.with_canary.size, observations.without_canary.size
    if max(sizes) < _QUICK and not options.end_to_end:
        return nullcontext()
    return working(f"Analyzing {sizes[0]:,} scores with the canary and {sizes[1]:,} without it")
