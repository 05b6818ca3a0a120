"""The claim of a training that is observed, as far as it can be read there.

What a claim of DP-SGD is made of, as far as it is known. What an observer knows of a training besides its
claim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from dpaudit.accounting import Claim
from dpaudit.canaries import GradientCanary, InputCanary
from dpaudit.errors import InputError
from dpaudit.recording._whole_run import require_no_epsilon

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


_ROUNDED = 0.01  # a rate may be of whole batches or of examples: these differ by less


class Claims:
    """Terms that are ``read`` from the training; those that are ``given`` count more.

    Without a number of steps, the claim is of those that were recorded.
    """

    def __init__(self, read: Callable[[], Terms], given: Terms) -> None:
        self._read, self.given = read, given
        self._made: dict[Terms, Claim] = {}

    def terms(self, asked: Terms, num_done: int) -> Terms:
        """What is known now; what is ``asked`` for counts most."""
        known = self._read().overridden(self.given).overridden(asked)
        return Terms(num_steps=num_done or None).overridden(known)

    def remarks(self, asked: Terms) -> tuple[str, ...]:
        """What of the claim contradicts the training, and does not show in the scores of steps."""
        here = self._read().sample_rate
        said = self.given.overridden(asked).sample_rate
        if here is None or said is None or math.isclose(here, said, rel_tol=_ROUNDED):
            return ()
        return (
            f"sample_rate={said:g} was given for the claim, and this training says {here:g}: epsilons are of "
            "the rate that was given, which steps do not test",
        )

    def claim(self, asked: Terms, num_done: int) -> Claim:
        """The claim of these terms; its epsilon is found once."""
        terms = self.terms(asked, num_done)
        if terms.num_steps is not None and num_done > terms.num_steps:
            raise InputError(
                f"Expected at most num_steps={terms.num_steps} steps, which the claim is of, got {num_done}: "
                "a longer training has a larger epsilon, so that the claim does not hold for it."
            )
        if terms not in self._made:
            self._made[terms] = terms.claim()
        return self._made[terms]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Numbers of the training that a mistake may leave in its scores: for guesses at what went wrong."""

    canary: GradientCanary | InputCanary
    max_grad_norm: float | None = None
    batch_size: float | None = None

    @property
    def canary_scale(self) -> float | None:
        """How long the canary is, in clipping norms; None for an example, whose gradient is as it is."""
        return self.canary.scale if isinstance(self.canary, GradientCanary) else None


def scale_of(canary: GradientCanary | InputCanary) -> float:
    """How long a canary is before clipping, in clipping norms; an example is scored by what it is."""
    return canary.scale if isinstance(canary, GradientCanary) else 1.0
