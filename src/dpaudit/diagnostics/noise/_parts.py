"""Whether there is as much noise as claimed in each step, in each leaf, in each coordinate."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dpaudit.diagnostics._check import Check
from dpaudit.diagnostics._exact import any_of, below_claim, below_rest
from dpaudit.diagnostics.noise._record import NoiseRecord
from dpaudit.stats._types import ArrayLike, FloatArray

__all__ = ["coordinate_noise", "leaf_noise", "step_noise"]

_SURELY = 1e-6  # how unlikely each part is that is counted as one without its noise


def step_noise(record: NoiseRecord) -> Check | None:
    """The step with the least noise, such as an empty batch that is released without any."""
    energies = np.asarray(record.step_energies)
    return _least(record, "step", energies, record.energies.size, str)


def leaf_noise(record: NoiseRecord) -> Check | None:
    """The leaf with the least noise."""
    energies = np.add.reduceat(record.energies, record.layout.starts)
    counts = record.num_steps * record.layout.sizes
    return _least(record, "leaf", energies, counts, lambda leaf: record.layout.names[leaf])


def coordinate_noise(record: NoiseRecord) -> Check | None:
    """The coordinate with the least noise: some may have been released as they are."""
    kept = record.layout.kept
    return _least(
        record,
        "coordinate",
        record.energies,
        record.num_steps,
        lambda place: str(place if kept is None else kept[place]),
    )


def _least(
    record: NoiseRecord, part: str, energies: FloatArray, counts: ArrayLike, called: Callable[[int], str]
) -> Check | None:
    """A part that has less than claimed and less than the others: what all lack is said once, elsewhere."""
    if energies.size == 1:
        return None
    numbers = np.broadcast_to(np.asarray(counts, dtype=np.float64), energies.shape)
    rest = below_rest(energies, numbers, record.energy, record.count, record.resolution)
    p_values = np.maximum(below_claim(energies, numbers, record.resolution), rest)
    least = int(np.argmin(p_values))
    ratio = float(np.sqrt(energies[least] / numbers[least]))
    return Check(
        name=f"{part}-noise",
        p_value=any_of(p_values[least], energies.size),
        sentence=f"The noise of {part} {called(least)} is {ratio:.2g} of the claim{_others(part, p_values)}.",
        estimate=ratio,
    )


def _others(part: str, p_values: FloatArray) -> str:
    """How many more have too little."""
    count = int(np.count_nonzero(p_values * p_values.size <= _SURELY))
    return f"; {count} of {p_values.size} such parts have too little ({part} by {part})" if count > 1 else ""
