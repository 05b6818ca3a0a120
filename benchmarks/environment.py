"""Compare the training time of three ways to configure the allocator and the threads.

    python benchmarks/environment.py [--repeats 3]

"start" sets the variables before Python starts, which requires a restart of the program; "process" configures
the running process, as ``dpaudit run`` does; "none" changes nothing. They take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

VARIABLES = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "67108864",
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",
}
WAYS = {
    "start": {**VARIABLES, "DPAUDIT_ENVIRONMENT": "as-is"},
    "process": {},
    "none": {"DPAUDIT_ENVIRONMENT": "as-is"},
}
CONFIG = """
output = "run"
seed = 1
model = {name = "wide-resnet-16-4"}
data = {name = "random", num_examples = 64}
training = {noise_multiplier = 1.0, batch_size = 16, num_steps = 12}
audit = {num_canaries = 64, methods = []}
"""


def training_seconds(variables: dict[str, str]) -> float:
    """Train in a separate process, and return how long its steps took."""
    own = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.toml").write_text(CONFIG)
        subprocess.run(
            [sys.executable, "-m", "dpaudit", "run", "config.toml"],
            cwd=folder,
            env={**own, **variables},
            capture_output=True,
            check=True,
        )
        result = json.loads((Path(folder) / "run" / "result.json").read_text())
    return float(result["timing"]["training_seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(repeats):
        for name, variables in WAYS.items():
            times[name].append(training_seconds(variables))
    medians = {name: statistics.median(found) for name, found in times.items()}
    for name, seconds in medians.items():
        print(f"{name:8} {seconds:6.2f} s, {seconds / medians['start']:.3f} times start")


if __name__ == "__main__":
    main()
