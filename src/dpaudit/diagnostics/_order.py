"""Which of several findings is told first."""

from __future__ import annotations

from dpaudit.diagnostics._check import SMALLEST, Finding

__all__ = ["certainty"]

# What a finding brings about comes after it: noise that comes again, or is shared, has odd amounts, too, and
# shuffled batches are of one size.
_ORDER = (
    "repeated-noise",
    "leaf-correlation",
    "step-correlation",
    "coordinate-correlation",
    "step-noise",
    "leaf-noise",
    "coordinate-noise",
    "noise-shape",
    "noise-variance",
    "participation-counts",
    "batch-overlap",
    "batch-sizes",
)
_PARTS = ("step-noise", "leaf-noise", "coordinate-noise")
_SHARED = 16.0  # squared sums over a leaf that are so much too large are no chance of noise that comes again
_SAME = 0.95  # the correlation from which on noise comes again, and is not only alike
_NOTHING = 1e-3  # of the claim


def certainty(finding: Finding) -> tuple[float, float, float, int]:
    """The most certain first; of those that leave no doubt, causes before what follows from them.

    Of parts without their noise, those that have least of it come first.
    """
    place = _ORDER.index(finding.name) if finding.name in _ORDER else len(_ORDER)
    rank, least = float(place), 0.0
    if finding.name in _PARTS:
        rank, least = float(_ORDER.index(_PARTS[0])), max(finding.estimate, _NOTHING)
    if finding.name == "coordinate-correlation" and finding.estimate > _SHARED:
        rank = -1.0
    if finding.name == "repeated-noise" and abs(finding.estimate) < _SAME:
        rank = _ORDER.index("step-correlation") + 0.5
    return max(finding.p_value, SMALLEST), rank, least, place
