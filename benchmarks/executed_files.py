"""Count the files of dpaudit whose functions run in four everyday jobs.

    python benchmarks/executed_files.py [--list]

A reader who follows a job passes through these files. Module bodies that run on import are not counted. Each
job runs in a separate process, so that no cache of another job hides a file.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from _digits import digits_config
from opacus import PrivacyEngine

import dpaudit
from dpaudit import cli
from dpaudit.observers.opacus import observe

PACKAGE = Path(dpaudit.__file__).parent


@contextlib.contextmanager
def profiled() -> Iterator[set[str]]:
    """Collect the files of dpaudit whose functions are called in this block, in any thread."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        # bodies of modules and classes are not optimized; comprehensions run in them too
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<"):
            found.add(code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def audit() -> set[str]:
    """Audit the scores of a Gaussian mechanism, and print the result."""
    rng = np.random.default_rng(0)
    with_canary, without_canary = rng.normal(1.0, 1.0, 200), rng.normal(0.0, 1.0, 200)
    with profiled() as found:
        observations = dpaudit.Observations(
            with_canary=with_canary, without_canary=without_canary, normalized=True
        )
        claim = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5)
        str(dpaudit.audit(observations, claim=claim))
    return found


def opacus() -> set[str]:
    """Observe steps of an Opacus optimizer, and audit them."""
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
    plain = torch.nn.Linear(8, 16)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=plain,
        optimizer=torch.optim.SGD(plain.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(data, batch_size=16),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    with profiled() as found:
        with observe(optimizer, noise_multiplier=1.0, seed=1) as recorder:
            for inputs, targets in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
        str(recorder.audit(delta=1e-5))
    return found


def run() -> set[str]:
    """Call ``dpaudit run`` with a one-run audit."""
    return _command("run", "config.toml")


def report() -> set[str]:
    """Call ``dpaudit report`` on that run."""
    _command("run", "config.toml")
    return _command("report", "run")


def _command(*arguments: str) -> set[str]:
    Path("config.toml").write_text(digits_config("run", num_examples=200, audit="num_canaries = 32"))
    sys.argv = ["dpaudit", *arguments]
    with profiled() as found, contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr):
        cli.main()
    return found


JOBS = {audit: 23, opacus: 38, run: 75, report: 39}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--list", action="store_true", help="also print the files")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        files = sorted(name for name in globals()[options.job]() if Path(name).is_relative_to(PACKAGE))
        print(json.dumps([str(Path(name).relative_to(PACKAGE)) for name in files]))
        return 0
    missed = False
    for job, limit in JOBS.items():
        files = _measured(job.__name__)
        missed |= len(files) > limit
        print(f"{job.__name__:8} {len(files):3} files, at most {limit}")
        for name in files if options.list else ():
            print(f"         {name}")
    return int(missed)


def _measured(job: str) -> list[str]:
    command = [sys.executable, __file__, "--job", job]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "DPAUDIT_ENVIRONMENT": "as-is"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        sys.exit(done.stderr)
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main())
