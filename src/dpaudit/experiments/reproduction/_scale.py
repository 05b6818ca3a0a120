"""How large a reproduction is."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from dpaudit.experiments.reproduction._values import Settings

__all__ = ["Scale", "simulated"]


class Scale(StrEnum):
    """From seconds to a machine with a GPU."""

    TINY = "tiny"  # for tests: every part runs, no number means anything
    CPU = "cpu"  # at most half an hour on two cores
    PAPER = "paper"  # the paper's own numbers of steps, models and observations


def simulated(usual: Settings, **tiny: object) -> Mapping[Scale, Settings]:
    """Settings of what a processor does at the paper's own scale; tests change some of them."""
    return {Scale.TINY: {**usual, **tiny}, Scale.CPU: usual, Scale.PAPER: usual}
