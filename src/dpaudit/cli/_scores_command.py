"""``dpaudit scores``: bounds and a verdict from score files."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from dpaudit import _validate
from dpaudit._io import stored
from dpaudit.cli import _options as opt
from dpaudit.cli._console import EXIT_STATUS, output, print_json, working
from dpaudit.cli._exit_status import ExitStatus
from dpaudit.cli._formats import PIECE, ScoreTable, listed, opened
from dpaudit.cli._options import ClaimOptions
from dpaudit.cli._result_table import print_examined
from dpaudit.errors import InputError
from dpaudit.methods import examine, is_large
from dpaudit.stats import Observations, chunks, is_on_disk, require_higher_is_present


@dataclass(frozen=True)
class Columns:
    """The column names of a table."""

    score: str = "score"
    presence: str = "present"
    identifier: str | None = None

    def __post_init__(self) -> None:
        names = [name for name in (self.score, self.presence, self.identifier) if name is not None]
        if len(set(names)) < len(names):
            raise InputError(
                f"Expected different columns for scores, presence and identifiers, got {listed(names)}; see "
                "--score-column, --presence-column and --id-column."
            )

    def side(self, table: ScoreTable) -> int:
        """Return the score column of a file with one side; a single column may have any name."""
        is_named = any(table.names) and self.score != Columns.score
        return 0 if len(table.names) <= 1 and not is_named else table.index(self.score)

    def both(self, table: ScoreTable) -> tuple[int, int]:
        """Return the columns of scores and of presence; the first two of two without a header."""
        if list(table.names) == ["", ""]:
            return 0, 1
        return table.index(self.score), table.index(self.presence)


@dataclass(frozen=True)
class ScoreFiles:
    """The score files: one table, or one file per side."""

    table: Path | None
    with_canary: Path | None
    without_canary: Path | None
    columns: Columns
    presence: Path | None = None

    def read(self, *, normalized: bool, paired: bool = False, coupled: bool = False) -> Observations:
        """Read the observations; .npy files stay on disk."""
        design = {"normalized": normalized, "coupled": coupled}
        named = {"TABLE": self.table, "--with": self.with_canary, "--without": self.without_canary}
        files = {name: path for name, path in named.items() if path is not None}
        if list(files) == ["TABLE"]:
            if self.presence is not None:
                return self._joined(files["TABLE"], self.presence, paired=paired, **design)
            return self._from_table(files["TABLE"], paired=paired, **design)
        if self.presence is not None or self.columns.identifier is not None or paired:
            raise InputError("Expected --presence, --id-column and --paired only with a TABLE of scores.")
        if list(files) == ["--with", "--without"]:
            return self._from_sides(files["--with"], files["--without"], **design)
        got = " and ".join(files) or "neither"
        raise InputError(f"Expected either a TABLE or both --with and --without, got {got}.")

    def _from_sides(self, with_canary: Path, without_canary: Path, **design: Any) -> Observations:
        sides = []
        for path in (with_canary, without_canary):
            with opened(path) as table:
                sides.append(table.scores(self.columns.side(table)))
        observations = Observations(with_canary=sides[0], without_canary=sides[1], **design)
        if with_canary.samefile(without_canary):  # also by two names
            raise InputError(
                f"Expected two files, got {with_canary} both --with and --without the canary; pass "
                "a file with scores and presence as TABLE."
            )
        return observations

    def _from_table(self, path: Path, *, paired: bool, **design: Any) -> Observations:
        sides, name = ("with_canary", "without_canary"), self.columns.identifier
        with opened(path) as table:
            if path.suffix == ".npz" and set(sides) <= set(table.names):
                present, absent = (table.scores(table.index(side)) for side in sides)
                return Observations(with_canary=present, without_canary=absent, **design)
            score, presence = self.columns.both(table)
            present, scores = table.presence(presence), table.scores(score)
            ids = None if name is None else table.words(table.index(name))
            if ids is None and not paired and _is_long(scores, present):
                present, absent = _split(path, scores, present)
                return Observations(with_canary=present, without_canary=absent, **design)
        return Observations.from_presence(np.array(scores), present, ids=ids, paired=paired, **design)

    def _joined(self, path: Path, presence: Path, **design: Any) -> Observations:
        """Return the scores of one table with the presence of another, joined by identifiers."""
        name = self.columns.identifier
        if name is None:
            raise InputError("Expected --id-column with --presence: both files are joined by it.")
        with opened(path) as table:
            ids, scores = table.words(table.index(name)), table.scores(self.columns.side(table))
        with opened(presence) as table:
            present_ids = table.words(table.index(name))
            present = table.presence(table.index(self.columns.presence))
        if (ids.dtype.kind in "iu") != (present_ids.dtype.kind in "iu"):  # a .csv file has no integers
            ids, present_ids = ids.astype(np.str_), present_ids.astype(np.str_)
        return Observations.from_presence(scores, present, ids=ids, present_ids=present_ids, **design)


def _is_long(scores: npt.NDArray[Any], present: npt.NDArray[Any]) -> bool:
    """Return whether both sides stay on disk: a table of this size is split piece by piece."""
    is_split = present.shape == scores.shape and 0 < np.count_nonzero(present) < present.size
    return bool(is_split and scores.ndim == 1 and scores.size > PIECE)


def _split(path: Path, scores: npt.NDArray[Any], present: npt.NDArray[np.bool_]) -> list[npt.NDArray[Any]]:
    """Return the one-dimensional scores with and without the canary, in temporary files."""
    return [
        stored(path, (piece[present[start : start + piece.size] == side] for start, piece in chunks(scores)))
        for side in (True, False)
    ]


_QUICK = 1_000_000  # scores per side; with fewer, the analysis is fast

_Table = Annotated[
    Path | None,
    typer.Argument(
        metavar="TABLE",
        help="A .csv, .parquet or .npz file with a score and a presence column.",
        show_default=False,
    ),
]
_With = Annotated[
    Path | None,
    typer.Option("--with", metavar="FILE", help="Scores with the canary: .npy, .npz, .csv or .parquet."),
]
_Without = Annotated[
    Path | None, typer.Option("--without", metavar="FILE", help="Scores without the canary.")
]
_Score = Annotated[str, typer.Option(help="Name of the score column (or array).")]
_Presence = Annotated[
    str,
    typer.Option(help="Name of the presence column: 1 or true if the canary was present, else 0 or false."),
]
_PresenceFile = Annotated[
    Path | None,
    typer.Option("--presence", metavar="FILE", help="Table of presence, joined with TABLE by --id-column."),
]
_IdColumn = Annotated[
    str | None,
    typer.Option(help="Name of the column (or array) that identifies canaries.", show_default=False),
]
_Paired = Annotated[
    bool,
    typer.Option(
        "--paired",
        help="Every step has one score with and one without each canary, instead of a fair coin per canary.",
    ),
]
_Coupled = Annotated[
    bool,
    typer.Option(
        "--coupled",
        help="A score depends on which other canaries of its step were present: they are not counted.",
    ),
]
_Normalized = Annotated[
    bool,
    typer.Option(
        "--normalized",
        help="Scores are normalized: on average 0 without the canary and 1 with it. The threshold is 1/2.",
    ),
]
_LowerIsPresent = Annotated[
    bool,
    typer.Option(
        "--lower-is-present",
        help='Lower scores mean "present", as for a loss: scores are negated, and so is the threshold.',
    ),
]
_Threshold = Annotated[
    float | None,
    typer.Option(help='Scores above it count as "present". Must be chosen before the data are seen.'),
]


def scores(
    *,
    table: _Table = None,
    with_file: _With = None,
    without_file: _Without = None,
    score_column: _Score = Columns.score,
    presence_column: _Presence = Columns.presence,
    presence: _PresenceFile = None,
    id_column: _IdColumn = None,
    paired: _Paired = False,
    coupled: _Coupled = False,
    normalized: _Normalized = False,
    lower_is_present: _LowerIsPresent = False,
    threshold: _Threshold = None,
    confidence: opt.Confidence = 0.95,
    epsilon: opt.Epsilon = None,
    delta: opt.Delta = None,
    noise_multiplier: opt.NoiseMultiplier = None,
    sample_rate: opt.SampleRate = None,
    num_steps: opt.NumSteps = None,
    per_step: opt.PerStep = False,
    end_to_end: opt.EndToEnd = False,
    one_run: opt.OneRun = False,
    as_json: opt.Json = False,
) -> None:
    """Compute lower bounds on epsilon from scores by every method, and test a claim.

    Scores come from steps or runs with and without a canary. Higher scores mean
    "present", unless --lower-is-present is given. Two-dimensional arrays are
    steps x canaries.

    Exit status: 0 for no violation or no claim, 1 for a violation, 2 for bad
    input, 3 if underpowered, 4 if it could not be completed.
    """
    options = ClaimOptions(
        epsilon, delta, noise_multiplier, sample_rate, num_steps, end_to_end, per_step, one_run
    )
    _check(options, threshold, confidence)
    if lower_is_present and normalized:
        raise InputError(
            "Expected --normalized or --lower-is-present, got both: normalized scores are on average 0 "
            "without the canary and 1 with it."
        )
    columns = Columns(score_column, presence_column, id_column)
    files = ScoreFiles(table, with_file, without_file, columns, presence)
    observations = files.read(normalized=normalized, paired=paired, coupled=coupled)
    observations = replace(observations, scores_of=options.scores_of)
    if lower_is_present:
        observations = _negated(observations)
        threshold = None if threshold is None else -threshold
    require_higher_is_present(
        observations, "pass --lower-is-present" + (" instead of --normalized" if normalized else "")
    )
    with _announcing(observations, options):
        examined = examine(
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
        left_out = is_large(examined.observations, is_fixed=threshold is not None)
        print_examined(output(), values, left_out=left_out)
    if examined.result is not None:
        raise ExitStatus(EXIT_STATUS[examined.result.verdict])


def _check(options: ClaimOptions, threshold: float | None, confidence: float) -> None:
    """Check the options before reading files, which may be large."""
    _ = options.claim, options.scores_of
    _validate.confidence(confidence)
    if options.delta is not None:
        _validate.delta(options.delta)
    if threshold is not None:
        _validate.finite("threshold", threshold)


def _negated(observations: Observations) -> Observations:
    """Return the observations with negated scores; those of a file are negated in a temporary one."""
    sides: dict[str, Any] = {}
    for name in ("with_canary", "without_canary"):
        scores = getattr(observations, name)
        if is_on_disk(scores):
            pieces = (-piece.astype(np.float64) for _, piece in chunks(scores))
            sides[name] = stored(Path(scores.filename), pieces, scores.shape)
        else:
            sides[name] = -scores
    return replace(observations, **sides)


def _announcing(observations: Observations, options: ClaimOptions) -> AbstractContextManager[None]:
    """Announce an analysis that takes more than a few seconds."""
    sizes = observations.with_canary.size, observations.without_canary.size
    if max(sizes) < _QUICK and not options.end_to_end:
        return nullcontext()
    return working(f"Analyzing {sizes[0]:,} scores with the canary and {sizes[1]:,} without it")
