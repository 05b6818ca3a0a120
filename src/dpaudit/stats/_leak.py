"""The leak that an audit is planned to find."""

from __future__ import annotations

from dataclasses import dataclass

from dpaudit import _validate
from dpaudit.errors import InputError
from dpaudit.stats._claim import Claimed, Hypothesis
from dpaudit.stats._search import last_true

__all__ = ["Leak"]


@dataclass(frozen=True, kw_only=True)
class Leak:
    """What an audit is to find: noise at ``noise_factor`` of the claimed, or a true ``epsilon``."""

    noise_factor: float | None = None
    epsilon: float | None = None

    def __post_init__(self) -> None:
        if (self.noise_factor is None) == (self.epsilon is None):
            raise InputError(f"Expected either a noise_factor or an epsilon of the leak, got {self!r}.")
        if self.epsilon is not None:
            _validate.positive("epsilon", self.epsilon)
        elif self.noise_factor is not None and not 0 < self.noise_factor < 1:
            raise InputError(
                f"Expected noise_factor={self.noise_factor:g} in (0, 1): only less noise than claimed is "
                "a leak."
            )

    def parameter(self, claim: Claimed, hypothesis: Hypothesis) -> float:
        """The leaky mechanism's parameter in the family of ``hypothesis``."""
        if self.noise_factor is None:
            return self._with_epsilon(claim, hypothesis)
        if not hypothesis.tradeoff.is_inverse_noise:
            raise InputError(
                f"Expected the leak as an epsilon, got noise_factor={self.noise_factor:g}: the claim "
                f"({claim.summary}) says nothing of noise."
            )
        return hypothesis.parameter / self.noise_factor

    def _with_epsilon(self, claim: Claimed, hypothesis: Hypothesis) -> float:
        assert self.epsilon is not None
        claimed, epsilon = hypothesis.parameter, self.epsilon
        if epsilon > claim.epsilon:
            actual = last_true(lambda p: hypothesis.epsilon(p) <= epsilon, 1.1 * claimed)
            if actual > claimed:
                return actual
        raise InputError(
            f"Expected a true epsilon above the claimed {claim.epsilon:.4g}, got {epsilon:g}, which is no "
            "leak."
        )
