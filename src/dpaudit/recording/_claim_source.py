"""Where the claim of a recorder comes from: it was given, or it is read from the training.

A claim of DP-SGD is made of four numbers. What an observer can read of them in a training is completed, and
overridden, by what its user gives to the observer or to ``audit()``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from dpaudit.accounting import Claim
from dpaudit.canaries import GradientCanary, InputCanary
from dpaudit.errors import InputError
from dpaudit.recording._signal_and_noise import UntestedError
from dpaudit.stats import Gaussian

_MISSING = {
    "noise_multiplier": "the noise over the clipping norm",
    "sample_rate": "how likely an example is to enter a batch, which no loader and no accountant says",
    "num_steps": "the number of steps that are planned",
    "delta": "such as 1e-5",
}
_SAME_RATE = 0.01  # a rate may be of whole batches or of examples: these differ by less


@dataclass(frozen=True, kw_only=True)
class DPSGDParams:
    """The four numbers of a claim; None: not known, or not yet.

    ``noises`` are those of a training that changed its noise, in order: none of them is the claimed one.
    """

    noise_multiplier: float | None = None
    sample_rate: float | None = None
    num_steps: int | None = None
    delta: float | None = None
    noises: tuple[float, ...] | None = None

    def overridden(self, other: DPSGDParams) -> DPSGDParams:
        """Return these numbers, with the other ones where they are known."""
        known = {field.name: getattr(other, field.name) for field in fields(other)}
        return replace(self, **{name: value for name, value in known.items() if value is not None})

    def known(self, *names: str) -> dict[str, Any]:
        """Return these numbers, by default all four, or raise a sentence that says what is missing."""
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


@dataclass(frozen=True, kw_only=True)
class TrainingInfo:
    """Numbers of the training that a mistake may leave in its scores, to guess at what went wrong."""

    canary: GradientCanary | InputCanary
    max_grad_norm: float | None = None
    batch_size: float | None = None

    @property
    def canary_scale(self) -> float | None:
        """How long the canary is, in clipping norms; None for an example, whose gradient is as it is."""
        return self.canary.scale if isinstance(self.canary, GradientCanary) else None


UNKNOWN = DPSGDParams()


class ClaimSource(Protocol):
    """The part of a recorder that knows what is claimed."""

    def pop_params(self, keywords: dict[str, Any]) -> DPSGDParams:
        """Take the parts of a claim that ``audit()`` was given out of its keywords; refuse an epsilon."""

    def claim(self, num_done: int, given: DPSGDParams = UNKNOWN, *, may_be_longer: bool = False) -> Claim:
        """Return the claim on a training with this many steps so far; what is ``given`` counts most.

        A training that is longer than claimed is refused, unless it ``may_be_longer``.
        """

    def noise_multiplier(self, given: float | None) -> float:
        """Return the noise multiplier to test noise against: the given one, else the claimed one."""

    def remarks(self, given: DPSGDParams) -> tuple[str, ...]:
        """Return what of the claim contradicts the training without showing in the scores of steps."""


class GivenClaim:
    """A claim that is known before the first step."""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim

    def pop_params(self, keywords: dict[str, Any]) -> DPSGDParams:
        _require_no_epsilon(
            keywords, "claim=Claim.dpsgd(noise_multiplier=..., sample_rate=..., num_steps=..., delta=...)"
        )
        return UNKNOWN

    def claim(self, num_done: int, given: DPSGDParams = UNKNOWN, *, may_be_longer: bool = False) -> Claim:
        del num_done, given, may_be_longer
        return self._claim

    def noise_multiplier(self, given: float | None) -> float:
        mu = claimed_mu(self._claim)
        if mu is None:
            raise UntestedError(
                f"Expected a claim of Gaussian noise for tests of the noise, got {self._claim.summary}."
            )
        return given or 1 / mu

    def remarks(self, given: DPSGDParams) -> tuple[str, ...]:
        del given
        return ()


class ReadClaim:
    """A claim of DP-SGD whose parameters are ``read`` from the training; those ``given`` count more.

    Without a number of steps, the claim is of those that were recorded.
    """

    def __init__(self, read: Callable[[], DPSGDParams], given: DPSGDParams = UNKNOWN) -> None:
        self._read, self._given = read, given
        self._made: dict[DPSGDParams, Claim] = {}  # the epsilon of each is computed once

    def pop_params(self, keywords: dict[str, Any]) -> DPSGDParams:
        _require_no_epsilon(keywords, "noise_multiplier=..., sample_rate=... and num_steps=... of the claim")
        return DPSGDParams(**{name: keywords.pop(name) for name in _MISSING if name in keywords})

    def params(self, num_done: int, given: DPSGDParams = UNKNOWN) -> DPSGDParams:
        """Return what is known now."""
        known = self._read().overridden(self._given).overridden(given)
        return DPSGDParams(num_steps=num_done or None).overridden(known)

    def claim(self, num_done: int, given: DPSGDParams = UNKNOWN, *, may_be_longer: bool = False) -> Claim:
        params = self.params(num_done, given)
        if params.num_steps is not None and num_done > params.num_steps and not may_be_longer:
            raise InputError(
                f"Expected at most num_steps={params.num_steps} steps, which the claim is of, got "
                f"{num_done}: a longer training has a larger epsilon, so that the claim does not hold for it."
            )
        if params not in self._made:
            self._made[params] = Claim.dpsgd(**params.known())
        return self._made[params]

    def noise_multiplier(self, given: float | None) -> float:
        known = self.params(0, DPSGDParams(noise_multiplier=given)).known("noise_multiplier")
        return float(known["noise_multiplier"])

    def remarks(self, given: DPSGDParams) -> tuple[str, ...]:
        read = self._read().sample_rate
        claimed = self._given.overridden(given).sample_rate
        if read is None or claimed is None or math.isclose(read, claimed, rel_tol=_SAME_RATE):
            return ()
        return (
            f"sample_rate={claimed:g} was given for the claim, and this training says {read:g}: epsilons are "
            "of the rate that was given, which steps do not test",
        )


def claimed_mu(claim: Claim) -> float | None:
    """Return one over the noise multiplier of the steps of a claim; None if it is not of Gaussian noise."""
    hypothesis = claim.hypothesis(None)
    is_known = isinstance(hypothesis.tradeoff, Gaussian) and hypothesis.parameter > 0
    return hypothesis.parameter if is_known else None


def _require_no_epsilon(keywords: Mapping[str, Any], expected: str) -> None:
    """Refuse an epsilon among the keywords: many mechanisms have it, and their steps differ."""
    if "epsilon" in keywords:
        raise InputError(
            f"Expected {expected}, got epsilon={keywords['epsilon']}: an epsilon alone says nothing of a "
            "step."
        )
