"""What a claim of DP-SGD is made of, as far as it is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from dpaudit.accounting import Claim
from dpaudit.errors import InputError
from dpaudit.recording._epsilon import require_no_epsilon

__all__ = ["Terms", "require_terms"]

_MISSING = {
    "noise_multiplier": "the noise over the clipping norm",
    "sample_rate": "how likely an example is to enter a batch, which no loader and no accountant says",
    "num_steps": "the number of steps that are planned",
    "delta": "such as 1e-5",
}


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The four numbers of a claim; None: not known, or not yet.

    ``noises`` are those of a training that changed its noise, in order: none of them is the claimed one.
    """

    noise_multiplier: float | None = None
    sample_rate: float | None = None
    num_steps: int | None = None
    delta: float | None = None
    noises: tuple[float, ...] | None = None

    def overridden(self, other: Terms) -> Terms:
        """These, but the other ones where they are known."""
        known = {field.name: getattr(other, field.name) for field in fields(other)}
        return replace(self, **{name: value for name, value in known.items() if value is not None})

    def known(self, *names: str) -> dict[str, Any]:
        """These numbers, or all of them, or a sentence that says what is missing."""
        for name in names or _MISSING:
            if getattr(self, name) is None:
                raise InputError(
                    f"Expected {name}=..., {self._why_missing(name)}: pass it to the observer or to audit()."
                )
        if self.noise_multiplier == 0:
            raise InputError(
                "Expected noise_multiplier=... above 0, got 0: without noise there is no claim. If the "
                "training adds none by mistake, pass what it claims to the observer or to audit()."
            )
        return {name: getattr(self, name) for name in names or _MISSING}

    def _why_missing(self, name: str) -> str:
        if name == "noise_multiplier" and self.noises:
            return (
                "the claimed one, because the optimizer's noise multiplier changed during the run (from "
                f"{self.noises[0]:g} to {self.noises[-1]:g}) and cannot be read as the claim"
            )
        return _MISSING[name]

    def claim(self) -> Claim:
        """The claim of these numbers."""
        return Claim.dpsgd(**self.known())


def require_terms(given: Mapping[str, Any]) -> None:
    """Refuse an epsilon among keywords that are to say what a claim is made of."""
    require_no_epsilon(given, "noise_multiplier=..., sample_rate=... and num_steps=... of the claim")
