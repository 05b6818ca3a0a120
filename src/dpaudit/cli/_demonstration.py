"""The trainings of ``dpaudit demo``: a correct one, and its twin with too little noise."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpaudit.stats import Verdict

if TYPE_CHECKING:  # they need torch, which is imported when the command is called
    from dpaudit.experiments import Config, Progress

__all__ = ["NOTICE", "Audited", "Demo", "demonstrate"]

_FACTOR = 0.8
_CHANGES = ("seed=20230215",)
_FAULT = ("training.fault.name=noise-too-small", f"training.fault.factor={_FACTOR}")
NOTICE = (
    "Two trainings of a small network on handwritten digits, with DP-SGD that claims epsilon 8 and with 512 "
    "canaries in every step. The second one has a bug: its noise is 0.8 times what it should be."
)


@dataclass(frozen=True)
class Audited:
    """One training and what its audit said."""

    name: str
    folder: Path
    noise_factor: float
    expected: Verdict
    values: dict[str, Any]

    @property
    def is_as_expected(self) -> bool:
        """Whether the audit said what is known to be true."""
        return Verdict[self.values["verdict"]] is self.expected

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "name": self.name,
            "folder": self.folder.name,
            "noise_factor": self.noise_factor,
            "expected": self.expected.name,
            "as_expected": self.is_as_expected,
            **self.values,
        }


@dataclass(frozen=True)
class Demo:
    """All trainings of the demonstration."""

    trainings: tuple[Audited, ...]

    @property
    def is_as_expected(self) -> bool:
        """Whether every audit said what is known to be true."""
        return all(training.is_as_expected for training in self.trainings)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "notice": NOTICE,
            "as_expected": self.is_as_expected,
            "trainings": [training.to_dict() for training in self.trainings],
        }


def demonstrate(folder: Path, say: Callable[[str], None], watch: Callable[[Progress], None]) -> Demo:
    """Train both, one after the other, each in a directory of its own; the claim is the same."""
    from dpaudit import experiments  # noqa: PLC0415  # loads torch

    found = []
    for name, place, factor, fault, expected in (
        ("a correct training", "correct", 1.0, (), Verdict.NO_VIOLATION),
        ("its twin with 0.8 of the noise", "too-little-noise", _FACTOR, _FAULT, Verdict.VIOLATION),
    ):
        say(f"Training: {name}")
        config = _config(folder / place, *_CHANGES, *fault)
        values = experiments.rehearse(config, watch=watch, keep=True)
        found.append(Audited(name, folder / place, factor, expected, values))
    return Demo(tuple(found))


def _config(folder: Path, *changes: str) -> Config:
    """The example, changed."""
    from dpaudit import experiments  # noqa: PLC0415  # loads torch

    text = experiments.example("digits")
    return experiments.parse_config(
        text, "the demo's config", (f"output={json.dumps(str(folder))}", *changes)
    )
