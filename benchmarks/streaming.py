"""Check that score files are counted and audited in bounded memory, in time that grows with their size.

With 250 million float32 scores per side and a fixed threshold, counting must use less than 1 GB of memory and
at most twice the time of a program that only reads both files in pieces and compares every score. Both run
alternately, each in a separate process.

``dpaudit scores --normalized`` with a claim must use at most 300 MB for 1, 10 and 100 million scores per
side and, if ``--before`` names the sources of another version, at most a quarter more processor time than
those. Both run one after the other.

With 10 million scores per side in .npz, .parquet and .csv files, it must use at most 600 MB, with and without
a fixed threshold. And 10,000 bits that are flipped, one at a time, in a .parquet and in an .npz file must end
with a result or an error in one sentence each: no signal, no traceback, and at most 1 GB.
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
import pyarrow
from _measure import ONE_THREAD, Table, finish, milliseconds
from pyarrow import parquet

OURS = Path(__file__).parent.parent / "src"

MEMORY, RATIO = 1e9, 2.0
SIZES, AUDIT_MEMORY, AUDIT_RATIO = (1_000_000, 10_000_000, 100_000_000), 3e8, 1.25
PACKED_MEMORY, FLIP_MEMORY = 6e8, 1e9
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
paths = ["--without", sys.argv[1], "--with", sys.argv[2], *sys.argv[3:]]
try:
    app(["scores", *paths, "--noise-multiplier", "1.0", "--delta", "1e-5"])
except SystemExit as exit:
    status = exit.code
end = resource.getrusage(resource.RUSAGE_SELF)
taken = end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime
print(json.dumps({"seconds": taken, "bytes": 1024 * end.ru_maxrss, "status": status}), file=output)
"""

# Reads files in which single bits are flipped; a child per hundred, so that a signal ends only one.
FLIPS = """
import json, os, random, resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv.pop(1))
from dpaudit.cli._score_files import Columns, ScoreFiles
from dpaudit.errors import InputError

def read(path, content, bits, found):
    for bit in bits:
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            ScoreFiles(path, None, None, Columns()).read(normalized=False)
            os.write(found, b"r")
        except InputError:
            os.write(found, b"e")
    os.write(found, b"m" * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > float(sys.argv[3]) / 1024))

path, rng, outcomes = Path(sys.argv[1]), random.Random(0), ""
content = path.read_bytes()
bits = [rng.randrange(8 * len(content)) for _ in range(int(sys.argv[2]))]
for start in range(0, len(bits), 100):
    end, found = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            read(path, content, bits[start : start + 100], found)
            status = 0
        finally:
            os._exit(status)
    os.close(found)
    status = os.waitpid(child, 0)[1]
    outcomes += os.read(end, 1000).decode() + ("s" if status else "")
    os.close(end)
print(json.dumps({name: outcomes.count(name[0]) for name in ("results", "errors", "memory", "signals")}))
"""


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--size", type=int, default=250_000_000, help="scores per side")
    arguments.add_argument("--repetitions", type=int, default=5)
    arguments.add_argument("--before", type=Path, help="the src folder of another version to compare with")
    arguments.add_argument("--audits", type=int, nargs="*", default=SIZES, help="scores per side of audits")
    arguments.add_argument("--packed", type=int, default=10_000_000, help="scores per side in other formats")
    arguments.add_argument("--flips", type=int, default=10_000, help="bits flipped per format")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{name}.npy") for name in ("absent", "present")]
        for mean, path in enumerate(paths):
            _write(path, options.size, mean)
        found = _run_alternately(paths, options.repetitions)
    return finish(
        _table(options.size, found),
        _audits(options.audits, options.before),
        _packed(options.packed),
        _flips(options.flips),
    )


def _packed(size: int) -> Table:
    """Audit files of every packed format, at the midpoint and at a threshold that is chosen on scores."""
    columns = "format", "threshold", "time", "peak memory", "limit"
    table = Table(f"dpaudit scores, {size:,} scores per side in packed files", columns)
    for suffix in ("npz", "parquet", "csv"):
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder, f"{name}.{suffix}") for name in ("absent", "present")]
            for mean, path in enumerate(paths):
                _write_packed(path, np.random.default_rng(mean).normal(mean, 1.0, size))
            for options in (("--normalized",), ()):
                found = _run_audit(OURS, paths, *options)
                memory = found["bytes"]
                table.add(
                    *(suffix, "1/2" if options else "chosen", milliseconds(found["seconds"])),
                    *(f"{memory / 1e6:,.0f} MB", f"{PACKED_MEMORY / 1e6:,.0f} MB"),
                    met=memory <= PACKED_MEMORY and found["status"] in (0, 1),
                )
    return table


def _flips(count: int) -> Table:
    """Read a small table of each binary format with flipped bits."""
    columns = "format", "results", "errors", "over 1 GB", "signals or tracebacks"
    table = Table(f"{count:,} files with one flipped bit each", columns)
    rng = np.random.default_rng(0)
    present = rng.random(200) < 0.5
    for suffix in ("npz", "parquet"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"table.{suffix}")
            _write_packed(path, rng.normal(present, 1.0), present=present)
            command = [sys.executable, "-c", FLIPS, str(OURS), str(path), str(count), str(FLIP_MEMORY)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            met = not found["memory"] and not found["signals"]
            table.add(suffix, *map(str, found.values()), met=met and sum(found.values()) == count)
    return table


def _write_packed(path: Path, scores: np.ndarray, **more: np.ndarray) -> None:
    if path.suffix == ".csv":
        with path.open("w") as file:
            for piece in np.array_split(scores, 100):
                file.write("".join(f"{score!r}\n" for score in piece.tolist()))
    elif path.suffix == ".npz":
        np.savez_compressed(path, score=scores, **more)
    else:
        parquet.write_table(pyarrow.table({"score": scores, **more}), path)


def _audits(sizes: Sequence[int], before: Path | None) -> Table:
    """Audit files of each size, also with the sources before, if they are given."""
    table = Table(
        "dpaudit scores --normalized, float32 scores in files",
        ("scores per side", "time before", "time", "ratio", "limit", "peak memory", "limit"),
    )
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{name}.npy") for name in ("absent", "present")]
        for size in sizes:
            for mean, path in enumerate(paths):
                _write(path, size, mean)
            then = None if before is None else _run_audit(before, paths, "--normalized")
            now = _run_audit(OURS, paths, "--normalized")
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


def _run_audit(source: Path, paths: list[Path], *options: str) -> dict[str, Any]:
    command = [sys.executable, "-c", AUDIT, str(source), *map(str, paths), *options]
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
