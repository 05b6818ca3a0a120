"""What everybody reads of a result: one block of a headline and a few labeled rows, and all its details.

A :class:`Block` is made from the plain values of :meth:`dpaudit.Result.to_dict`, which are also in files and
in ``--json``. Python, terminal, pytest, notebooks and reports print it, so that all of them say the same.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpaudit import _validate
from dpaudit._html import Html, banner, element, joined
from dpaudit.diagnostics import Finding, finding_kinds
from dpaudit.stats._bound import GIVEN, ClaimPart, Power
from dpaudit.stats._estimate import Estimate
from dpaudit.stats.rootfinding import SMALLEST_ERROR

# rows whose text may be cut
_SHORTENED = ("finding", "cause", "to check", "note", "gap", "read", "claim", "needed")


@dataclass(frozen=True)
class Block:
    """A verdict as it is shown everywhere.

    A repeated label continues the row above it. ``closing`` is a last sentence, or empty.
    """

    mark: str
    title: str
    numbers: str
    rows: tuple[tuple[str, str], ...]
    closing: str = ""

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Block:
        """Return the block of a result, given what its ``to_dict()`` returns.

        Args:
            document: The plain values of a result, also those of a file or of ``--json``. Its verdict is None
                if nothing was claimed. If it has no ``refuted``, the verdict rests on the bound alone, and
                tests have an error rate of their own.

        Returns:
            The block, whose ``str`` is what ``print(result)`` shows.

        """
        verdict, confidence = document["verdict"], document["bound"]["confidence"]
        if document.get("refuted") is None:
            document = {**document, "refuted": ["privacy"] if verdict == "VIOLATION" else []}
        elif document.get("diagnosis") is not None:
            confidence = round(confidence - (1 - document["diagnosis"]["confidence"]), 12)
        kind = "privacy" if "privacy" in document["refuted"] else "mechanism"
        no_proof = "Not a proof of privacy: a smaller leak could have gone unnoticed."
        unclaimed = "" if document["claim"] else "State a claim to get a verdict."
        mark, title, closing = {
            None: ("\u25cb", "NO CLAIM TESTED", unclaimed),
            "VIOLATION": ("\u25b2", f"VIOLATION ({kind})", ""),
            "NO_VIOLATION": ("\u25cb", "NO VIOLATION FOUND", no_proof),
            "UNDERPOWERED": ("?", "UNDERPOWERED", ""),
        }[verdict]
        rows = _unclaimed_rows if verdict is None else _rows
        return cls(
            mark=mark,
            title=title,
            numbers=_numbers(document),
            rows=tuple((label, plain_text(text)) for label, text in rows(document, confidence)),
            closing=closing,
        )

    def lines(self, *, width: int = 100, most: int = 8, characters: int = 700) -> list[tuple[str, str]]:
        """Return the rows as physical lines of at most ``width`` columns; continued ones have no label.

        Sentences on findings, causes and notes are shortened until all rows fit on ``most`` lines.
        """
        rows, indent = [(label, text) for label, text in self.rows], 4 + self._label_width
        while True:
            wrapped = [textwrap.wrap(text, width - indent) or [""] for _, text in rows]
            excess = sum(map(len, wrapped)) - most
            total = sum(len(line) + indent + 1 for lines in wrapped for line in lines) - characters
            if excess <= 0 and total <= 0:
                break
            places = [place for place, (label, _) in enumerate(rows) if label in _SHORTENED]
            if not any(len(wrapped[place]) > 1 or len(rows[place][1]) > 50 for place in places):
                places = list(range(len(rows)))
            longest = max(places, key=lambda place: len(rows[place][1]))
            label, text = rows[longest]
            if len(text) <= 24:
                break  # more rows than lines, which no result has
            size = (len(wrapped[longest]) - 1) * (width - indent) if excess > 0 else len(text) - total
            rows[longest] = label, _cut(text, max(min(size, len(text) - 1), 24))
        previous, lines = "", list[tuple[str, str]]()
        for (label, _), texts in zip(rows, wrapped, strict=True):
            lines += [("" if index or label == previous else label, line) for index, line in enumerate(texts)]
            previous = label
        return lines

    @property
    def _label_width(self) -> int:
        return max([7, *(len(label) for label, _ in self.rows)])

    def html(self) -> Html:
        """Return the block as a banner, in a color for a violation."""
        tone = "violation" if self.title.startswith("VIOLATION") else "neutral"
        title = joined([element("span", self.mark, aria_hidden="true"), f" {self.title}"])
        return banner(title, self.numbers, self.rows, self.closing, tone=tone)

    def __str__(self) -> str:
        return self.text()

    def text(self, *, more: str = "result.details()") -> str:
        """Return the plain form, in which ``more`` says what shows all details."""
        rows = [
            ("more", f"{more}: {text}") if label == "basis" else (label, text) for label, text in self.rows
        ]
        closing = [f"  {self.closing}"] if self.closing else []
        lines, width = replace(self, rows=tuple(rows)).lines(most=8 - len(closing)), self._label_width
        shown = [f"  {label:<{width}}  {text}" for label, text in lines]
        return "\n".join([f"{self.title}: {self.numbers}", *shown, *closing])


def _cut(text: str, size: int) -> str:
    """Return the beginning of a text, in at most ``size`` characters."""
    return text if len(text) <= size else f"{text[: size - 4].rstrip()} ..."


def plain_text(text: str) -> str:
    """Return the text in one line of ASCII."""
    return " ".join(text.encode("ascii", "replace").decode().split())


def _number(value: object) -> float:
    """Return a number of the document; infinity is written "inf", and what is missing is NaN."""
    return float(value) if isinstance(value, int | float | str) else math.nan


def _numbers(document: Mapping[str, Any]) -> str:
    claim, bound = document["claim"], document["bound"]
    if document["verdict"] is None:
        return f"epsilon >= {_validate.rounded_down(_number(bound['epsilon']))} at delta {bound['delta']:g}"
    reached, claimed, symbol = _number(bound["epsilon"]), _number(claim["epsilon"]), "epsilon"
    stated = _stated_epsilon(claim)
    note = f" (these parameters: {_validate.rounded(claimed)})" if stated else ""
    if document["verdict"] == "UNDERPOWERED":
        return f"{_size(document)} cannot test {_target(claimed, stated)}{note}"
    if math.isnan(reached) or math.isnan(claimed):  # the accountant gave up
        reached, claimed = _number(bound["parameter"]), _number(claim["parameter"])
        symbol, stated, note = bound["symbol"], None, " (no epsilon)"
    is_refuted = "privacy" in document["refuted"]
    low, high = _distinguished(reached, claimed) if is_refuted else _both(reached, claimed, 2)
    shown = f"{symbol} >= {low}" if math.isfinite(reached) else f"no finite {symbol}"
    if is_refuted and stated is not None and reached <= float(stated):
        return f"{shown}, but these parameters have {high} ({stated} is claimed)"
    return shown + _compared(document["refuted"], stated or high, note)


def _target(claimed: float, stated: str | None) -> str:
    return (
        "this claim" if math.isnan(claimed) else f"a claim of epsilon {stated or _validate.rounded(claimed)}"
    )


def _compared(refuted: Collection[str], claimed: str, note: str) -> str:
    """Return how a bound compares with the claimed figure."""
    if "privacy" in refuted:
        return f", but {claimed} is claimed{note}"
    return f"; the claimed {claimed} is for another mechanism" if refuted else f" of {claimed} claimed{note}"


def _stated_epsilon(claim: Mapping[str, Any]) -> str | None:
    """Return the epsilon that was claimed beside the parameters, as it was written; None without any."""
    return next(
        (f"{number['value']:.12g}" for number in claim.get("parts", ()) if number["name"] == "epsilon"), None
    )


def claimed_figure(epsilon: float, parts: Collection[ClaimPart]) -> str:
    """Return the epsilon of a claim's parameters, after the figure that was claimed of them, if any."""
    stated = _stated_epsilon({"parts": [number.to_dict() for number in parts]})
    return _validate.rounded(epsilon) if stated is None else f"{stated} ({_validate.rounded(epsilon)})"


