"""Check that the first audit of a training run by DP-SGD takes at most a second of processor time.

Every setting is audited in a process of its own, so that nothing is remembered: scores of steps, and scores
of whole runs against the curve of all steps, both with bound, verdict, claimed epsilon and power. Imports are
not counted. With ``--before``, the sources of another version are measured in turn with these.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from _measure import ONE_THREAD, Table, finish, milliseconds

LIMIT = 1.0
RATES, STEPS, NOISES = (0.001, 0.01, 0.1), (100, 1_000, 10_000, 100_000), (0.5, 1.0, 4.0)

AUDIT = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
import numpy as np
import dp_accounting.pld
from dpaudit import Claim, Observations, SubsampledGaussian, audit
import dpaudit.accounting._log_ratios
rate, steps, noise = float(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
whole = min(rate * np.sqrt(steps * np.expm1(1 / noise**2)), 3.0)
rng = np.random.default_rng(0)
found = {}
for name, mu, options in (
    ("steps", 1 / noise, {}), ("whole runs", whole, {"tradeoff": SubsampledGaussian(rate, steps)})
):
    if name != sys.argv[5]:
        continue
    absent, present = (side + rng.standard_normal(1_000) / mu for side in (0, 1))
    scores = Observations(
        with_canary=present,
        without_canary=absent,
        normalized=name == "steps",
        scores_of="step" if name == "steps" else "run",
    )
    start = time.process_time()
    claim = Claim.dpsgd(noise_multiplier=noise, sample_rate=rate, num_steps=steps, delta=1e-5)
    result = audit(scores, claim=claim, **options)
    numbers = [result.bound.epsilon, claim.epsilon, result.power.parameter]
    print(json.dumps({"seconds": time.process_time() - start, "numbers": numbers}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="the src folder of another version to compare with")
    parser.add_argument("--rates", type=float, nargs="*", default=RATES)
    parser.add_argument("--steps", type=int, nargs="*", default=STEPS)
    options = parser.parse_args()
    ours = Path(__file__).parent.parent / "src"
    tables = []
    for kind in ("steps", "whole runs"):
        table = Table(
            f"First audit of 1,000 scores of {kind} per side, processor time",
            ("sample rate", "steps", "noise", "before", "now", "limit", "largest change of a number"),
        )
        for setting in itertools.product(options.rates, options.steps, NOISES):
            then = None if options.before is None else _run(options.before, setting, kind)
            now = _run(ours, setting, kind)
            table.add(
                *(f"{setting[0]:g}", f"{setting[1]:,}", f"{setting[2]:g}"),
                "" if then is None else milliseconds(then["seconds"]),
                milliseconds(now["seconds"]),
                milliseconds(LIMIT),
                "" if then is None else f"{_change(then['numbers'], now['numbers']):.1g}",
                met=now["seconds"] <= LIMIT,
            )
        tables.append(table)
    return finish(*tables)


def _run(source: Path, setting: tuple[float, int, float], kind: str) -> dict[str, Any]:
    command = [sys.executable, "-c", AUDIT, str(source), *map(str, setting), kind]
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(source)}
    done = subprocess.run(command, check=True, capture_output=True, env=environment)
    return dict(json.loads(done.stdout))


def _change(before: list[float], after: list[float]) -> float:
    """Return the largest relative change of a number."""
    pairs = zip(before, after, strict=True)
    return max(0.0 if one == two else abs(two - one) / max(abs(one), 1e-12) for one, two in pairs)


if __name__ == "__main__":
    sys.exit(main())
