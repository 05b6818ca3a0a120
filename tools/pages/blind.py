"""Run the blind benchmark: harmful faults that were written without sight of how dpaudit detects anything.

    python tools/pages/blind.py --half development --with-replay

Each fault and its correct twin are trained under `observe` and audited at default settings, each run in a
process of its own. Finished runs are kept in `.blind-cache`, by the state of the code, so that an interrupted
run continues. A fault counts as detected if every seed detects it, a twin as flagged if one does. `--write`
writes `docs/data/blind.csv`.

The held-out half is for measurement only: do not read its files. `--details` prints its misses.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import inspect
import json
import os
import re
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _blind_case import GROUPS, BlindFault
from _blind_faults import DEVELOPMENT
from _blind_held_out import HELD_OUT
from _shared import DOCS, ROOT, write, write_csv

CACHE = ROOT / ".blind-cache"
TIMEOUT = 300  # seconds per run, on a busy machine
HALVES = {"development": DEVELOPMENT, "held-out": HELD_OUT, "all": (*DEVELOPMENT, *HELD_OUT)}
HEAD = ("group", "fault", "library", "half", "at defaults", "with replay", "cause", "twin")
OPEN = re.compile(
    r"not clear|unclear|unknown|no single|several (causes|things)|candidates?|can (do|cause) this",
    re.I,
)
LIST = re.compile(r",[^,?]*,? or |; or ", re.I)


@dataclass(frozen=True)
class Job:
    """One run: the fault or its twin, audited or replayed."""

    fault: BlindFault
    broken: bool
    replay: bool
    seed: int

    def path(self) -> Path:
        """Where the outcome is kept."""
        parts = (
            self.fault.name,
            "fault" if self.broken else "twin",
            "replay" if self.replay else "audit",
            str(self.seed),
        )
        return CACHE / _code_state(inspect.getfile(self.fault.scenario)) / f"{'.'.join(parts)}.json"

    def facts(self) -> dict[str, Any]:
        """Run, and return what was reported."""
        if self.replay:
            result = self.fault.replay(self.seed, broken=self.broken)
            return {"skipped": True} if result is None else _facts_of([result])
        run = self.fault.run if self.broken else self.fault.run_twin
        return _facts_of(run(self.seed))


def _facts_of(results: Sequence[Any]) -> dict[str, Any]:
    causes = [cause for r in results for cause in (r.likely_causes() if hasattr(r, "likely_causes") else ())]
    return {
        "violation": any(_is_violation(r) for r in results),
        "findings": [[f.name, f.sentence] for r in results for f in r.findings],
        "causes": causes,
        "to_check": [[f.name, f.sentence] for r in results for f in getattr(r, "to_check", ())],
    }


def _is_violation(result: Any) -> bool:
    verdict = getattr(result, "verdict", None)  # a replay has findings only
    return bool(result.findings) if verdict is None else verdict.name == "VIOLATION"


@functools.cache
def _code_state(scenario: str) -> str:
    """Return a digest of the code under test and of the file with a scenario."""
    here = Path(__file__).parent
    files = [*sorted((ROOT / "src").rglob("*.py")), here / "_blind_case.py", here / "_blind_jax.py"]
    files.append(Path(scenario))
    digest = hashlib.sha256()
    for file in files:
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _in_a_process(job: Job) -> dict[str, Any]:
    """Run the job in a fork, so that nothing of one run is left in the next."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os._exit(_child(job, writing))
    os.close(writing)
    try:
        text = _read_all(reading, time.monotonic() + TIMEOUT)
    finally:
        os.close(reading)
    if text is None:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if not text:
        return {"error": "timeout" if text is None else "the process died"}
    facts: dict[str, Any] = json.loads(text)
    return facts


def _child(job: Job, pipe: int) -> int:
    try:
        with open(os.devnull, "w") as nowhere, os.fdopen(pipe, "w") as out:  # noqa: PTH123
            os.dup2(nowhere.fileno(), 1)
            try:
                facts = job.facts()
            except Exception as error:  # noqa: BLE001
                last = traceback.extract_tb(error.__traceback__)[-1]
                place = f"{Path(last.filename).name}:{last.lineno}"
                facts = {"error": f"{type(error).__name__} at {place}: {error}"[:600]}
            out.write(json.dumps(facts))
    except BaseException:  # noqa: BLE001
        return 1
    return 0