def _both(reached: float, claimed: float, digits: int) -> tuple[str, str]:
    return _validate.rounded_down(reached, digits), _validate.rounded(claimed, digits=digits)


def _distinguished(reached: float, claimed: float) -> tuple[str, str]:
    """Return both numbers with as many decimals as show that the first is larger."""
    for digits in range(2, 12):
        low, high = _both(reached, claimed, digits)
        if not claimed < reached < math.inf or float(low.replace(",", "")) > float(high.replace(",", "")):
            return low, high
    return _both(reached, claimed, 12)


def _size(document: Mapping[str, Any]) -> str:
    size = document.get("size") or {}
    if size.get("num_steps"):
        return f"{_count(size['num_steps'], 'step')} of {size['scores_per_step']:,} scores"
    if "num_present" in size:
        fewest = min(size["num_present"], size["num_absent"])
        return f"{_count(fewest, 'score')} per side"
    return "This audit"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _unclaimed_rows(document: Mapping[str, Any], confidence: float) -> Iterator[tuple[str, str]]:
    yield from [] if document["claim"] is None else [("claim", document["claim"]["summary"])]
    yield from (("note", _sentence(note)) for note in document["notes"])
    yield "basis", ", ".join([*_basis(document, confidence, (0, 0, 0), ""), document["bound"]["label"]])


