"""The result of an audit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dpaudit._plotting import draw_plane
from dpaudit.errors import InputError, ViolationError
from dpaudit.stats._bound import Bound, plain
from dpaudit.stats._claim import Claimed, Hypothesis
from dpaudit.stats._counts import ErrorCounts
from dpaudit.stats._design import Design
from dpaudit.stats._html import result_html
from dpaudit.stats._plane import Plane
from dpaudit.stats._verdict import Verdict

__all__ = ["Power", "Result"]


@dataclass(frozen=True, kw_only=True)
class Power:
    """The smallest leak that the audit would have flagged with this probability."""

    probability: float
    epsilon: float
    parameter: float
    # what the noise would be multiplied by; None where the parameter is not one over a noise
    noise_factor: float | None

    @classmethod
    def of(cls, parameter: float, hypothesis: Hypothesis, probability: float) -> Power:
        """The leak of a mechanism with this parameter, in all its terms."""
        scales = hypothesis.tradeoff.is_inverse_noise
        return cls(
            probability=probability,
            epsilon=hypothesis.epsilon(parameter),
            parameter=parameter,
            noise_factor=hypothesis.parameter / parameter if scales else None,
        )

    def __str__(self) -> str:
        if math.isinf(self.parameter):
            return f"no leak would have been flagged with {100 * self.probability:g} % probability"
        text = f"a true epsilon of {self.epsilon:.4g}"
        if self.noise_factor is not None:
            text += f" (noise at {self.noise_factor:.4g} of the claimed)"
        return (
            f"{text} would have been flagged with {100 * self.probability:g} % probability by an ideal attack"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "probability": self.probability,
            "epsilon": plain(self.epsilon),
            "parameter": plain(self.parameter),
            "noise_factor": self.noise_factor,
        }


@dataclass(frozen=True, kw_only=True)
class Result:
    """Claim, bound, verdict and power of one audit.

    ``not_covered`` says in sentences which parts of a training the audit did not go through.
    """

    claim: Claimed
    bound: Bound
    verdict: Verdict
    hypothesis: Hypothesis
    design: Design
    not_covered: tuple[str, ...] = ()

    @cached_property
    def power(self) -> Power:
        """The smallest leak this audit would have flagged with probability 80 %; found on first use."""
        return Power.of(self.design.smallest_leak(self.hypothesis.parameter), self.hypothesis, 0.8)

    @property
    def sentence(self) -> str:
        """The verdict's sentence, with the condition under which it holds, if there is one."""
        if self.verdict is Verdict.VIOLATION and self.hypothesis.condition:
            return f"{self.verdict.value} This holds if {self.hypothesis.condition}."
        return self.verdict.value

    def raise_for_violation(self) -> None:
        """Raise :class:`dpaudit.ViolationError` if the claim is refuted; else do nothing."""
        if self.verdict is Verdict.VIOLATION:
            raise ViolationError(str(self))

    def __str__(self) -> str:
        lines = [
            f"{self.verdict.name}. {self.sentence}",
            f"  claim: {self.claim.summary}",
            f"  bound: {self.bound.statement}",
            f"  method: {self.bound.tradeoff} + {self.bound.method} + {self.bound.rule}",
            f"  power: {self.power}",
        ]
        lines += [f"  assumes: {text}" for text in self.bound.assumptions]
        return "\n".join(lines + [f"  not covered: {text}" for text in self.not_covered])

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        return result_html(
            self.verdict.name,
            self.sentence,
            [
                ("claim", self.claim.summary),
                ("bound", self.bound.statement),
                ("method", f"{self.bound.tradeoff} + {self.bound.method} + {self.bound.rule}"),
                ("power", str(self.power)),
            ],
            [("assumes", self.bound.assumptions), ("not covered", self.not_covered)],
        )

    def plot(self, *, ax: Any = None) -> Any:
        """Draw the claimed curve, that of the bound, and the measured rates with their region.

        Needs matplotlib. Gives the axes back: ``ax``, or new ones.
        """
        plane = Plane.of(
            _rates(self.bound),
            tradeoff=self.hypothesis.tradeoff,
            claimed=self.hypothesis.parameter,
            bound=self.bound.parameter,
            confidence=self.bound.confidence,
        )
        return draw_plane(plane, ax)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "verdict": self.verdict.name,
            "sentence": self.sentence,
            "claim": {
                "summary": self.claim.summary,
                "epsilon": plain(self.claim.epsilon),
                "delta": self.claim.delta,
                "parameter": plain(self.hypothesis.parameter),
            },
            "bound": self.bound.to_dict(),
            "power": self.power.to_dict(),
            "not_covered": list(self.not_covered),
        }


def _rates(bound: Bound) -> ErrorCounts:
    if not isinstance(bound.counts, ErrorCounts):
        raise InputError(f"Expected a bound on error rates to plot, got one on {bound.counts!r}.")
    return bound.counts