def _read_all(pipe: int, deadline: float) -> str | None:
    """Return what the child wrote; None at the deadline."""
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        part = os.read(pipe, 1 << 16)
        if not part:
            return b"".join(parts).decode()
        parts.append(part)


def _outcome(job: Job) -> dict[str, Any]:
    path = job.path()
    if path.exists():
        facts: dict[str, Any] = json.loads(path.read_text())
        return facts
    start = time.monotonic()
    facts = _in_a_process(job) | {"seconds": round(time.monotonic() - start, 1)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, json.dumps(facts))
    return facts


def _jobs(fault: BlindFault, seeds: int, *, with_replay: bool) -> Iterator[Job]:
    for seed in range(1, seeds + 1):
        for broken in (True, False):
            yield Job(fault, broken, replay=False, seed=seed)
            if with_replay:
                yield Job(fault, broken, replay=True, seed=seed)


@dataclass(frozen=True)
class Row:
    """What all runs of one fault and of its twin showed."""

    fault: BlindFault
    outcomes: list[tuple[Job, dict[str, Any]]]

    def _of(self, *, broken: bool, replay: bool) -> list[dict[str, Any]]:
        return [f for job, f in self.outcomes if (job.broken, job.replay) == (broken, replay)]

    @property
    def errors(self) -> list[str]:
        """Return the errors of all runs."""
        return [
            f"{'fault' if job.broken else 'twin'} {'replay' if job.replay else 'audit'}: {facts['error']}"
            for job, facts in self.outcomes
            if "error" in facts
        ]

    def _says(self, facts: dict[str, Any]) -> bool:
        pattern = re.compile(self.fault.words, re.I)
        return any(pattern.search(f"{name}: {sentence}") for name, sentence in facts.get("to_check", ()))

    @property
    def at_defaults(self) -> str:
        """Return "yes", "to check", "no" or "error"."""
        audits = self._of(broken=True, replay=False)
        if any("error" in facts for facts in audits):
            return "error"
        if all(facts["violation"] for facts in audits):
            return "yes"
        return "to check" if all(facts["violation"] or self._says(facts) for facts in audits) else "no"

    @property
    def with_replay(self) -> str:
        """Return what `observe` or else replay detects, with every seed."""
        replays = self._of(broken=True, replay=True)
        if self.at_defaults == "yes" or not replays:
            return self.at_defaults
        pairs = list(zip(self._of(broken=True, replay=False), replays, strict=True))
        if all(any(facts.get("violation") for facts in pair) for pair in pairs):
            return "yes"
        if all(any(facts.get("violation") or self._says(facts) for facts in pair) for pair in pairs):
            return "to check"
        return "error" if any("error" in f for f in replays) else self.at_defaults

    def _first(self) -> tuple[str, bool]:
        """Return the first named cause, or a sentence, and whether it only states what was observed."""
        for replay in (False, True):
            for facts in self._of(broken=True, replay=replay):
                if facts.get("violation"):
                    sentences = [": ".join(finding) for finding in facts["findings"]]
                    cause = next(iter(facts["causes"]), None)
                    if cause is None:
                        return next(iter(sentences), ""), True
                    return cause, any(cause in sentence for sentence in sentences)
        pattern = re.compile(self.fault.words, re.IGNORECASE)
        for facts in self._of(broken=True, replay=False):
            for item in facts.get("to_check", ()):
                if pattern.search(": ".join(item)):
                    return ": ".join(item), True
        return "", True

    @property
    def first_cause(self) -> str:
        """Return the first named cause, or the sentence of the first finding."""
        return self._first()[0]

    @property
    def cause(self) -> str:
        """Return whether the first cause is "right", "open" or "wrong"; "" if nothing was detected."""
        if self.with_replay not in {"yes", "to check"}:
            return ""
        first, is_fact = self._first()
        if re.search(self.fault.expected, first, re.IGNORECASE):
            return "open" if LIST.search(first) else "right"
        return "open" if is_fact or OPEN.search(first) else "wrong"

    @property
    def twin(self) -> str:
        """Return "passes", "to check", "flagged" (by the audit or by replay) or "error"."""
        audits, replays = (self._of(broken=False, replay=replay) for replay in (False, True))
        if any(facts.get("violation") for facts in audits):
            return "flagged"
        if any(facts.get("violation") for facts in replays):
            return "flagged by replay"
        if any("error" in facts for facts in audits):
            return "error"
        return "to check" if any(facts.get("to_check") for facts in audits) else "passes"

    def twin_reasons(self) -> list[str]:
        """Return what was said about the twin."""
        return sorted(
            {
                f"{name}: {sentence}"
                for job, facts in self.outcomes
                if not job.broken
                for name, sentence in (*facts.get("findings", ()), *facts.get("to_check", ()))
            }
        )


