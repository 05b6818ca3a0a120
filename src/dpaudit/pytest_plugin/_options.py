"""What can be set at the command line and in the configuration of pytest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dpaudit.pytest_plugin._session import Audits

__all__ = ["BUDGETS", "add_options", "confidence", "header", "seed"]

BUDGETS = {"quick": 100, "full": 500}  # steps, where a test does not say how many


def add_options(parser: pytest.Parser) -> None:
    """Three options, all with a default."""
    group = parser.getgroup("dpaudit", "audits of differential privacy")
    group.addoption(
        "--dp-audit-seed",
        type=_whole,
        metavar="N",
        help="seed of canaries and coins; without it one is drawn, and shown in the header",
    )
    group.addoption(
        "--dp-audit-budget",
        choices=list(BUDGETS),
        default="full",
        help="steps of an audit whose test does not say how many: "
        + ", ".join(f"{name} {steps}" for name, steps in BUDGETS.items()),
    )
    group.addoption(
        "--dp-audit-confidence",
        type=_probability,
        metavar="P",
        default=0.95,
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


def header(audits: Audits) -> str:
    """One line at the start of a run."""
    return (
        f"dpaudit: seed {audits.seed}, budget {audits.budget}, "
        f"{100 * audits.confidence:g} % confidence for all audits together"
    )


def _whole(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def _probability(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise ValueError
    return value
