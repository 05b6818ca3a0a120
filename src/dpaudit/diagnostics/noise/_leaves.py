"""Whether the noise of one leaf is that of another."""

from __future__ import annotations

import numpy as np

from dpaudit.diagnostics._check import Check
from dpaudit.diagnostics._exact import any_of, near_line
from dpaudit.diagnostics.noise._record import NoiseRecord
from dpaudit.stats._types import FloatArray

__all__ = ["leaf_correlation"]

_SAME = 0.95


def leaf_correlation(record: NoiseRecord) -> Check | None:
    """The two leaves whose first coordinates are most alike over all steps.

    A generator that starts anew for each leaf gives equal noise to leaves of equal shape, and often the same
    first numbers to others.
    """
    layout = record.layout
    if layout.compared.size < 2:
        return None
    widths = (layout.heads >= 0).sum(axis=1)
    common = np.minimum.outer(widths, widths)
    squares = _squares(record)[np.arange(len(widths))[:, None], common - 1]
    numbers = record.num_steps * common
    p_values = near_line(record.products, squares, squares.T, numbers)
    upper = np.triu_indices(len(widths), 1)
    place = int(np.argmin(p_values[upper]))
    one, other = int(upper[0][place]), int(upper[1][place])
    correlations = _correlations(record.products, squares)
    names = [layout.names[layout.compared[leaf]] for leaf in (one, other)]
    pairs = int(np.count_nonzero(np.abs(correlations[upper]) > _SAME))
    more = f"; {pairs} of {len(upper[0])} pairs of leaves are alike" if pairs > 1 else ""
    return Check(
        name="leaf-correlation",
        p_value=any_of(p_values[one, other], len(upper[0])),
        sentence=f"The noise of leaves {names[0]} and {names[1]} has a correlation of "
        f"{correlations[one, other]:.2g}{more}.",
        estimate=float(correlations[one, other]),
    )


def _squares(record: NoiseRecord) -> FloatArray:
    """The squared length of the first so many coordinates of each leaf: leaves x how many."""
    heads = record.layout.heads
    energies = np.where(heads >= 0, record.energies[heads], 0.0)
    return np.cumsum(energies, axis=1)


def _correlations(products: FloatArray, squares: FloatArray) -> FloatArray:
    lengths = np.sqrt(squares * squares.T)
    return np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