def _count(rows: Sequence[Row], column: str, *values: str) -> int:
    return sum(getattr(row, column) in values for row in rows)


def _table(rows: Sequence[Row]) -> list[str]:
    head = ("group", "faults", "at defaults", "to check", "with replay", "right/open/wrong", "twins flagged")
    lines = [(*head, "to check", "errors")]
    for group in (*GROUPS, "all"):
        part = [row for row in rows if group in {row.fault.group, "all"}]
        if not part:
            continue
        causes = "/".join(str(_count(part, "cause", kind)) for kind in ("right", "open", "wrong"))
        flagged = _count(part, "twin", "flagged"), _count(part, "twin", "flagged by replay")
        lines.append(
            (
                group,
                str(len(part)),
                str(_count(part, "at_defaults", "yes")),
                str(_count(part, "at_defaults", "to check")),
                str(_count(part, "with_replay", "yes", "to check")),
                causes,
                f"{flagged[0]} + {flagged[1]} by replay",
                str(_count(part, "twin", "to check")),
                str(sum(bool(row.errors) for row in part)),
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]


def _details(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        fault = row.fault
        if row.with_replay not in {"yes", "to check"}:
            yield f"MISS   {fault.group} / {fault.name}: {fault.text}"
        elif row.at_defaults not in {"yes", "to check"}:
            yield f"REPLAY {fault.group} / {fault.name}: only with replay. {fault.text}"
        if row.cause == "wrong":
            yield f"CAUSE  {fault.name}: {row.first_cause!r}; wrong: {fault.text}"
        if row.twin not in {"passes", "error"}:
            yield f"TWIN   {fault.name} ({row.twin}): {'; '.join(row.twin_reasons())}"
        for error in dict.fromkeys(row.errors):
            yield f"ERROR  {fault.name}: {error}"


def _half_of(fault: BlindFault) -> str:
    return "development" if fault in DEVELOPMENT else "held-out"


def _cells(row: Row) -> tuple[str, ...]:
    fault = row.fault
    half = _half_of(fault)
    return (
        fault.group,
        fault.text,
        fault.library,
        half,
        row.at_defaults,
        row.with_replay,
        row.cause,
        row.twin,
    )


def _measure(faults: Sequence[BlindFault], arguments: argparse.Namespace) -> list[Row]:
    jobs = [job for f in faults for job in _jobs(f, arguments.seeds, with_replay=arguments.with_replay)]
    rows: dict[str, Row] = {fault.name: Row(fault, []) for fault in faults}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for done, (job, facts) in enumerate(zip(jobs, pool.map(_outcome, jobs), strict=True), 1):
            rows[job.fault.name].outcomes.append((job, facts))
            print(f"[{done}/{len(jobs)}] {_progress(job, facts)}", flush=True)
    return list(rows.values())


def _progress(job: Job, facts: dict[str, Any]) -> str:
    kind = f"{'fault' if job.broken else 'twin '} {'replay' if job.replay else 'audit '} seed {job.seed}"
    if _half_of(job.fault) == "held-out":
        return f"{job.fault.name:36s} {kind}"
    said = "error" if "error" in facts else ", ".join(name for name, _ in facts.get("findings", ())) or "-"
    return f"{job.fault.name:36s} {kind} {said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--half", choices=HALVES, default="development")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--with-replay", action="store_true")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--details", action="store_true", help="list misses of the held-out half too")
    parser.add_argument("--write", action="store_true", help="write docs/data/blind.csv")
    arguments = parser.parse_args()
    faults = [f for f in HALVES[arguments.half] if not arguments.only or f.name in arguments.only]
    if not faults:
        sys.exit("no such fault")
    rows = _measure(faults, arguments)
    listed = [row for row in rows if arguments.details or _half_of(row.fault) == "development"]
    print("", *_table(rows), "", *_details(listed), sep="\n")
    if arguments.write:
        write_csv(DOCS / "data" / "blind.csv", HEAD, [_cells(row) for row in rows])


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()
