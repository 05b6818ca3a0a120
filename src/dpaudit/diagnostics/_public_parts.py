"""Parts of the noise that may be public: what stays for many steps, and what follows from earlier releases.

Weight decay that is written into the gradient after the noise is an example. Weights are the first ones minus
a sum of earlier releases, so the decay depends on earlier sums, but reveals nothing that is not public.

Tests of such dependence are run a second time without what earlier releases explain, if they would have a
finding. The larger of both p-values counts, so that it holds for correct noise whatever the second one is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace

import numpy as np
import scipy

from dpaudit._types import FloatArray
from dpaudit.diagnostics._dependence_tests import scaled_noise, segments
from dpaudit.diagnostics._noise_record import NoiseRecord
from dpaudit.diagnostics._p_values import Check, bonferroni

_DRIFT_BLOCK = 32  # steps
_DRIFT_LEVEL = 1e-4
_SUSPICIOUS = 0.05  # p-values above it are not findings at any level in use
_SURE = 1e-4  # p-value below which a test that is explained is mentioned
_SAME = 0.95  # correlation above which noise is repeated: no weight decay does that
_MOMENTUM = 0.9  # of an optimizer, the usual one
_MIN_STEPS = 8
_CLEARLY = 3.0  # standard errors
_NOTE = (
    "The release contains something besides the sum and the noise that earlier releases explain, as weight "
    "decay does that is added after the noise: it is not a leak if it depends on nothing else."
)


def explained(
    record: NoiseRecord,
    checks: Sequence[Check],
    tests: Mapping[str, Callable[[NoiseRecord], Check | None]],
) -> tuple[list[Check], list[str]]:
    """Return the checks with the larger p-value of two, with and without what earlier releases explain.

    Only ``tests`` are repeated, and only if they would have a finding. The second list has a note if any no
    longer has.
    """
    suspects = [check for check in checks if check.name in tests and check.p_value <= _SUSPICIOUS]
    rest = _beside_releases(record) if any(check.name in tests for check in suspects) else None
    if rest is None:
        return list(checks), []
    found, is_explained = [], False
    for check in checks:
        is_repeated = check.name == "repeated-noise" and abs(check.estimate) > _SAME
        again = tests[check.name](rest) if check in suspects and not is_repeated else None
        p_value = max(check.p_value, check.p_value if again is None else again.p_value)
        is_explained |= check.p_value <= _SURE < _SUSPICIOUS < p_value
        found.append(replace(check, p_value=p_value))
    return found, [_NOTE] if is_explained else []


def _beside_releases(record: NoiseRecord) -> NoiseRecord | None:
    """Return the record without the part of the noise that weights explain; None if there is none.

    Weights are a constant minus a multiple of the sum of earlier releases; with momentum, there is a second
    multiple, of their moving average. The constant and both multiples are fitted. Decay has the sign of the
    weights, so the first multiple has to be clearly negative: a part of earlier sums does not make it so.
    """
    sums = record.known if record.known_examples is None else record.known_examples
    if sums is None:
        return None
    rest = np.empty_like(record.rows)
    for part in segments(record.sketches.steps):
        rows = record.rows[part].astype(np.float64)
        if len(rows) < _MIN_STEPS:
            return None
        vectors = _running(rows + sums[part])
        error = float(np.linalg.norm(vectors[0]) * np.sqrt(np.mean(rows * rows)))
        if np.vdot(rows, vectors[0]) >= -_CLEARLY * error:
            return None
        centered = [vector - vector.mean(axis=0) for vector in (rows, *vectors)]
        products = np.array([[np.vdot(one, other) for other in centered] for one in centered])
        factors = np.linalg.lstsq(products[1:, 1:], products[1:, 0], rcond=None)[0]
        rest[part] = centered[0] - sum(
            factor * vector for factor, vector in zip(factors, centered[1:], strict=True)
        )
    found = copy(record)
    found.share("rows", rest)
    return found


def _running(releases: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return for each step the sum of all earlier releases, and the same with those long ago fading out."""
    totals, fading = np.zeros_like(releases), np.zeros_like(releases)
    for step in range(1, len(releases)):
        totals[step] = totals[step - 1] + releases[step - 1]
        fading[step] = _MOMENTUM * fading[step - 1] + releases[step - 1]
    return totals, fading


def drift_note(record: NoiseRecord) -> str | None:
    """Return a question if the noise has a mean that stays for many steps, which need not be a leak."""
    num_rows, width = record.rows.shape
    if num_rows < 2 * _DRIFT_BLOCK:
        return None
    rows = scaled_noise(record)
    num_blocks = num_rows // _DRIFT_BLOCK
    blocks = rows[: num_blocks * _DRIFT_BLOCK].reshape(num_blocks, _DRIFT_BLOCK, width)
    p_values = [
        _mean_p_value(rows[None], record.resolution),
        _mean_p_value(blocks, record.resolution),
    ]
    if bonferroni(min(p_values), len(p_values)) > _DRIFT_LEVEL:
        return None
    return (
        "The release contains something besides the sum and the noise that stays for many steps: does it "
        "depend on the data? If not, as with weight decay, it is not a leak: subtract it first."
    )


def _mean_p_value(blocks: FloatArray, resolution: float) -> float:
    """Return the p-value of an F test of the squared means of blocks (blocks x steps x coordinates)."""
    num_blocks, num_rows, width = blocks.shape
    means = np.abs(blocks.mean(axis=1))
    within = float(blocks.var(axis=1, ddof=1).mean())
    between = num_rows * float((np.maximum(means - resolution, 0.0) ** 2).mean())
    freedom = num_blocks * width
    return float(scipy.stats.f.sf(between / max(within, 1e-300), freedom, freedom * (num_rows - 1)))
