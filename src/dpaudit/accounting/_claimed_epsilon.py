"""The epsilon that was claimed beside the parameters, compared with what the accountant computes from them.

A figure that is smaller than that of its parameters is contradicted by arithmetic alone. One that other
accountants give for them is not: those of Opacus and dp-accounting are larger than the exact epsilon, by up
to 0.01 (PRV) or by 7 % and more (moments, RDP). Nor is one that was rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property

import numpy as np
from scipy import special

from dpaudit import _validate
from dpaudit.accounting._pld import epsilon_above
from dpaudit.diagnostics import CheckResults, Finding
from dpaudit.errors import InputError


@dataclass(frozen=True, kw_only=True)
class DPSGDNumbers:
    """What an epsilon of DP-SGD is computed from."""

    noise: float
    sample_rate: float
    num_steps: int
    delta: float

    @cached_property
    def by_moments(self) -> float:
        """Epsilon by Renyi differential privacy, which other accountants compute.

        Mironov et al. 2019, https://arxiv.org/abs/1908.10530, converted by Canonne et al. 2020.
        """
        orders = np.arange(2.0, 257.0)  # integers, at which a closed form holds
        order, drawn = orders[:, None], np.arange(orders[-1] + 1)
        others, log_factorial = np.maximum(order - drawn, 0.0), special.loggamma
        logs = log_factorial(order + 1) - log_factorial(drawn + 1) - log_factorial(others + 1)
        logs += special.xlogy(drawn, self.sample_rate) + special.xlog1py(others, -self.sample_rate)
        logs += drawn * (drawn - 1) / (2 * self.noise**2)
        moments = special.logsumexp(np.where(drawn <= order, logs, -np.inf), axis=1)
        divergences = self.num_steps * moments / (orders - 1)
        epsilons = divergences + np.log1p(-1 / orders) - np.log(self.delta * orders) / (orders - 1)
        return float(max(epsilons.min(), 0.0))

    def has(self, epsilon: float) -> bool:
        """Return whether an accountant may print this epsilon for these numbers."""
        slack = 5e-4 * epsilon  # by which accountants of one kind differ
        prv_error = 0.01  # that Opacus adds, and with which it fits noise to an epsilon
        is_target = _exponent(epsilon) > -2  # a rounder figure than accountants print: noise was fitted to it
        low = epsilon - slack - (prv_error if is_target else _half_of_last_digit(epsilon))
        high = epsilon + slack + (0.0 if is_target else _half_of_last_digit(epsilon))
        # of 130 figures with other mistakes than those below, 10 fit one by accident; 19 of 78 without this
        # limit of the room, which figures of few digits exceed
        is_vague = high - low > 0.015 * epsilon
        if is_vague or self.by_moments < low:  # which is more than the exact one
            return False
        with suppress(InputError):
            exact = epsilon_above(self.noise, self.sample_rate, self.num_steps, self.delta)
            return any(low <= figure <= high for figure in (self.by_moments, exact, exact + prv_error))
        return False

    def mistaken(self) -> Iterator[tuple[str, DPSGDNumbers]]:
        """Yield the numbers of usual mistakes that make epsilon smaller, in words and as numbers."""
        epochs = round(self.num_steps * self.sample_rate)
        if 1 <= epochs < self.num_steps:
            yield f"{_steps(epochs)}, the number of epochs", replace(self, num_steps=epochs)
        for divisor in (2, 4, 8):
            share, rate = f"1/{divisor}", self.sample_rate / divisor
            steps = self.num_steps / divisor
            if steps.is_integer():
                yield f"{_steps(int(steps))}, {share} of them", replace(self, num_steps=int(steps))
            smaller = replace(self, sample_rate=rate)
            yield f"sample rate {rate:g}, that of a batch of {share} of the size", smaller
            more = replace(smaller, num_steps=divisor * self.num_steps)
            yield f"{_steps(more.num_steps)} at sample rate {rate:g}, those of parts of batches", more
        for exponent in range(2, 11):
            delta = 10.0**-exponent
            if delta > 1.01 * self.delta:
                yield f"delta {delta:g}", replace(self, delta=delta)
        yield (
            f"noise multiplier {2 * self.noise:g}, twice the claimed one",
            replace(self, noise=2 * self.noise),
        )


def compared(
    claimed: float, computed: float, delta: float, numbers: DPSGDNumbers | None, *, is_whole: bool
) -> CheckResults:
    """Return what contradicts the claimed epsilon, given that of its parameters.

    ``numbers`` are None if the mechanism is not made of them. Unless the claim ``is_whole``, the number of
    steps was not stated, and the run may have more of them.
    """
    shown = _validate.rounded(computed)
    sentence = f"Epsilon {claimed:.12g} was claimed; these parameters have {shown} at delta {delta:g}"
    if computed > claimed + max(rounding_of(claimed), _half_of_last_digit(claimed)):
        finding = Finding.certain("claimed-epsilon", f"{sentence}.")
        cause = "" if numbers is None else likely_mistake(claimed, numbers)
        return CheckResults(certain=(replace(finding, cause=cause),))
    if computed > claimed + rounding_of(claimed):
        sentence += f", which is {claimed:.12g} only if it is rounded down."
        return CheckResults(to_check=(Finding.certain("rounded-epsilon", sentence),))
    largest = computed if numbers is None else max(computed, numbers.by_moments)
    if claimed <= largest + max(rounding_of(claimed), _half_of_last_digit(claimed)):
        return CheckResults()
    advice = "the claim is looser than it need be, or was computed for others"
    if not is_whole:
        advice = "these are the recorded steps; pass num_steps=... to compare all"
    return CheckResults(notes=(f"{sentence}: {advice}",))


def likely_mistake(claimed: float, numbers: DPSGDNumbers) -> str:
    """Return a question about the mistakes that give exactly this figure; empty if none or many do."""
    fits = [words for words, mistaken in numbers.mistaken() if mistaken.has(claimed)]
    most = 2  # mistakes: a figure that more of them explain is explained by none
    if not 1 <= len(fits) <= most:
        return ""
    return f"is epsilon {claimed:.12g} that of {', or of '.join(fits)}?"


def rounding_of(epsilon: float) -> float:
    """Return how far an epsilon may be from the exact one without being another.

    >>> rounding_of(3.0), rounding_of(0.3), round(rounding_of(2.97), 4), rounding_of(20.0)
    (0.05, 0.05, 0.0297, 0.2)
    """
    decimals = max(-_exponent(epsilon), 1)
    # our own epsilon is at most 0.4 % too large, and one that noise was fitted to at most 0.5 %
    return max(0.01 * epsilon, 0.5 * 10.0**-decimals)


def _half_of_last_digit(epsilon: float) -> float:
    """Return half a unit of the last digit; of a whole number that of ones, since 3 is also written 3.0."""
    return float(0.5 * 10.0 ** min(_exponent(epsilon), 0))


def _exponent(epsilon: float) -> int:
    return int(Decimal(repr(float(epsilon))).normalize().as_tuple().exponent)


def _steps(number: int) -> str:
    return f"{number:,} step{'' if number == 1 else 's'}"
