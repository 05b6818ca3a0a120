"""Run the zoo with many seeds, and write the results to docs/zoo.md.

    python tools/pages/zoo.py [--seeds 40] [--broken-seeds 10] [--only NAME ...] [--as-is | --violations]

The matrix is that of `dpaudit zoo` with seed 0. Finished runs are kept in .zoo-cache, so that an interrupted
command resumes there; delete it when anything that is measured changes. With --only, the other rows of the
page are kept, and a sentence on the page states which were measured again. With --as-is, the page is written
from existing results. With --violations, only the paper's three violations are run.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _shared import DOCS, ROOT, block_of, markdown_table, write_block
from _violations import CASES, HEAD

from dpaudit.zoo import ENTRIES, ENTRIES_FOUND_BY_TESTS, ENTRIES_OF_PUBLIC_CODE, Entry, chosen, judge, run_zoo

CACHE = ROOT / ".zoo-cache"
PAGE = DOCS / "zoo.md"
GROUPS = {"public code": ENTRIES_OF_PUBLIC_CODE, "found by tests": ENTRIES_FOUND_BY_TESTS}
NUM_MEASURED = 4  # columns at the end of a row
METHODS = (
    "f-DP(CP)",
    "f-DP(ZB)",
    "(eps,delta)(CP)",
    "(eps,delta)(ZB)",
    "eps-DP(Katz)",
    "f-DP(joint)",
    "f-DP(betting)",
)


def flagged(entry: Entry, *, is_broken: bool, num_seeds: int) -> list[list[str]]:
    """Return what flags the run of each seed; seeds start at 1, because the matrix uses 0."""
    file = CACHE / f"{entry.name}-{'broken' if is_broken else 'twin'}.json"
    found: list[list[str]] = json.loads(file.read_text()) if file.exists() else []
    while len(found) < num_seeds:
        seed = 1 + len(found)
        found.append(list(judge(entry.observe(is_broken=is_broken, seed=seed)).caught_by))
        keep(file, found)
    return found


def keep(file: Path, found: object) -> None:
    """Write the results so far; the file stays intact if interrupted."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(found))
    new.replace(file)


def counted(entries: list[Entry], num_seeds: dict[bool, int]) -> dict[str, dict[bool, str]]:
    """Return how many seeds are flagged; twins, which must not be flagged, run first."""
    counts: dict[str, dict[bool, str]] = {entry.name: {} for entry in entries}
    for is_broken, count in num_seeds.items():
        for entry in entries:
            run = entry if is_broken else same_twin(entry)
            found = flagged(run, is_broken=is_broken, num_seeds=count)
            counts[entry.name][is_broken] = f"{sum(map(bool, found))} of {len(found)}"
            what = "broken" if is_broken else f"twin ({run.name})"
            print(f"{entry.name}, {what}: {counts[entry.name][is_broken]} flagged", flush=True)
    return counts


def same_twin(entry: Entry) -> Entry:
    """Return the first entry with the same twin: entries that differ only in their fault share it."""
    return next(other for other in ENTRIES if twin(other) == twin(entry))


def twin(entry: Entry) -> object:
    """Return a value that identifies the twin of an entry: its scenario without the fault."""
    scenario: Any = entry.scenario
    fault = next((name for name in ("mechanism", "fault") if hasattr(scenario, name)), None)
    if fault is None:
        return entry.name
    without = {fault: None, "size": None} if hasattr(scenario, "size") else {fault: None}
    return replace(scenario, **without)


def measured_cells(entries: list[dict[str, Any]], counts: dict[str, dict[bool, str]]) -> dict[str, list[str]]:
    """Return the last cells of each row, which are measured."""
    return {
        entry["name"]: [
            ", ".join(entry["broken"]["caught_by"]) or f"not caught: {entry['not_caught']}",
            "" if entry["broken"]["steps_needed"] is None else str(entry["broken"]["steps_needed"]),
            counts[entry["name"]][True],
            counts[entry["name"]][False],
        ]
        for entry in entries
    }


def faults_table(group: str, new: dict[str, list[str]]) -> str:
    """Return the rows of a group: new cells, or those on the page, with the current descriptions."""
    head = ["", "fault", "what was wrong", "fix", "where", "injected into"]
    old = {row_name(line): cells(line)[-NUM_MEASURED:] for line in lines_of(group)}
    names = {entry.name for entry in GROUPS[group]}
    rows = [
        [str(place), f"`{entry.name}`", entry.wrong, entry.fix or "", entry.public, entry.kind, *known]
        for place, entry in enumerate(ENTRIES, 1)
        if entry.name in names and (known := new.get(entry.name) or old.get(entry.name))
    ]
    return markdown_table([*head, "caught by", "steps", "caught", "twin flagged"], rows)


