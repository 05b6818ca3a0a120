"""What a report says, in every format alike."""

from __future__ import annotations

import math

from dpaudit.report._run import Run
from dpaudit.report.plots._scale import number
from dpaudit.stats import Verdict

__all__ = ["headline", "smallest_leak", "summary", "verdict_mark"]

_MARKS = {
    Verdict.VIOLATION: ("\N{BLACK UP-POINTING TRIANGLE}", "Violation"),
    Verdict.NO_VIOLATION: ("\N{WHITE CIRCLE}", "No violation"),
    Verdict.UNDERPOWERED: ("\N{WHITE DIAMOND}", "Underpowered"),
}


def verdict_mark(verdict: Verdict | None) -> tuple[str, str]:
    """A sign and the word: never a colour alone."""
    return ("\N{WHITE SQUARE}", "No claim") if verdict is None else _MARKS[verdict]


def smallest_leak(run: Run) -> str:
    """The epsilon that would show."""
    return "none" if run.power is None or math.isinf(run.power.epsilon) else number(run.power.epsilon)


def headline(run: Run) -> str:
    """The verdict in a sentence, with its numbers."""
    claim = f"The claim of epsilon {number(run.claim.epsilon)}"
    level = f"{100 * run.bound.confidence:g} %"
    least = f"epsilon is at least {number(run.bound.epsilon)}, with {level} confidence."
    if run.verdict is None:
        return f"Nothing is claimed: {least}"
    if run.verdict is Verdict.UNDERPOWERED:
        return f"{claim} could not be tested: there are too few observations."
    return f"{claim} is {'refuted' if run.verdict is Verdict.VIOLATION else 'not refuted'}: {least}"


def summary(run: Run) -> list[tuple[str, str]]:
    """Claim, bound, method, power and tests of the noise, a sentence each."""
    return [
        ("claim", run.claim.summary),
        ("bound", run.bound.statement),
        ("kind", _KINDS[run.bound.kind.value]),
        ("method", run.bound.method),
        *(() if run.power is None else [("power", str(run.power))]),
        ("tests of the noise", "not run" if run.diagnosis is None else run.diagnosis.short),
    ]


_KINDS = {
    "confidence": "a confidence bound: it exceeds the truth at most as often as it says",
    "credible": "a credible bound: it depends on a prior",
    "heuristic": "a heuristic: no error rate is known",
}
