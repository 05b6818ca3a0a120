"""Run the zoo with many seeds, and write what was measured into docs/zoo.md.

    python benchmarks/zoo.py [--seeds 40] [--broken-seeds 10] [--only NAME ...] [--as-is]

The matrix is that of `dpaudit zoo` with seed 0. Finished runs are kept in .zoo-cache, so that an interrupted
one goes on where it stopped; delete it after a change of anything that is measured. With --as-is the page is
written from what is there.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dpaudit._files import write_text
from dpaudit.training import GaussianSum
from dpaudit.zoo import ENTRIES, Entry, chosen, judge, run_zoo
from dpaudit.zoo.specimens import NativeTraining

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".zoo-cache"
PAGE = ROOT / "docs" / "zoo.md"
BEGIN, END = "<!-- written by benchmarks/zoo.py: {} -->", "<!-- end -->"
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
    """By what each seed's run is flagged; seeds from 1 on, because 0 is that of the matrix."""
    file = CACHE / f"{entry.name}-{'broken' if is_broken else 'twin'}.json"
    found: list[list[str]] = json.loads(file.read_text()) if file.exists() else []
    while len(found) < num_seeds:
        seed = 1 + len(found)
        found.append(list(judge(entry.observe(is_broken=is_broken, seed=seed)).caught_by))
        write_text(file, json.dumps(found))
    return found


def counted(entries: list[Entry], num_seeds: dict[bool, int]) -> dict[str, dict[bool, str]]:
    """How many of the seeds are flagged, of the twins first: they are what must not be."""
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
    """The first entry whose twin is the same training: without its fault it is nothing of its own."""
    return next(other for other in ENTRIES if twin(other) == twin(entry))


def twin(entry: Entry) -> object:
    """What tells a twin apart from others."""
    specimen = entry.specimen
    if isinstance(specimen, NativeTraining):
        return replace(specimen, mechanism=GaussianSum)
    return entry.name if entry.kind != "Opacus, two processes" else entry.kind


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def faults_table(entries: list[dict[str, Any]], counts: dict[str, dict[bool, str]]) -> str:
    rows = [
        [
            f"`{entry['name']}`",
            entry["wrong"],
            entry["public"],
            entry["kind"],
            ", ".join(entry["broken"]["caught_by"]) or f"not caught: {entry['not_caught']}",
            str(entry["broken"]["steps_needed"] or ""),
            counts[entry["name"]][True],
            counts[entry["name"]][False],
        ]
        for entry in entries
    ]
    head = ["fault", "what was wrong", "where", "put into", "caught by", "steps"]
    return table([*head, "caught", "twin flagged"], rows)


def methods_table(entries: list[dict[str, Any]]) -> str:
    rows = []
    for entry in entries:
        broken = entry["broken"]
        found = {method["name"]: method for method in broken["methods"]}
        if found:
            cells = [cell(found.get(name)) for name in METHODS]
            tests, bound = broken["tests"], broken["bound"]
            findings = "" if tests is None else steps(bool(tests["findings"]), "found", tests["steps_needed"])
            verdict = steps(bound["verdict"] == "VIOLATION", number(bound["epsilon"]), bound["steps_needed"])
            name, claim = f"`{entry['name']}`", number(broken["claimed_epsilon"])
            rows.append([name, claim, *cells, verdict, findings])
    return table(["fault", "claim", *METHODS, "verdict", "tests"], rows)


def cell(method: dict[str, Any] | None) -> str:
    if method is None:
        return ""
    return steps(method["is_violation"], number(method["epsilon"]), method["steps_needed"])


def steps(is_caught: bool, text: str, needed: int | None) -> str:
    return f"**{text}** ({needed})" if is_caught else text.replace("found", "")


def number(value: float | str) -> str:
    return f"{float(value):.3g}"


def write(name: str, text: str) -> None:
    begin = BEGIN.format(name)
    page = PAGE.read_text()
    pattern = f"{re.escape(begin)}.*?{re.escape(END)}"
    PAGE.write_text(re.sub(pattern, lambda _: f"{begin}\n\n{text}\n\n{END}", page, count=1, flags=re.DOTALL))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--broken-seeds", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--as-is", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    CACHE.mkdir(exist_ok=True)
    entries = chosen(ENTRIES, options.only)
    num_seeds = {False: 0, True: 0} if options.as_is else {False: options.seeds, True: options.broken_seeds}
    counts = counted(entries, num_seeds)
    found = run_zoo(entries, seed=0, output=CACHE / "matrix", watch=lambda *args: print(*args, flush=True))
    if not options.only:
        write("faults", faults_table(found["entries"], counts))
        write("methods", methods_table(found["entries"]))


if __name__ == "__main__":
    main()
