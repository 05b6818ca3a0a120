"""docs/detection.md, from the runs of tools/pages/detection.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from _unseen_faults import Unseen
from detection import STEPS, Line, Runs, causes, required_lines, twin_tasks

from dpaudit.zoo.faults import FAULTS, OBSERVERS, TWINS, Fault

__all__ = ["page"]

NAMES = {
    "step": "NumPy step",
    "func": "torch.func step",
    "hooks": "Opacus",
    "ghost": "Opacus ghost",
    "layer": "Opacus per-layer",
    "jax": "JAX Privacy",
}
_SHOWN = 3  # findings that are listed

HEAD = """# Which faults are detected

Which faults does an audit with default settings detect? This page answers for {faults} faults in
{observers} observers, by measurement: each fault was trained with {count} random seeds, at noise multipliers
that are evenly spread from 1 to 2. Every run is a small model (659 parameters in six named tensors, 300
examples, sample rate 0.1, clipping norm 2) with the three lines of the [tutorial](tutorial.md): `observe`,
train, `audit()`. No option is set for any fault. `tools/pages/detection.py` runs all of them and writes this
page; the faults are in `dpaudit.zoo.faults`.

- A cell is the number of seeds, of {count}, with which the fault was detected within 300 steps. Where these
  are fewer than 9 of 10, the number within 500 steps follows.
- "Smallest" is the smallest of the sizes tried that is detected with at least 9 of 10 seeds, within 300 steps
  and, if different, within 500.
- A dash means that the fault cannot exist there: a step has no sampler, ghost clipping has no rows, and
  per-layer clipping has no joint norm.
- `observe` gets the data that sampling is tested with: `loader=` in Opacus, `num_examples=` in JAX Privacy.
- "Detected by" lists what refuted the claim most often: the bound, or findings of [tests](diagnostics.md).
  "Refused" means that the audit raised an error that names the problem.

With a larger model, most tests of the noise are stronger, because they see more numbers. With more noise, the
bound and the tests of clipping are weaker.

Three families need no statistics, so they are not measured here. Non-finite examples are detected by
[replay](replay.md). So is what happens beside the release (optimizer moments, buffers, a second optimizer) or
before clipping (gradients that depend on other examples of the batch); `not_covered` of every audit without a
replay lists both. A mechanism that depends on the number of examples is detected by arithmetic:
`dpaudit check`, which is part of every audit with Opacus.
"""
TWIN_HEAD = """## Correct training runs

Bound and tests together may flag at most 5 % of correct runs. A release in bfloat16 is legitimate, because
rounding after the noise reveals nothing. More noise than claimed is legitimate, too, and so are the float32
normals of JAX, which take only 2^23 values.
"""
CAUSE_HEAD = """## Likely causes

