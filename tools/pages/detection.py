"""Measure which faults the default settings of every observer detect, and write docs/detection.md.

    python tools/pages/detection.py [--seeds 10] [--only NAME ...] [--observers NAME ...] [--as-is]

Every run is three lines of the README: observe, train, audit. The faults are in ``dpaudit.zoo.faults`` and
``_unseen_faults``, the training loops in ``_detection_runs``. Finished runs are kept in
.detection-cache.json, so that an interrupted command resumes there; runs of other code are repeated, unless
--stale is given. With --as-is, the page and its picture are
written from docs/data. --parts selects tables: required,
sizes, twins, causes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from _detection_page import CAUSES, CAUSES_HEAD, CORRECT, DATA, HEAD, NAMES, documents
from _detection_runs import RUNS, Run
from _shared import ROOT, restart_in_environment, write, write_csv
from _unseen_faults import UNSEEN

from dpaudit.zoo.faults import FAULTS, OBSERVERS, TWINS, Fault

CACHE = ROOT / ".detection-cache.json"
STEPS = (300, 500)
ENOUGH = 0.9  # of the seeds
LEVELS = 10  # noise multipliers from 1 to 2, evenly spread: a seed has one of them
PARTS = ("required", "sizes", "twins", "causes")
KNOWN = {fault.name: fault for fault in (*FAULTS, *TWINS, *(unseen.fault for unseen in UNSEEN))}


@dataclass(frozen=True)
class Task:
    """One audited training run."""

    fault: str
    size: Any
    observer: str
    num_steps: int
    seed: int

    @property
    def key(self) -> str:
        size = "" if self.size is None else f"({self.size})"
        return f"{self.fault}{size}/{self.observer}/{self.num_steps}/{self.seed}"

    @property
    def noise_multiplier(self) -> float:
        return 1.0 + self.seed % LEVELS / (LEVELS - 1)

    def run(self) -> dict[str, Any]:
        """Train, audit, and return what detected the fault."""
        warnings.simplefilter("ignore")
        start = time.perf_counter()
        fault = KNOWN[self.fault]
        run = Run(fault, self.size, sigma=self.noise_multiplier, num_steps=self.num_steps, seed=self.seed)
        try:
            found = verdict_of(RUNS[self.observer](run))
        except Exception as error:  # noqa: BLE001  # a refusal, or a mistake in this benchmark: both are printed
            is_refusal = "InputError" in "".join(traceback.format_exception(error))  # JAX wraps it
            name = "refused" if is_refusal else "error"
            found = {"caught": [f"{name}: {type(error).__name__}"], "cause": str(error)[:400]}
        return {**found, "seconds": round(time.perf_counter() - start, 2)}


def verdict_of(recorder: Any) -> dict[str, Any]:
    """Return what refutes the claim (the bound and findings), and the first likely cause."""
    result = recorder.audit()
    caught = ["bound"] if result.bound.parameter > result.hypothesis.parameter else []
    if hasattr(result, "findings"):  # one verdict for the bound and the tests
        names, causes = [finding.name for finding in result.findings], result.likely_causes()
    else:
        diagnosis = recorder.diagnose(confidence=0.99)
        names, causes = [finding.name for finding in diagnosis.findings], diagnosis.likely_causes()
    return {"caught": [*caught, *names], "cause": causes[0] if causes else ""}


class Runs:
    """Finished runs, in a file."""

    def __init__(self, *, stale: bool) -> None:
        self.version, self._stale = code_version(), stale
        stored = json.loads(CACHE.read_text()) if CACHE.exists() else {}
        self.found: dict[str, dict[str, Any]] = stored

    def get(self, task: Task) -> dict[str, Any] | None:
        found = self.found.get(task.key)
        return found if found is not None and (self._stale or found["code"] == self.version) else None

    def add(self, task: Task, found: dict[str, Any]) -> None:
        self.found[task.key] = {**found, "code": self.version}

    def save(self) -> None:
        part = CACHE.with_suffix(".part")
        part.write_text(json.dumps(self.found, indent=0))
        part.replace(CACHE)

    def caught(self, tasks: Iterable[Task]) -> tuple[int, int]:
        """Return how many of the finished runs were caught, and how many are finished."""
        found = [run for run in map(self.get, tasks) if run is not None]
        return sum(is_caught(run) for run in found), len(found)


def is_caught(run: dict[str, Any]) -> bool:
    return bool(run["caught"]) and not run["caught"][0].startswith("error")


def code_version() -> str:
    """Return a hash of the code that a run depends on."""
    files = sorted((ROOT / "src" / "dpaudit").rglob("*.py"))
    files += [ROOT / "src" / "dpaudit" / "zoo" / "faults.toml"]
    files += [Path(__file__).parent / name for name in ("_detection_runs.py", "_unseen_faults.py")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def required_size(fault: Fault) -> Any:
    return fault.sizes[0] if fault.required is None else fault.required


def sizes_up_to(fault: Fault) -> tuple[Any, ...]:
    """Return the sizes that must be caught: the required one and everything larger."""
    return fault.sizes[: fault.sizes.index(required_size(fault)) + 1]


@dataclass(frozen=True)
class Line:
    """A fault of one size in one observer."""

    fault: Fault
    size: Any
    observer: str

    def tasks(self, num_steps: int, count: int) -> list[Task]:
        """Return one run per seed."""
        return [Task(self.fault.name, self.size, self.observer, num_steps, seed) for seed in range(count)]

    def is_enough(self, runs: Runs, num_steps: int, count: int) -> bool:
        """Return whether the fault is caught often enough within this number of steps.

        What is caught within 300 steps counts as caught within 500, which is then not run.
        """
        found = (runs.caught(self.tasks(steps, count)) for steps in STEPS if steps <= num_steps)
        return any(done == count and caught >= ENOUGH * count for caught, done in found)


class Plan:
    """The runs that are still needed; what is needed depends on what was found."""

    def __init__(self, runs: Runs, arguments: argparse.Namespace) -> None:
        self._runs, self._count, self._parts = runs, arguments.seeds, arguments.parts
        self._observers = arguments.observers
        self._faults = [fault for fault in FAULTS if not arguments.only or fault.name in arguments.only]
        self._only = arguments.only

    def needed(self) -> list[Task]:
        """Return unfinished runs: first seeds first, so that every part of the page exists early."""
        tasks = dict.fromkeys(task for task in self._all() if self._runs.get(task) is None)
        return sorted(tasks, key=lambda task: (task.seed, task.size != required_size(KNOWN[task.fault])))

    def _all(self) -> Iterator[Task]:
        if "required" in self._parts:
            for fault, observer in self._places():
                for size in sizes_up_to(fault):
                    yield from self._at_both(Line(fault, size, observer))
        if "sizes" in self._parts:
            for fault, observer in self._places():
                yield from self._smaller(fault, observer)
        if "twins" in self._parts:
            yield from twin_tasks(self._count, self._observers)
        if "causes" in self._parts:
            yield from (task for task in cause_tasks() if task.observer in self._observers)

    def _places(self) -> Iterator[tuple[Fault, str]]:
        for fault in self._faults:
            yield from ((fault, observer) for observer in self._observers if observer in fault.observers)

    def _at_both(self, line: Line) -> Iterator[Task]:
        """Yield runs of 300 steps, and of 500 if those were not enough."""
        first = line.tasks(STEPS[0], self._count)
        yield from first
        caught, done = self._runs.caught(first)
        if done == len(first) and caught < ENOUGH * len(first):
            yield from line.tasks(STEPS[1], self._count)

    def _smaller(self, fault: Fault, observer: str) -> Iterator[Task]:
        """Yield runs of smaller and smaller faults, until one is missed too often."""
        for size in fault.sizes[len(sizes_up_to(fault)) :]:
            for num_steps in STEPS:
                tasks = Line(fault, size, observer).tasks(num_steps, self._count)
                caught, done = self._runs.caught(tasks)
                if done - caught <= (1 - ENOUGH) * len(tasks) + 1e-9:  # not yet missed too often
                    yield from tasks
                    if done < len(tasks):
                        return
                    break
            else:
                return


def twin_tasks(count: int, observers: Iterable[str] = OBSERVERS) -> list[Task]:
    """Return the runs of correct twins: with ten seeds, 20 in each of six observers and 100 of variants."""
    tasks = []
    for observer in observers:
        tasks += Line(TWINS[0], None, observer).tasks(STEPS[0], 2 * count)
        for twin in TWINS[1:]:
            tasks += Line(twin, None, observer).tasks(STEPS[0], count)
    return tasks


def cause_tasks() -> list[Task]:
    return [Task(one.fault.name, None, one.observer, STEPS[0], 0) for one in UNSEEN]


def run_task(task: Task) -> tuple[Task, dict[str, Any]]:
    return task, task.run()


def execute(tasks: list[Task], runs: Runs, num_processes: int) -> None:
    """Run tasks in processes of their own, and keep each result."""
    context = get_context("spawn")
    last = time.monotonic()
    with context.Pool(num_processes, maxtasksperchild=60) as pool:
        for number, (task, found) in enumerate(pool.imap_unordered(run_task, tasks), 1):
            runs.add(task, found)
            print(f"{number}/{len(tasks)} {task.key}: {found['caught']} {found['seconds']} s", flush=True)
            if time.monotonic() - last > 5:
                runs.save()
                last = time.monotonic()
    runs.save()


def summary(runs: Runs, count: int) -> Iterator[str]:
    """Yield a sentence for each required fault that was missed, and for each twin that was not."""
    for line in required_lines():
        tasks = line.tasks(STEPS[0], count)
        caught, done = runs.caught(tasks)
        if caught < done:
            by = Counter(name for run in map(runs.get, tasks) if run for name in run["caught"])
            names = ", ".join(f"{name} {number}" for name, number in by.most_common(4))
            where = f"{line.fault.name} {line.size or ''} {line.observer}"
            yield f"missed: {where}: {caught}/{done} {names}"
    for task in twin_tasks(count):
        run = runs.get(task)
        if run and run["caught"]:
            yield f"false alarm: {task.key}: {run['caught']} {run['cause']}"


def required_lines() -> Iterator[Line]:
    for fault in FAULTS:
        for observer in fault.observers:
            yield from (Line(fault, size, observer) for size in sizes_up_to(fault))


def causes(runs: Runs) -> Iterator[tuple[Any, str, bool | None]]:
    """Yield each unseen fault with its first cause, and whether it is right."""
    for unseen, task in zip(UNSEEN, cause_tasks(), strict=True):
        run = runs.get(task)
        if run is not None:
            cause = run["cause"] if run["caught"] else "(not detected)"
            is_right = bool(re.search(unseen.expected, cause, re.IGNORECASE)) and not unseen.became_cause
            yield unseen, cause, is_right and is_caught(run)


def data_rows(runs: Runs, count: int) -> Iterator[list[str]]:
    """Yield the finished runs of every fault, size, observer and number of steps, then those of twins."""
    for fault in FAULTS:
        for size in fault.sizes:
            lines = [Line(fault, size, observer) for observer in fault.observers]
            by = Counter[str]()
            for run in (runs.get(task) for line in lines for task in line.tasks(STEPS[0], count)):
                by.update({name.split(":")[0] for name in run["caught"]} if run else ())
            names = " ".join(name for name, _ in by.most_common(3))
            for line in lines:
                for steps in STEPS:
                    caught, done = runs.caught(line.tasks(steps, count))
                    if done:
                        place = [fault.family, fault.text, shown(size), NAMES[line.observer]]
                        yield [*place, str(steps), str(caught), str(done), names]
    for twin in TWINS:
        for observer in OBSERVERS:
            tasks = [
                task for task in twin_tasks(count) if (task.fault, task.observer) == (twin.name, observer)
            ]
            caught, done = runs.caught(tasks)
            yield [CORRECT, twin.text, "", NAMES[observer], str(STEPS[0]), str(caught), str(done), ""]


def shown(size: Any) -> str:
    if size is None:
        return ""
    return size if isinstance(size, str) else f"{size:,}" if isinstance(size, int) else f"{size:g}"


def cause_rows(runs: Runs) -> Iterator[list[str]]:
    """Yield each unseen fault with its first likely cause."""
    for unseen, cause, is_right in causes(runs):
        right = "no; a cause since" if unseen.became_cause else "yes" if is_right else "no"
        yield [unseen.fault.text, NAMES[unseen.observer], cause, right]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="names of faults")
    parser.add_argument("--observers", nargs="*", default=list(OBSERVERS), choices=OBSERVERS, metavar="NAME")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS, metavar="PART")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--as-is", action="store_true", help="write the page and its picture from the data")
    parser.add_argument("--stale", action="store_true", help="keep runs of other code")
    arguments = parser.parse_args()
    runs = Runs(stale=arguments.stale)
    plan = Plan(runs, arguments)
    while not arguments.as_is and (tasks := plan.needed()):
        execute(tasks, runs, arguments.processes)
    if not arguments.as_is:
        print("\n".join(summary(runs, arguments.seeds)))
        write_csv(DATA, HEAD, data_rows(runs, arguments.seeds))
        write_csv(CAUSES, CAUSES_HEAD, cause_rows(runs))
    for path, text in documents().items():
        write(path, text)
    return 0


if __name__ == "__main__":
    restart_in_environment()
    sys.exit(main())
