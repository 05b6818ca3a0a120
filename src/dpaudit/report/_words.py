"""What a report says, in every format alike."""

from __future__ import annotations

import math

from dpaudit.report._run import Run
from dpaudit.report.plots._scale import number
from dpaudit.stats import Kind, Verdict

__all__ = ["headline", "smallest_leak", "summary", "verdict_mark"]

_OF_ANY_MECHANISM = "ApproximateDP"  # the one curve that assumes no mechanism at any delta
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
    claimed, least, sureness = number(run.claim.epsilon), number(run.bound.epsilon), _sureness(run)
    if run.verdict is None:
        return f"Nothing is claimed: epsilon is at least {least}, {sureness}."
    if run.verdict is Verdict.UNDERPOWERED:
        return f"The claim of epsilon {claimed} could not be tested: there are too few observations."
    if run.verdict is Verdict.NO_VIOLATION:
        return f"The claim of epsilon {claimed} is not refuted: epsilon is at least {least}, {sureness}."
    if run.bound.tradeoff.startswith(_OF_ANY_MECHANISM):
        return f"The claim of epsilon {claimed} is refuted: epsilon is at least {least}, {sureness}."
    # what is refuted is the claimed curve: a mechanism of another kind might leak that and keep its epsilon
    return (
        f"The claim is refuted: the claimed kind of mechanism needs an epsilon of at least {least} to leak "
        f"what was seen, and {claimed} is claimed, {sureness}."
    )


def _sureness(run: Run) -> str:
    """How sure the bound is, in the words of its kind."""
    level = f"{100 * run.bound.confidence:g} %"
    match run.bound.kind:
        case Kind.CONFIDENCE:
            return f"with {level} confidence"
        case Kind.CREDIBLE:
            return f"with {level} credibility, which depends on a prior"
    return "by a heuristic, whose error rate is not known"


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
