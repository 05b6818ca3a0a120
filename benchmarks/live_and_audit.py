"""Compare the speed of live() and audit() with that of another version, in turns.

    python benchmarks/live_and_audit.py --against OTHER/src

2,500 steps with 1,024 canaries. Each process measures the best of several calls; the ratio is that of the
medians over the processes of each version.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from _measure import Table, finish, milliseconds

LIMIT = 1.5
NUM_STEPS, NUM_CANARIES, NOISE = 2500, 1024, 2.577
ROUNDS, CALLS = 5, 7


def measure() -> dict[str, float]:
    """Return the seconds of one call of each, and of recording one step."""
    import dpaudit  # noqa: PLC0415  # of the version in PYTHONPATH

    rng = np.random.default_rng(0)
    present = rng.random((NUM_STEPS, NUM_CANARIES)) < 0.5
    scores = present + NOISE * rng.standard_normal(present.shape)
    claim = dpaudit.Claim.dpsgd(
        noise_multiplier=NOISE, sample_rate=4096 / 50000, num_steps=NUM_STEPS, delta=1e-5
    )
    recorder = dpaudit.Recorder(claim=claim, num_steps=NUM_STEPS)
    start = time.perf_counter()
    for values, mask in zip(scores, present, strict=True):
        recorder.record(values, mask)
    recorded = (time.perf_counter() - start) / NUM_STEPS
    recorder.live()  # the accountant's table is built once

    def live() -> None:
        recorder._live = None  # it is kept until the next step
        recorder.live()

    return {"record": recorded, "live": best(live), "audit": best(recorder.audit)}


def best(call: object) -> float:
    """Return the shortest of several calls."""
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()  # type: ignore[operator]
        times.append(time.perf_counter() - start)
    return min(times)


def measured(source: Path) -> dict[str, float]:
    """Measure the version in this source directory, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--measure"]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return dict(json.loads(output))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="SRC", help="the src directory of another version")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure()))
        return 0
    if arguments.against is None:
        parser.error("--against is required")
    sources = {"this": Path(__file__).parent.parent / "src", "other": arguments.against}
    rounds = [{name: measured(source) for name, source in sources.items()} for _ in range(ROUNDS)]
    table = Table("2,500 steps x 1,024 canaries", ("call", "other version", "this version", "ratio", "limit"))
    for name in ("record", "live", "audit"):
        this, other = (statistics.median(one[source][name] for one in rounds) for source in sources)
        limit = LIMIT if name != "record" else float("inf")
        table.add(
            name,
            milliseconds(other),
            milliseconds(this),
            f"{this / other:.2f}x",
            f"at most {limit:g}x",
            met=this <= limit * other,
        )
    return finish(table)


if __name__ == "__main__":
    sys.exit(main())
