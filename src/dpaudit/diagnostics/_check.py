"""One test, and what it says if it found something."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SMALLEST", "Check", "Finding"]

SMALLEST = 1e-12  # smaller ones tell a reader no more


@dataclass(frozen=True, kw_only=True)
class Check:
    """A test that was run: its p-value is below any level with at most that probability, if all is right.

    The sentence is what the test says if it is a finding; ``estimate`` is the number in it that a
    developer can act on, such as the ratio of the noise to the claim.
    """

    name: str
    p_value: float
    sentence: str
    estimate: float


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A test that a correct training would hardly fail, all other tests of the diagnosis considered.

    ``adjusted`` is the p-value corrected for their number: the smallest level at which the diagnosis
    would still have this finding.
    """

    name: str
    p_value: float
    adjusted: float
    sentence: str
    estimate: float

    def __str__(self) -> str:
        p_value = f"p = {self.p_value:.2g}" if self.p_value >= SMALLEST else f"p < {SMALLEST:g}"
        return f"{self.name} ({p_value}): {self.sentence}"
