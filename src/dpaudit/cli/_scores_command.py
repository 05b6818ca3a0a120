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
from dpaudit.cli._formats import (
    PIECE,
    Columns,
    NpzArchive,
    as_presence,
    as_words,
    listed,
    open_npz,
    read_csv_side,
    read_csv_table,
    read_csv_words,
    read_npy,
    read_parquet_side,
    read_parquet_table,
    read_parquet_words,
    readable,
    reading,
)
from dpaudit.cli._options import ClaimOptions
from dpaudit.cli._result_table import print_examined
from dpaudit.errors import InputError
from dpaudit.methods import examine, is_large
from dpaudit.stats import Observations, chunks, is_on_disk, require_higher_is_present


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
        both = self.with_canary, self.without_canary
        if self.table is not None and both == (None, None):
            return self._from_table(self.table, normalized=normalized, paired=paired, coupled=coupled)
        if self.presence is not None or self.columns.identifier is not None or paired:
            raise InputError("Expected --presence, --id-column and --paired only with a TABLE of scores.")
        if self.table is None and self.with_canary is not None and self.without_canary is not None:
            present = _read_side(self.with_canary, self.columns)
            absent = _read_side(self.without_canary, self.columns)
            observations = Observations(
                with_canary=present, without_canary=absent, normalized=normalized, coupled=coupled
            )
            if self.with_canary.samefile(self.without_canary):  # also by two names
                raise InputError(
                    f"Expected two files, got {self.with_canary} both --with and --without the canary; pass "
                    "a file with scores and presence as TABLE."
                )
            return observations
        raise InputError(f"Expected either a TABLE or both --with and --without, got {self._given()}.")

    def _from_table(self, path: Path, **design: Any) -> Observations:
        if self.presence is None:
            return _read_table(path, self.columns, **design)
        name = self.columns.identifier
        if name is None:
            raise InputError("Expected --id-column with --presence: both files are joined by it.")
        ids = [_read_column(file, name) for file in (path, self.presence)]
        scores, present = _read_side(path, self.columns), _read_presence(self.presence, self.columns)
        if (ids[0].dtype.kind in "iu") != (ids[1].dtype.kind in "iu"):  # a .csv file has no integers
            ids = [column.astype(np.str_) for column in ids]
        return Observations.from_presence(scores, present, ids=ids[0], present_ids=ids[1], **design)

    def _given(self) -> str:
        named = (("TABLE", self.table), ("--with", self.with_canary), ("--without", self.without_canary))
        return " and ".join(name for name, path in named if path is not None) or "neither"


def _read_side(path: Path, columns: Columns) -> npt.NDArray[Any]:
    suffix = readable(path)
    with reading(path):
        if suffix == ".npy":
            return _as_floats(path, read_npy(path))
        if suffix == ".npz":
            with open_npz(path) as arrays:
                return _as_floats(path, arrays[columns.side(path, arrays.names)])
        if suffix == ".csv":
            return read_csv_side(path, columns)
        return read_parquet_side(path, columns)


def _read_column(path: Path, name: str) -> npt.NDArray[Any]:
    """Return the column or array with this name, of numbers or words."""
    suffix = readable(path)
    with reading(path):
        if suffix == ".npy":
            raise InputError(f"Expected a .csv, .parquet or .npz table with {name!r}, got {path}.")
        if suffix == ".npz":
            with open_npz(path) as arrays:
                return arrays[name]
        if suffix == ".csv":
            return as_words(path, read_csv_words(path, name))
        return read_parquet_words(path, name)


def _read_presence(path: Path, columns: Columns) -> npt.NDArray[Any]:
    return as_presence(path, columns.presence, _read_column(path, columns.presence))


def _read_table(path: Path, columns: Columns, *, paired: bool, **design: Any) -> Observations:
    suffix = readable(path)
    with reading(path):
        if suffix == ".npy":
            raise InputError(f"Expected a .csv, .parquet or .npz table, or --with and --without, got {path}.")
        if suffix == ".npz":
            with open_npz(path) as arrays:
                if {"with_canary", "without_canary"} <= set(arrays.names):
                    sides = (_as_floats(path, arrays[f"{side}_canary"]) for side in ("with", "without"))
                    return Observations(with_canary=next(sides), without_canary=next(sides), **design)
                scores, present = _from_npz(path, arrays, columns)
                ids = None if columns.identifier is None else arrays[columns.identifier]
        else:
            scores, present = (read_csv_table if suffix == ".csv" else read_parquet_table)(path, columns)
            ids = None if columns.identifier is None else _read_column(path, columns.identifier)
        if ids is None and not paired and _is_long(scores, present):
            with_canary, without_canary = _split(path, scores, present)
            return Observations(with_canary=with_canary, without_canary=without_canary, **design)
    return Observations.from_presence(np.array(scores), present, ids=ids, paired=paired, **design)


def _is_long(scores: npt.NDArray[Any], present: npt.NDArray[Any]) -> bool:
    """Return whether both sides stay on disk: a table of this size is split piece by piece."""
    is_split = present.shape == scores.shape and 0 < np.count_nonzero(present) < present.size
    return bool(is_split and scores.ndim == 1 and scores.size > PIECE)


def _split(
    path: Path, scores: npt.NDArray[Any], present: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the one-dimensional scores with and without the canary, in temporary files."""
    with_canary, without_canary = (
        stored(path, (piece[present[start : start + piece.size] == side] for start, piece in chunks(scores)))
        for side in (True, False)
    )
    return with_canary, without_canary


def _as_floats(path: Path, scores: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return many whole numbers as floats on disk, because they would be converted in memory."""
    if scores.dtype.kind not in "iub" or scores.size <= PIECE:
        return scores
    return stored(path, (piece for _, piece in chunks(scores)), scores.shape)


def _from_npz(
    path: Path, arrays: NpzArchive, columns: Columns
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    if not {columns.score, columns.presence} <= set(arrays.names):
        raise InputError(
            f"Expected arrays 'with_canary' and 'without_canary', or {columns.score!r} and "
            f"{columns.presence!r}, in {path}, got {listed(arrays.names)}."
        )
    present = as_presence(path, columns.presence, arrays[columns.presence])
    return _as_floats(path, arrays[columns.score]), present


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
    _require_different(columns)
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


def _require_different(columns: Columns) -> None:
    names = [name for name in (columns.score, columns.presence, columns.identifier) if name is not None]
    if len(set(names)) < len(names):
        raise InputError(
            f"Expected different columns for scores, presence and identifiers, got {listed(names)}; see "
            "--score-column, --presence-column and --id-column."
        )


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
