"""Whether the noise of one leaf is that of another."""

from __future__ import annotations

import numpy as np

from dpaudit.diagnostics._check import Check
from dpaudit.diagnostics._exact import any_of
from dpaudit.diagnostics._signs import correlation, same_signs
from dpaudit.diagnostics.noise._record import NoiseRecord

__all__ = ["leaf_correlation"]

_SAME = 0.95


def leaf_correlation(record: NoiseRecord) -> Check | None:
    """The two leaves whose first coordinates have the same signs most often, over all steps.

    A generator that starts anew for each leaf gives equal noise to leaves of equal shape, and often the same
    first numbers to others.
    """
    layout = record.layout
    if layout.compared.size < 2:
        return None
    widths = (layout.heads >= 0).sum(axis=1)
    upper = np.triu_indices(len(widths), 1)
    agreeing, differing = record.agreeing[upper], record.differing[upper]
    numbers = record.num_steps * np.minimum.outer(widths, widths)[upper]
    p_values, correlations = same_signs(agreeing, differing, numbers), correlation(agreeing, differing)
    place = int(np.argmin(p_values))
    one, other = (layout.names[layout.compared[leaf[place]]] for leaf in upper)
    pairs = int(np.count_nonzero(np.abs(correlations) > _SAME))
    more = f"; {pairs} of {numbers.size} pairs of leaves are alike" if pairs > 1 else ""
    return Check(
        name="leaf-correlation",
        p_value=any_of(p_values[place], numbers.size),
        sentence=f"The noise of leaves {one} and {other} has a correlation of "
        f"{correlations[place]:.2g}{more}.",
        estimate=float(correlations[place]),
    )
