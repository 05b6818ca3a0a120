"""An epsilon that is given for a claim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpaudit.errors import InputError

__all__ = ["require_no_epsilon"]

_DPSGD = "claim=Claim.dpsgd(noise_multiplier=..., sample_rate=..., num_steps=..., delta=...)"


def require_no_epsilon(given: Mapping[str, Any], expected: str = _DPSGD) -> None:
    """Refuse an epsilon among the keywords: many mechanisms have it, and their steps differ."""
    if "epsilon" in given:
        raise InputError(
            f"Expected {expected}, got epsilon={given['epsilon']}: an epsilon alone says nothing of a step."
        )
