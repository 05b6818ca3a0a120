"""How large a reproduction is."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Scale"]


class Scale(StrEnum):
    """From seconds to a machine with a GPU."""

    TINY = "tiny"  # for tests: every part runs, no number means anything
    CPU = "cpu"  # at most half an hour on two cores
    PAPER = "paper"  # the paper's own numbers of steps, models and observations
