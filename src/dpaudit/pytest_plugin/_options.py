"""What can be set at the command line and in the configuration of pytest."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

__all__ = ["BUDGETS", "CONFIDENCE", "DEFAULT_BUDGET", "add_options", "confidence", "seed"]

BUDGETS = {"quick": 100, "full": 500}  # steps, where a test does not say how many
DEFAULT_BUDGET, CONFIDENCE = "full", 0.95


def add_options(parser: pytest.Parser) -> None:
    """Three options, all with a default."""
    group = parser.getgroup("dpaudit", "audits of differential privacy")
    group.addoption(
        "--dp-audit-seed",
        type=_whole,
        metavar="N",
        help="seed of canaries and coins; without it one is drawn, and shown at the end",
    )
    group.addoption(
        "--dp-audit-budget",
        choices=list(BUDGETS),
        default=DEFAULT_BUDGET,
        help="steps of an audit whose test does not say how many: "
        + ", ".join(f"{name} {steps}" for name, steps in BUDGETS.items()),
    )
    group.addoption(
        "--dp-audit-confidence",
        type=_probability,
        metavar="P",
        default=CONFIDENCE,
        help="that of all audits of the session together (default: 0.95)",
    )


def seed(config: pytest.Config) -> int | None:
    """The seed that was asked for; a worker of pytest-xdist has that of its session."""
    given = config.getoption("--dp-audit-seed")
    shared = getattr(config, "workerinput", {}).get("dp_audit_seed")
    found: int | None = given if shared is None else shared
    return found


def confidence(config: pytest.Config) -> float:
    """That of the whole session."""
    found: float = config.getoption("--dp-audit-confidence")
    return found


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"expected a whole number, got {text!r}")
    return int(text)


def _probability(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise ArgumentTypeError(f"expected a number between 0 and 1, got {text!r}")
    return value
