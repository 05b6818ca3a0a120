"""The examples that input canaries are made from."""

from __future__ import annotations

from dpaudit.errors import InputError
from dpaudit.experiments._resolved import Resolved
from dpaudit.experiments.config import Config
from dpaudit.training.data import Dataset, HeldOutData, hold_out

__all__ = ["split_held_out"]


def split_held_out(
    config: Config, resolved: Resolved, train: Dataset, test: Dataset
) -> tuple[Dataset, HeldOutData | None]:
    """The examples to test on, without those that are held out: so the training has all of its own."""
    count = getattr(config.audit, "held_out", None)
    if count is None:
        return test, None
    if count >= len(test):
        raise InputError(
            f"Expected audit.held_out={count} to be less than {len(test)}, the number of examples for test."
        )
    return hold_out(test, count, seed=resolved.audit_seed, apart_from=train)