def methods_table(entries: list[dict[str, Any]]) -> str:
    rows = []
    for entry in entries:
        broken = entry["broken"]
        found = {method["name"]: method for method in broken["methods"]}
        if found:
            bounds = [cell(found.get(name)) for name in METHODS]
            tests, bound = broken["tests"], broken["bound"]
            findings = "" if tests is None else steps(bool(tests["findings"]), "found", tests["steps_needed"])
            verdict = steps(bound["verdict"] == "VIOLATION", number(bound["epsilon"]), bound["steps_needed"])
            name, claim = f"`{entry['name']}`", number(broken["claimed_epsilon"])
            rows.append([name, claim, *bounds, verdict, findings])
    return markdown_table(["fault", "claim", *METHODS, "verdict", "tests"], rows)


def cell(method: dict[str, Any] | None) -> str:
    if method is None:
        return ""
    return steps(method["is_violation"], number(method["epsilon"]), method["steps_needed"])


def steps(is_caught: bool, text: str, needed: int | None) -> str:
    return f"**{text}** ({needed})" if is_caught else text.replace("found", "")


def number(value: float | str) -> str:
    return f"{float(value):.3g}"


def write(name: str, text: str) -> None:
    write_block(PAGE, f"zoo.py: {name}", text)


def lines_of(name: str) -> list[str]:
    """Return the rows of a table on the page."""
    return [line for line in block_of(PAGE, f"zoo.py: {name}").split("\n") if "`" in line]


def row_name(line: str) -> str:
    """Return the entry of a row, which is its first name in backquotes."""
    return line.split("`")[1]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def merged(name: str, new: str) -> str:
    """Return the table of the page, with new rows in place of old ones."""
    head, rule, *lines = new.split("\n")
    rows = {row_name(line): line for line in [*lines_of(name), *lines]}
    return "\n".join([head, rule, *(rows[entry.name] for entry in ENTRIES if entry.name in rows)])


def runs(only: list[str]) -> str:
    """Return a sentence with the number of runs, read from the tables on the page."""
    rows = {f"`{row_name(line)}`": cells(line) for group in GROUPS for line in lines_of(group)}
    said = [
        f"{what} were run with {grouped({name: row[place] for name, row in rows.items()})}."
        for what, place in (("Faults", -2), ("Twins", -1))
    ]
    if only:
        names = ", ".join(f"`{name}`" for name in only)
        said.append(f"Since the last complete run, only {names} were measured again.")
    return " ".join(said)


def grouped(cells: dict[str, str]) -> str:
    """Turn cells such as "0 of 40" into "40 seeds; with 24: a, b"."""
    names = defaultdict[int, list[str]](list)
    for name, cell in cells.items():
        names[int(cell.split(" of ")[1])].append(name)
    usual = max(names, key=lambda number: len(names[number]))
    others = [f"with {number}: {', '.join(some)}" for number, some in names.items() if number != usual]
    return "; ".join([f"{usual} seeds", *others])


def violations() -> str:
    """Return the table of the paper's three violations; finished runs are cached."""
    file = CACHE / "violations.json"
    found = json.loads(file.read_text()) if file.exists() else []
    for case in CASES[len(found) :]:
        found.append(case.measured())
        keep(file, found)
        print(case.name, found[-1], flush=True)
    return markdown_table(HEAD, [case.row(one) for case, one in zip(CASES, found, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--broken-seeds", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--as-is", action="store_true")
    parser.add_argument("--violations", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    CACHE.mkdir(exist_ok=True)
    if options.violations:
        write("violations", violations())
        return
    entries = chosen(ENTRIES, options.only)
    num_seeds = {False: 0, True: 0} if options.as_is else {False: options.seeds, True: options.broken_seeds}
    counts = counted(entries, num_seeds)
    found = run_zoo(entries, seed=0, output=CACHE / "matrix", watch=lambda *args: print(*args, flush=True))
    new = measured_cells(found["entries"], counts)
    for group in GROUPS:
        write(group, faults_table(group, new))
    write("methods", merged("methods", methods_table(found["entries"])))
    write("runs", runs(options.only))
    if not options.only:
        write("violations", violations())


if __name__ == "__main__":
    main()