def _rows(document: Mapping[str, Any], confidence: float) -> Iterator[tuple[str, str]]:
    claim, diagnosis = document["claim"], document.get("diagnosis") or {}
    yield "claim", _claim_text(claim)
    if text := _read(claim.get("parts", ())):
        yield "read", text
    findings, causes = diagnosis.get("findings", []), document.get("likely_causes", [])[:1]
    to_check = diagnosis.get("to_check", [])
    notes = [("note", note) for note in _notes(document)]
    notes += [("gap", gap) for gap in document.get("specific", [])]
    notes += [("note", note) for note in diagnosis.get("notes", [])]
    strength, needed, power = _strength(document), document.get("needed"), list(_power(document))
    others = [text, *causes, *to_check[:1], needed, ":" in strength, document["verdict"] == "NO_VIOLATION"]
    room = 6 - len(power) - sum(map(bool, others)) - (len(power) > 1)  # besides claim and basis
    num_findings = min(len(findings), 2, max(room - bool(notes), 1))
    num_notes = max(min(len(notes), 2, room - num_findings), 0)
    for finding in findings[:num_findings]:
        yield "finding", f"{finding['name']}: {_sentence(finding['sentence'])}"
    for cause in causes:
        yield "cause", _sentence(cause)
    for fact in to_check[:1]:
        yield "to check", to_check_text(fact)
    if ":" in strength:
        yield "p-value", strength
    yield from ((label, _sentence(note)) for label, note in notes[:num_notes])
    yield from power
    if needed:
        yield "needed", needed["sentence"]
    hidden = len(findings) - num_findings, len(to_check) - 1, len(notes) - num_notes
    yield "basis", ", ".join(_basis(document, confidence, hidden, strength))


def _claim_text(claim: Mapping[str, Any]) -> str:
    if not claim.get("description"):
        return str(claim["summary"])
    stated = _stated_epsilon(claim)
    epsilon = f", epsilon = {stated}" if stated else ""
    return f"{claim['description']}; delta = {claim['delta']:g}{epsilon}"


def to_check_text(fact: Mapping[str, Any]) -> str:
    """Return name and sentence of a fact that may be innocent, and between them the call that decides it."""
    kind = finding_kinds().get(fact["name"])
    decided = f" ({kind.decided_by} decides)" if kind is not None and kind.decided_by else ""
    return f"{fact['name']}{decided}: {_sentence(fact['sentence'])}"


def _notes(document: Mapping[str, Any]) -> list[str]:
    condition = document.get("condition")
    holds = [f"this holds if {condition}"] if condition and "privacy" in document["refuted"] else []
    return [*holds, *document.get("notes", [])]


def _sentence(text: str) -> str:
    """Return the text with a capital letter."""
    return text[:1].upper() + text[1:]


def _read(parts: Sequence[Mapping[str, Any]]) -> str:
    names = {"num_steps": "steps"}
    origins = {"the number of recorded steps": "as recorded"}
    texts = [
        f"{names.get(number['name'], number['name'].replace('_', ' '))} "
        f"({origins.get(number['origin'], number['origin'])})"
        for number in parts
        if number["source"] != "given"
    ]
    advice = "your own to test it" if len(texts) == 1 else "your own to test them"
    return f"{', '.join(texts)}: pass {advice}" if texts else ""


def _strength(document: Mapping[str, Any]) -> str:
    """Return the p-value of a violation: with its meaning if it is weak, empty if there is none."""
    p_value = _number(document.get("p_value"))
    if not document["refuted"] or math.isnan(p_value) or p_value == 0:
        return ""
    if p_value <= SMALLEST_ERROR:
        return f"p < {SMALLEST_ERROR:g}"
    if p_value <= 1e-3:  # above, it is weak evidence
        return f"p = {p_value:.1g}"
    number = f"one of {math.floor(1 / p_value):,} correct runs may do so"
    return f"{p_value:.2g}: {number}; repeat with a fresh seed"


