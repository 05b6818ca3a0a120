"""Write ``docs/findings.md`` from the table of findings.

Usage: ``python tools/pages/findings.py`` in the root of the repository.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dpaudit.diagnostics import FindingKind, finding_kinds

PAGE = Path(__file__).parents[2] / "docs" / "findings.md"
TOPICS = {
    "noise": ("Noise", "Statistical tests of the release minus the sum before the noise."),
    "clipping": ("Clipping and sums", "What arrives of canaries, and what clipping adds to a sum."),
    "batches": ("Batches", "Statistical tests of the drawn batches against Poisson sampling."),
    "updates": ("Updates", "Facts about what changes weights, and what an update is computed from."),
    "replay": ("Replayed steps", "Facts about one step that is run again on a neighboring batch."),
    "settings": ("Settings", "Facts about the training as it was prepared."),
}
INTRODUCTION = """\
# Findings

A finding means that the accounting does not describe the code that ran. It is either a test that a correct
training run rarely fails, or a fact that no correct run has. The findings of one run share an error rate: see
[the verdict](verdicts.md#one-verdict-from-bound-and-tests).

This page lists every finding that dpaudit can have. It is made from the declarations in the code, which are
also available as `dpaudit.diagnostics.finding_kinds()`. A finding that follows from another one is still
reported, but its question is not asked.

A finding that is *to check* may be innocent, such as weights that you decay by hand. It never makes a
violation. Its section names the call that decides it.
"""


def page() -> str:
    """Return the text of the page."""
    lines = [INTRODUCTION]
    for topic, (title, summary) in TOPICS.items():
        kinds = [kind for kind in finding_kinds().values() if kind.topic == topic]
        lines += [f"## {title}\n", f"{summary}\n"]
        for kind in sorted(kinds, key=lambda kind: (kind.rank, kind.name)):
            lines += _section(kind)
    return "\n".join(lines).rstrip() + "\n"


def _section(kind: FindingKind) -> Iterator[str]:
    yield f"### `{kind.name}`\n"
    yield f"Tests {kind.tests}. {kind.matters}\n"
    if kind.question:
        yield f"Ask: {kind.question}\n"
    if kind.verdict:
        yield f"{kind.verdict}\n"
    causes = [f"`{name}`" for name in sorted(_names(kind.follows | kind.may_follow) - {kind.name})]
    if causes:
        yield f"May follow from {', '.join(causes)}.\n"


def _names(names: frozenset[str]) -> set[str]:
    """Return the findings with these names or in these groups."""
    return {kind.name for kind in finding_kinds().values() if kind.is_among(names)}


if __name__ == "__main__":
    PAGE.write_text(page())
