"""Check that score files are counted and audited in bounded memory, in time that grows with their size.

With 250 million float32 scores per side and a fixed threshold, counting must use less than 1 GB of memory and
at most twice the time of a program that only reads both files in pieces and compares every score. Both run
alternately, each in a separate process.

``dpaudit scores --normalized`` with a claim must use at most 300 MB for 1, 10 and 100 million scores per
side and, if ``--before`` names the sources of another version, at most a quarter more processor time than
those. Both run one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _measure import ONE_THREAD, Table, finish, milliseconds

MEMORY, RATIO = 1e9, 2.0
SIZES, AUDIT_MEMORY, AUDIT_RATIO = (1_000_000, 10_000_000, 100_000_000), 3e8, 1.25
PIECE = 1 << 22

# The first and last lines of both programs. A process inherits the peak memory of its parent, which is
# therefore kept small.
START = """
import json, resource, sys, time
import numpy as np
start = time.perf_counter()
"""
END = """
taken = time.perf_counter() - start
kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": taken, "bytes": 1024 * kilobytes, "above": above}))
"""
READ = """
buffer, above = np.empty(1 << 18, np.float32), []
for path in sys.argv[1:]:
    above.append(0)
    with open(path, "rb") as file:
        np.lib.format.read_magic(file)
        np.lib.format.read_array_header_1_0(file)
        while size := file.readinto(buffer.data):
            above[-1] += int(np.count_nonzero(buffer[: size // 4] > 0.5))
"""
COUNT = """
import dpaudit, dpaudit.stats  # load lazy imports before the clock starts
start = time.perf_counter()
absent, present = (np.load(path, mmap_mode="r") for path in sys.argv[1:])
counts = dpaudit.lower_bound(
    dpaudit.Observations(with_canary=present, without_canary=absent),
    delta=1e-5,
    tradeoff=dpaudit.Gaussian(),
    inference=dpaudit.ClopperPearson(),
    threshold=dpaudit.Fixed(0.5),
).counts
above = [counts.false_positives, counts.num_present - counts.false_negatives]
"""

# Processor time of the whole command without imports, and its peak memory.
AUDIT = """
import json, os, resource, sys
sys.path.insert(0, sys.argv.pop(1))
from dpaudit.cli._app import app
start = resource.getrusage(resource.RUSAGE_SELF)
output, sys.stdout = sys.stdout, open(os.devnull, "w")
paths = ["--without", sys.argv[1], "--with", sys.argv[2]]
try:
    app(["scores", *paths, "--normalized", "--noise-multiplier", "1.0", "--delta", "1e-5"])
except SystemExit as exit:
    status = exit.code
end = resource.getrusage(resource.RUSAGE_SELF)
taken = end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime
print(json.dumps({"seconds": taken, "bytes": 1024 * end.ru_maxrss, "status": status}), file=output)
"""


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--size", type=int, default=250_000_000, help="scores per side")
    arguments.add_argument("--repetitions", type=int, default=5)
    arguments.add_argument("--before", type=Path, help="the src folder of another version to compare with")
    arguments.add_argument("--audits", type=int, nargs="*", default=SIZES, help="scores per side of audits")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{name}.npy") for name in ("absent", "present")]
        for mean, path in enumerate(paths):
            _write(path, options.size, mean)
        found = _run_alternately(paths, options.repetitions)
    return finish(_table(options.size, found), _audits(options.audits, options.before))


def _audits(sizes: Sequence[int], before: Path | None) -> Table:
    """Audit files of each size, also with the sources before, if they are given."""
    table = Table(
        "dpaudit scores --normalized, float32 scores in files",
        ("scores per side", "time before", "time", "ratio", "limit", "peak memory", "limit"),
    )
    ours = Path(__file__).parent.parent / "src"
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{name}.npy") for name in ("absent", "present")]
        for size in sizes:
            for mean, path in enumerate(paths):
                _write(path, size, mean)
            then = None if before is None else _run_audit(before, paths)
            now = _run_audit(ours, paths)
            ratio = 0.0 if then is None else now["seconds"] / then["seconds"]
            table.add(
                f"{size:,}",
                "" if then is None else milliseconds(then["seconds"]),
                milliseconds(now["seconds"]),
                "" if then is None else f"{ratio:.2f}",
                f"{AUDIT_RATIO:g}",
                f"{now['bytes'] / 1e6:,.0f} MB",
                f"{AUDIT_MEMORY / 1e6:,.0f} MB",
                met=ratio <= AUDIT_RATIO and now["bytes"] <= AUDIT_MEMORY and now["status"] == 0,
            )
    return table


def _run_audit(source: Path, paths: list[Path]) -> dict[str, Any]:
    command = [sys.executable, "-c", AUDIT, str(source), *map(str, paths)]
    done = subprocess.run(command, check=True, capture_output=True, env={**os.environ, **ONE_THREAD})
    return dict(json.loads(done.stdout))


def _write(path: Path, size: int, mean: float) -> None:
    """Write Gaussian scores in pieces: repeated ones would not be independent, which audits assume."""
    rng = np.random.default_rng(int(mean))
    header = {"descr": "<f4", "fortran_order": False, "shape": (size,)}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, size, PIECE):
            piece = rng.standard_normal(min(PIECE, size - start), dtype=np.float32)
            (np.float32(mean) + piece).tofile(file)


def _run_alternately(paths: list[Path], repetitions: int) -> dict[str, list[dict]]:
    programs = {"read and compare": START + READ + END, "dpaudit": START + COUNT + END}
    found: dict[str, list[dict]] = {name: [] for name in programs}
    for _ in range(repetitions + 1):
        for name, program in programs.items():
            command = [sys.executable, "-c", program, *map(str, paths)]
            done = subprocess.run(command, check=True, capture_output=True, env={**os.environ, **ONE_THREAD})
            found[name].append(json.loads(done.stdout))
    # the first round warms the page cache
    return {name: runs[1:] for name, runs in found.items()}


def _table(size: int, found: dict[str, list[dict]]) -> Table:
    table = Table(
        f"Counting {size:,} float32 scores per side in files, Fixed(0.5)",
        ("program", "time", "ratio", "limit", "peak memory", "limit"),
    )
    plain, ours = found["read and compare"], found["dpaudit"]
    if ours[0]["above"] != plain[0]["above"]:
        raise AssertionError(f"The two programs disagree: {ours[0]} and {plain[0]}.")
    times = {name: statistics.median(run["seconds"] for run in runs) for name, runs in found.items()}
    ratio = times["dpaudit"] / times["read and compare"]
    memory = {name: max(run["bytes"] for run in runs) for name, runs in found.items()}
    first, second = ((milliseconds(times[name]), f"{memory[name] / 1e6:,.0f} MB") for name in found)
    table.add("read and compare", first[0], "1.00", "", first[1], "")
    table.add(
        *("dpaudit", second[0], f"{ratio:.2f}", f"{RATIO:g}", second[1], f"{MEMORY / 1e6:,.0f} MB"),
        met=ratio <= RATIO and memory["dpaudit"] <= MEMORY,
    )
    return table


if __name__ == "__main__":
    sys.exit(main())