def _power(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    verb = "would detect only" if document["verdict"] == "UNDERPOWERED" else "detects"
    for values in (document.get("power"), document.get("attack_power")):
        if values is not None:
            numbers = {name: _number(values[name]) for name in ("epsilon", "parameter")}
            settings = {name: values[name] for name in Power.__annotations__ if name in values}
            yield "power", Power(**{**settings, **numbers}).sentence(verb)


def _basis(
    document: Mapping[str, Any], confidence: float, hidden: tuple[int, int, int], strength: str
) -> Iterator[str]:
    """Yield what the verdict rests on, and how many findings, facts to check and notes are ``hidden``."""
    diagnosis, bound = document.get("diagnosis") or {}, document["bound"]
    findings, to_check, notes = hidden
    if findings > 0:
        yield _count(findings, "more finding")
    if to_check > 0:
        yield f"{to_check} more to check"
    certainty = {"credible": "credibility", "heuristic": "by a heuristic"}.get(bound["kind"], "confidence")
    yield f"{_validate.percent(confidence)} {certainty}"
    if strength and ":" not in strength:
        yield strength
    if tests := diagnosis.get("tests"):
        yield _count(len(tests), "test")
    assumptions = len(bound["assumptions"]) + len(diagnosis.get("assumptions", ()))
    yield _count(assumptions, "assumption")
    if gaps := document.get("not_covered"):
        yield f"{len(gaps)} not covered"
    if notes > 0:
        yield _count(notes, "more note")


def details(
    document: Mapping[str, Any], power: Power | None, attack_power: Power | None, estimate: Estimate | None
) -> list[tuple[str, str]]:
    """Return all facts of a result but its verdict, labeled, given its plain values and those restored."""
    claim, bound, diagnosis = document["claim"], document["bound"], document.get("diagnosis")
    claim_parts = [ClaimPart.from_dict(values) for values in (claim or {}).get("parts", ())]
    lines = summary(
        None if claim is None else claim["summary"],
        bound["statement"],
        bound["label"],
        power,
        parts=claim_parts,
        attack_power=attack_power,
        p_value=document["p_value"] if document.get("refuted") else None,
    )
    lines += [] if estimate is None else estimate.lines(brief=False)
    tests = diagnosis or {"findings": (), "assumptions": (), "notes": ()}
    if diagnosis is not None:
        shares = bound["confidence"], diagnosis["confidence"]
        lines.append(("errors", errors_line(*shares, len(diagnosis["tests"]))))
    lists = {
        "finding": [str(_finding(row)) for row in tests["findings"]],
        "possible cause": document.get("likely_causes", ()),
        "to check": map(to_check_text, tests.get("to_check", ())),
        "assumes": [*bound["assumptions"], *tests["assumptions"]],
        "not covered": document.get("not_covered", ()),
        "note": [*document["notes"], *tests["notes"]],
    }
    return [*lines, *((label, text) for label, texts in lists.items() for text in texts)]


def _finding(row: Mapping[str, Any]) -> Finding:
    return Finding(**{**row, "estimate": math.nan if row["estimate"] is None else row["estimate"]})


def summary(
    claim: str | None,
    statement: str,
    method: str,
    power: Power | None,
    *,
    parts: Collection[ClaimPart] = (),
    attack_power: Power | None = None,
    p_value: float | None = None,
) -> list[tuple[str, str]]:
    """Return the labeled lines that every form of a result shows: claim, bound, method and power.

    Where the ``parts`` of the claim come from is shown unless all of them were given. The ``p_value`` is that
    of a violation.
    """
    lines = [] if claim is None else [("claim", claim)]
    if any(number.source != GIVEN for number in parts):
        lines.append(("claimed", ", ".join(map(str, parts))))
    lines += [("bound", statement), ("method", method)]
    lines += [] if p_value is None else [("p-value", p_value_line(p_value))]
    return [*lines, *(("power", str(stated)) for stated in (power, attack_power) if stated is not None)]


def errors_line(bound: float, tests: float, num_tests: int) -> str:
    """Return how bound and tests, with these confidences, share the rate of correct runs that are flagged."""
    shares = 1 - bound, 1 - tests
    bound_share, tests_share, total = (f"{100 * share:.4g} %" for share in (*shares, sum(shares)))
    noun = "test" if num_tests == 1 else "tests"
    return f"{total} in total: {bound_share} for the bound, {tests_share} for {num_tests} {noun}"


def p_value_line(p_value: float) -> str:
    """Return the p-value of a violation and what it means."""
    if p_value == 0:
        return "0: a finding that no correct run has"
    shown = f"below {SMALLEST_ERROR:g}" if p_value <= SMALLEST_ERROR else f"{p_value:.2g}"
    return f"{shown}, the smallest error rate at which the claim is refuted"
