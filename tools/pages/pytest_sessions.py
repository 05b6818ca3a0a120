"""Check that a test suite of 50 correct audits passes in at least 95 % of 40 runs.

    python tools/pages/pytest_sessions.py [--runs 40] [--budget quick]

Each run is a separate pytest session with its own seed for the canaries and for the noise of what is audited:
steps in numpy (sums and means, alone and among other examples, with several sizes, clipping norms and noise
multipliers) and training runs with Opacus. With the full budget it takes twenty minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from _shared import ONE_THREAD

NEEDED = 0.95
SUITE = """
import itertools

import dpaudit
import numpy as np
import pytest
import torch
from dpaudit.observers.opacus import observe
from opacus.optimizers import DPOptimizer

NOISES, NORMS, SIZES = (0.5, 0.8, 1.5, 4.0), (0.1, 1.0, 30.0), (100, 1000)
CASES = [*itertools.product(NOISES, NORMS, SIZES, (None, 16))][:45]


@pytest.mark.parametrize(("noise", "norm", "size", "batch_size"), CASES)
def test_a_step(dp_audit, noise, norm, size, batch_size):
    rng = np.random.default_rng(dp_audit.seed)
    others = rng.standard_normal((batch_size or 0, size))

    def step(rows):
        clipped = rows / np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True) / norm)
        total = clipped.sum(axis=0) + noise * norm * rng.standard_normal(size)
        return total / (batch_size or 1)

    claim = dpaudit.Claim.dpsgd(noise_multiplier=noise, sample_rate=0.01, num_steps=1000, delta=1e-5)
    dp_audit(step, claim=claim, max_grad_norm=norm, gradients=others, batch_size=batch_size)


@pytest.mark.parametrize("noise", [0.6, 1.0, 2.0, 3.0, 4.0])
def test_a_training_with_opacus(dp_audit, noise):
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(dp_audit.seed % 2**63)
    model = torch.nn.Linear(10, 20)
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=noise,
        max_grad_norm=1.0,
        expected_batch_size=8,
        generator=generator,
    )
    with observe(optimizer, num_canaries=64, seed=dp_audit.seed) as recorder:
        for _ in range(dp_audit.num_steps):
            model.weight.grad_sample = torch.randn(8, 20, 10, generator=generator)
            model.bias.grad_sample = torch.randn(8, 20, generator=generator)
            optimizer.step()
            optimizer.zero_grad()
    dp_audit(recorder, sample_rate=0.01, delta=1e-5)
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--budget", choices=["quick", "full"], default="quick")
    options = parser.parse_args()
    green = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        (Path(folder) / "test_suite.py").write_text(SUITE)
        for seed, failed in enumerate(
            pool.map(lambda n: _failed(folder, n, options.budget), range(options.runs))
        ):
            green += failed == 0
            print(f"seed {seed}: {failed} of 50 correct audits failed", flush=True)
    print(f"{green} of {options.runs} sessions passed, {NEEDED:.0%} required")
    return int(green < NEEDED * options.runs)


def _failed(folder: str, seed: int, budget: str) -> int:
    """Return the number of audits that fail in one session."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
    command += [f"--dp-audit-seed={seed}", f"--dp-audit-budget={budget}", "test_suite.py"]
    environment = os.environ | ONE_THREAD
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    found = re.findall(r"(\d+) (passed|failed|error)", done.stdout)
    counts = {word: int(count) for count, word in found}
    if counts.get("passed", 0) + counts.get("failed", 0) != 50:
        sys.exit(f"Expected 50 audits, got:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    return counts.get("failed", 0)


if __name__ == "__main__":
    sys.exit(main())
