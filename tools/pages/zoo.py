"""Run the zoo with many seeds, and write docs/zoo.md, docs/data/zoo.csv and docs/data/zoo-bounds.csv.

    python tools/pages/zoo.py [--seeds 40] [--broken-seeds 10] [--only NAME ...] [--as-is | --violations]

The matrix is that of `dpaudit zoo` with seed 0. Finished runs are kept in .zoo-cache, so that an interrupted
command resumes there; delete it when anything that is measured changes. With --only, the other rows of the
page are kept, and a sentence on the page states which were measured again. With --as-is, the page is written
from existing results. With --violations, only the paper's three violations are run.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _shared import DOCS, ROOT, markdown_table, read_csv, write_block, write_csv
from _violations import CASES, HEAD

from dpaudit.zoo import ENTRIES, ENTRIES_FOUND_BY_TESTS, ENTRIES_OF_PUBLIC_CODE, Entry, chosen, judge, run_zoo

CACHE = ROOT / ".zoo-cache"
PAGE, FAULTS, BOUNDS = DOCS / "zoo.md", DOCS / "data" / "zoo.csv", DOCS / "data" / "zoo-bounds.csv"
FAULTS_HEAD = [
    "number",
    "fault",
    "what was wrong",
    "fix",
    "reported",
    "injected into",
    "caught by",
    "steps",
    "caught",
    "twin flagged",
]
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


def faults_rows(new: dict[str, list[str]]) -> list[list[str]]:
    """Return the rows of all faults: new cells, or those of the file, with the current descriptions."""
    old = {row[1]: row[-NUM_MEASURED:] for row in read_csv(FAULTS)}
    return [
        [str(place), entry.name, entry.wrong, entry.fix or "", entry.public, entry.kind, *measured]
        for place, entry in enumerate(ENTRIES, 1)
        if (measured := new.get(entry.name) or old.get(entry.name))
    ]


def faults_table(group: str, rows: list[list[str]]) -> str:
    """Return what the page shows of a group: the fault, what was wrong, and what catches it."""
    names = {entry.name for entry in GROUPS[group]}
    shown = [[f"`{row[1]}`", row[2], row[6], row[7]] for row in rows if row[1] in names]
    return markdown_table(["fault", "what was wrong", "caught by", "steps"], shown)


def methods_rows(entries: list[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for entry in entries:
        broken = entry["broken"]
        found = {method["name"]: method for method in broken["methods"]}
        if found:
            bounds = [cell(found.get(name)) for name in METHODS]
            tests, bound = broken["tests"], broken["bound"]
            findings = "" if tests is None else steps(bool(tests["findings"]), "found", tests["steps_needed"])
            verdict = steps(bound["verdict"] == "VIOLATION", number(bound["epsilon"]), bound["steps_needed"])
            rows.append([entry["name"], number(broken["claimed_epsilon"]), *bounds, verdict, findings])
    merged = {row[0]: row for row in [*read_csv(BOUNDS), *rows]}
    return [merged[entry.name] for entry in ENTRIES if entry.name in merged]


def cell(method: dict[str, Any] | None) -> str:
    if method is None:
        return ""
    return steps(method["is_violation"], number(method["epsilon"]), method["steps_needed"])


def steps(is_caught: bool, text: str, needed: int | None) -> str:
    return f"{text} ({needed})" if is_caught else text.replace("found", "")


def number(value: float | str) -> str:
    return f"{float(value):.3g}"


def write(name: str, text: str) -> None:
    write_block(PAGE, f"zoo.py: {name}", text)


def runs(rows: list[list[str]], only: list[str]) -> str:
    """Return a sentence with the number of runs of all faults and twins."""
    said = [
        f"{what} ran with {grouped([row[place] for row in rows])}."
        for what, place in (("Faults", -2), ("Twins", -1))
    ]
    if only:
        names = ", ".join(f"`{name}`" for name in only)
        said.append(f"Since the last complete run, only {names} ran again.")
    return " ".join(said)


def grouped(cells: list[str]) -> str:
    """Turn cells such as "0 of 40" into "10 seeds (26 with 40)"."""
    (usual, _), *others = Counter(cell.split(" of ")[1] for cell in cells).most_common()
    more = ", ".join(f"{count} with {number}" for number, count in others)
    return f"{usual} seeds{f' ({more})' if more else ''}"


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
    rows = faults_rows(new)
    write_csv(FAULTS, FAULTS_HEAD, rows)
    write_csv(BOUNDS, ["fault", "claim", *METHODS, "verdict", "tests"], methods_rows(found["entries"]))
    for group in GROUPS:
        write(group, faults_table(group, rows))
    write("runs", runs(rows, options.only))
    if not options.only:
        write("violations", violations())


if __name__ == "__main__":
    main()
