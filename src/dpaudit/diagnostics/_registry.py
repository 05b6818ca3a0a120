"""The registry of findings: one declaration for each, beside the test that produces it.

The order of findings, their likely causes, what explains them, and the page ``docs/findings.md`` are made
from these declarations. :mod:`dpaudit.diagnostics._facts` declares what other packages find.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Topic = Literal["noise", "clipping", "batches", "replay", "settings"]
_FINDINGS: dict[str, FindingKind] = {}


@dataclass(frozen=True, kw_only=True)
class FindingKind:
    """What a finding means, whatever training run has it."""

    name: str
    topic: Topic
    tests: str
    """What is tested."""
    matters: str
    """Why it matters."""
    question: str
    """The likely cause, as a question to the developer; empty if it depends on the amount of noise."""
    rank: float = 1000.0
    """The place among findings of equal certainty: causes come before their consequences."""
    groups: frozenset[str] = frozenset()
    """Words for what it has in common with others: ``located`` (where noise is missing or repeated),
    ``shared`` (noise used twice), ``tails`` and ``sampling``."""
    follows: frozenset[str] = frozenset()
    """Names or groups of findings that explain it, even if they are less certain."""
    may_follow: frozenset[str] = frozenset()
    """Names or groups of findings that explain it if they are more certain."""
    explains: frozenset[str] = frozenset()
    """Names or groups of findings that follow from it if its test names the cause itself."""

    def is_among(self, names: Iterable[str]) -> bool:
        """Return whether one of these names or groups is its own."""
        return any(name == self.name or name in self.groups for name in names)


def declare(
    name: str,
    topic: Topic,
    *,
    tests: str,
    matters: str,
    question: str = "",
    rank: float = 1000.0,
    groups: Iterable[str] = (),
    follows: Iterable[str] = (),
    may_follow: Iterable[str] = (),
    explains: Iterable[str] = (),
) -> None:
    """Register a finding; the fields are those of :class:`FindingKind`."""
    if name in _FINDINGS:
        raise ValueError(f"Expected one declaration of the finding {name!r}, got a second one.")
    _FINDINGS[name] = FindingKind(
        name=name,
        topic=topic,
        tests=tests,
        matters=matters,
        question=question,
        rank=rank,
        groups=frozenset(groups),
        follows=frozenset(follows),
        may_follow=frozenset(may_follow),
        explains=frozenset(explains),
    )


def finding_kinds() -> MappingProxyType[str, FindingKind]:
    """Return all findings that dpaudit can have, by name.

    >>> import dpaudit.diagnostics
    >>> print(dpaudit.diagnostics.finding_kinds()["leaf-correlation"].question)
    does every parameter get the same PRNG key or seed?
    """
    return MappingProxyType(_FINDINGS)


def kind_of(name: str) -> FindingKind:
    """Return the declaration of a finding; an empty one for a name that is not registered."""
    unknown = FindingKind(name=name, topic="settings", tests="", matters="", question="")
    return _FINDINGS.get(name, unknown)


def in_group(names: Iterable[str], group: str) -> bool:
    """Return whether any of these findings belongs to the group."""
    return any(group in kind_of(name).groups for name in names)


def root_findings(names: list[str]) -> Iterator[str]:
    """Yield the findings, given with the most certain first, that do not follow from others."""
    kinds = [kind_of(name) for name in names]
    for number, kind in enumerate(kinds):
        is_consequence = any(other.is_among(kind.follows) for other in kinds) or any(
            other.is_among(kind.may_follow) for other in kinds[:number]
        )
        if not is_consequence:
            yield kind.name
