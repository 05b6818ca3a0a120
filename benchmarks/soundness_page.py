"""The page docs/soundness.md, from simulated cells."""

from __future__ import annotations

from collections.abc import Iterator

import soundness as s

import dpaudit
from dpaudit.stats import Coverage

__all__ = ["page"]

INTRODUCTION = """# Soundness

Every bound that dpaudit calls a *confidence* bound may exceed the truth in at most 5 % of audits at 95 %
confidence. This page is written by `make soundness`, which audits mechanisms with a known parameter again
and again ({repetitions:,} audits a cell; a quarter of that for heuristics, and for
one run with the curve of a whole training).

Not on this page: live bounds, bounds of whole runs and of sampled entries, and input canaries, whose smaller
simulations are in the tests and in `benchmarks/inputs.py`; and black-box audits: 0 of 40 of a correct
training were flagged (`benchmarks/black_box.py`).

Each cell says how often the bound exceeded the truth, with its standard error, and the mean of
bound / truth. At mu = 0 there is no truth to divide by: the second number is the mean bound itself. The
mechanism is the ideal attack on the family's own curve, with n scores a side; nothing is conservative
about it, so a method that errs is seen to err.
"""

VERDICT = """
**{count} cells of confidence methods were simulated; {wrong} exceed 5 % by more than three standard
errors.**
"""


def page(found: dict[str, Coverage], choices: list[s.Choice], repetitions: int) -> str:
    """The whole page."""
    cells = s.sound_cells(repetitions)
    wrong = sum(not found[cell.key].is_sound(0.95) for cell in cells)
    parts = [
        INTRODUCTION.format(repetitions=repetitions),
        VERDICT.format(count=len(cells), wrong=wrong),
        "\n## Confidence methods, Gaussian family\n",
        *_grid(found, s.SOUND, repetitions),
        "\n## The paper's practice\n",
        "\nA threshold chosen on the counted data, or a posterior: the numbers look tighter because they",
        " are wrong more often than their label says. dpaudit reports them as heuristic or credible, and",
        " no verdict rests on them.\n",
        *_grid(found, s.PRACTICE, max(repetitions // 4, 1)),
        "\n## Many canaries a step\n",
        "\nBetting on the balanced error of each step; steps x canaries a side.\n",
        *_stepped(found, repetitions),
        "\n## The paper's threshold for (eps, delta)-DP\n",
        "\n`Optimal(noise)`, with the Gaussian family. Far in the tail, so few audits see an error at all.\n",
        *_optimal(found, repetitions),
        "\n## Other families\n",
        "\nParameter 1, 500 scores a side, a mechanism that has the family's own curve.\n",
        *_others(found, repetitions),
        "\n## One run\n",
        "\n1,000 canaries present by fair coins, 200 guesses (the 100 highest and the 100 lowest scores).\n",
        *_one_run(found, repetitions),
        *_choices(choices),
    ]
    return "".join(parts)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]
    return "\n" + "\n".join(lines) + "\n"


def _name(inference: dpaudit.Inference, rule: dpaudit.ThresholdRule) -> str:
    return f"`{inference!r}` + `{rule!r}`".replace("horizon=None", "")


def _entry(found: Coverage) -> str:
    return f"{100 * found.exceeded:.1f} ± {100 * found.standard_error:.1f} %, {found.mean_ratio:.3f}"


def _grid(found: dict[str, Coverage], methods: tuple, repetitions: int) -> Iterator[str]:
    for size in s.SIZES:
        yield f"\n### n = {size:,} a side\n"
        rows = [
            [_name(inference, rule)]
            + [
                _entry(found[s.Cell(dpaudit.Gaussian(), inference, rule, mu, size, repetitions).key])
                for mu in s.MUS
            ]
            for inference, rule in methods
        ]
        yield _table(["method", *(f"mu = {mu:g}" for mu in s.MUS)], rows)


def _stepped(found: dict[str, Coverage], repetitions: int) -> Iterator[str]:
    rows = [
        [_name(inference, rule), f"{size[0]} x {size[1]}"]
        + [
            _entry(found[s.Cell(dpaudit.Gaussian(), inference, rule, mu, size, repetitions).key])
            for mu in s.MUS
        ]
        for inference, rule in s.ON_STEPS
        for size in s.STEPPED
    ]
    yield _table(["method", "size", *(f"mu = {mu:g}" for mu in s.MUS)], rows)


def _optimal(found: dict[str, Coverage], repetitions: int) -> Iterator[str]:
    rows: dict[tuple[str, int], list[str]] = {}
    for cell in s.optimal(repetitions):
        row = rows.setdefault((f"`{cell.inference!r}`", cell.size), [])
        row.append(_entry(found[cell.key]))
    body = [[name, f"{size:,}", *entries] for (name, size), entries in rows.items()]
    yield _table(["inference", "n a side", *(f"mu = {mu:g}" for mu in s.MUS[1:])], body)


def _others(found: dict[str, Coverage], repetitions: int) -> Iterator[str]:
    rows = [
        [f"`{cell.family!r}`", _name(cell.inference, cell.rule), _entry(found[cell.key])]
        for cell in s.other_families(repetitions)
    ]
    yield _table(["family", "method", "exceeded, bound / truth"], rows)


def _one_run(found: dict[str, Coverage], repetitions: int) -> Iterator[str]:
    rows = [
        [
            "`one_run_bound`" if cell.generic else "`one_run_fdp_bound`",
            f"`{cell.family!r}`",
            f"{cell.truth:g}",
            _entry(found[cell.key]),
        ]
        for cell in s.one_run(repetitions)
    ]
    yield _table(["bound", "mechanism", "truth", "exceeded, bound / truth"], rows)


def _choices(choices: list[s.Choice]) -> Iterator[str]:
    yield "\n## How the defaults were chosen\n"
    yield (
        "\nFor raw scores `audit()` chooses between a held-out part and bands over many thresholds, by the"
        " number of scores and by the curve, never by the scores. The mean epsilon at delta = 1e-5 of"
        " audits of a Gaussian mechanism:\n"
    )
    rows = [
        [f"`{c.family!r}`", f"{c.size:,}", f"{c.mu:g}", f"{c.held_out:.2f}", f"{c.bands:.2f}"]
        for c in choices
    ]
    head = [
        "tested curve",
        "n a side",
        "mu",
        "`JointExact()` + `HeldOut`",
        "`ClopperPearson()` + `Simultaneous()`",
    ]
    yield _table(head, rows)
    yield (
        "\nWith the mechanism's own curve any threshold is as good as another, and `HeldOut(0.1)` wins"
        " throughout. The generic curve is told apart in the tails: `HeldOut(0.2)` up to a few thousand"
        " scores, `Simultaneous()` from 5,000 on.\n"
    )