These 20 faults are not in the library from which likely causes are drawn (`tools/pages/_unseen_faults.py`).
What the first cause should say was fixed before the first run, as a pattern; one pattern was narrowed
afterwards, because it accepted a wrong cause. Each fault ran once, at noise multiplier 1 with 300 steps:
{right} of {all} first causes are right. Of a first set, 17 of 20 right, five faults turned out to be
in the library (three of them right, two wrong) and were replaced. What became a cause after its first run,
in which it was not recognized, counts as wrong.
"""
_IMPOSSIBLE = "-"


def page(runs: Runs, count: int) -> str:
    """Return the page; tables whose runs are missing are left out."""
    head = HEAD.format(faults=len(FAULTS), observers=len(OBSERVERS), count=count)
    parts = [head, *_preliminary(runs, count), *_families(runs, count), *_twins(runs, count), *_causes(runs)]
    return "\n".join(parts)


def _preliminary(runs: Runs, count: int) -> Iterator[str]:
    """Yield a warning if runs are missing."""
    tasks = [task for line in required_lines() for task in line.tasks(STEPS[0], count)] + twin_tasks(count)
    _, done = runs.caught(tasks)
    if done < len(tasks):
        yield f"**Preliminary: {done:,} of {len(tasks):,} runs are finished; the tables show these.**\n"


def _families(runs: Runs, count: int) -> Iterator[str]:
    for family, group in groupby(FAULTS, key=lambda fault: fault.family):
        rows = [row for fault in group for row in _rows(runs, fault, count)]
        if rows:
            yield f"## {family}\n\n{_table(['fault', 'size', *NAMES.values(), 'detected by'], rows)}\n"


def _rows(runs: Runs, fault: Fault, count: int) -> Iterator[list[str]]:
    """Yield a row for each size that was tried, and one for the smallest size that is caught."""
    text, num_rows = fault.text, 0
    for size in fault.sizes:
        cells = [_cell(runs, fault, size, observer, count) for observer in OBSERVERS]
        if any(any(character.isdigit() for character in cell) for cell in cells):
            yield [text, _shown(size), *cells, _detected_by(runs, fault, size, count)]
            text, num_rows = "", num_rows + 1
    if num_rows > 1:
        yield ["", "**smallest**", *(_smallest(runs, fault, observer, count) for observer in OBSERVERS), ""]


def _cell(runs: Runs, fault: Fault, size: Any, observer: str, count: int) -> str:
    if observer not in fault.observers:
        return _IMPOSSIBLE
    found = []
    for steps in STEPS:
        caught, done = runs.caught(Line(fault, size, observer).tasks(steps, count))
        found.append(f"{caught}/{done}" if done else "")
    first, second = found
    return f"{first}, 500: {second}" if first and second else first or second


def _smallest(runs: Runs, fault: Fault, observer: str, count: int) -> str:
    if observer not in fault.observers:
        return _IMPOSSIBLE
    found = []
    for steps in STEPS:
        last = "none"
        for size in fault.sizes:
            if Line(fault, size, observer).is_enough(runs, steps, count):
                last = _shown(size)
        found.append(last)
    first, second = found
    if first == second == "none" and not any(
        _cell(runs, fault, size, observer, count) for size in fault.sizes
    ):
        return ""  # not run
    return first if first == second else f"{first}, 500: {second}"


def _shown(size: Any) -> str:
    if size is None:
        return ""
    return size if isinstance(size, str) else f"{size:,}" if isinstance(size, int) else f"{size:g}"


def _detected_by(runs: Runs, fault: Fault, size: Any, count: int) -> str:
    names = Counter[str]()
    for observer in fault.observers:
        for task in Line(fault, size, observer).tasks(STEPS[0], count):
            names.update(set((runs.get(task) or {"caught": []})["caught"]))
    shown = (name.split(":")[0] for name, _ in names.most_common(_SHOWN))
    return ", ".join(f"`{name}`" if "-" in name else name for name in dict.fromkeys(shown))


def _twins(runs: Runs, count: int) -> Iterator[str]:
    tasks = twin_tasks(count)
    rows, flagged, finished = list[list[str]](), 0, 0
    for twin in TWINS:
        cells = []
        for observer in OBSERVERS:
            found = [runs.get(task) for task in tasks if (task.fault, task.observer) == (twin.name, observer)]
            done = [bool(run["caught"]) for run in found if run is not None]
            flagged, finished = flagged + sum(done), finished + len(done)
            cells.append(f"{sum(done)}/{len(done)}" if done else "")
        rows.append([twin.text, *cells])
    if finished:
        total = f"Flagged: {flagged} of {finished} runs, {100 * flagged / finished:.1f} %.\n"
        yield f"{TWIN_HEAD}\n{_table(['training run', *NAMES.values()], rows)}\n\n{total}"


def _causes(runs: Runs) -> Iterator[str]:
    found = list(causes(runs))
    if found:
        rows = [
            [one.fault.text, NAMES[one.observer], cause, _rightness(one, is_right=bool(is_right))]
            for one, cause, is_right in found
        ]
        head = CAUSE_HEAD.format(right=sum(bool(is_right) for *_, is_right in found), all=len(found))
        yield f"{head}\n{_table(['fault', 'observer', 'first likely cause', 'right'], rows)}\n"


def _rightness(one: Unseen, *, is_right: bool) -> str:
    if one.became_cause:
        return "**no**; a cause since"
    return "yes" if is_right else "**no**"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
