"""What an audit says."""

from __future__ import annotations

from enum import Enum

__all__ = ["Verdict"]


class Verdict(Enum):
    """The outcome of an audit; the value is its sentence."""

    VIOLATION = "The observations refute the claim: they tell more of the canary than it allows."
    NO_VIOLATION = (
        "The observations do not refute the claim. This does not prove it: a leak below the stated "
        "power would have gone unseen."
    )
    UNDERPOWERED = (
        "Too few observations: not even an attack without a single error could have refuted the claim."
    )
