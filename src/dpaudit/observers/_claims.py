"""The claim of a training that is observed, as far as it can be read there."""

from __future__ import annotations

import math
from collections.abc import Callable

from dpaudit.accounting import Claim
from dpaudit.errors import InputError
from dpaudit.observers._terms import Terms

__all__ = ["Claims"]

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
