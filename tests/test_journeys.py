"""A reader who follows an everyday job passes through few files; the limits may only fall.

A file counts if one of its functions runs; module bodies that run on import do not count. Each job runs in a
separate process, so that no cache of another job hides a file.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import dpaudit

MOST_FILES = {"audit": 21, "opacus": 56, "run": 74, "report": 49, "jax": 48}
PACKAGE = Path(dpaudit.__file__).parent
pytestmark = pytest.mark.slow


@contextlib.contextmanager
def profiled() -> Iterator[set[str]]:
    """Collect the files whose functions are called in this block, in any thread."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        # bodies of modules and classes are not optimized; comprehensions run in them too
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<"):
            files.add(code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def audit() -> set[str]:
    """Audit the scores of a Gaussian mechanism, and print the result."""
    rng = np.random.default_rng(0)
    with_canary, without_canary = rng.normal(1.0, 1.0, 200), rng.normal(0.0, 1.0, 200)
    with profiled() as files:
        observations = dpaudit.Observations(
            with_canary=with_canary, without_canary=without_canary, normalized=True
        )
        claim = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5)
        str(dpaudit.audit(observations, claim=claim))
    return files


def opacus() -> set[str]:
    """Observe steps of an Opacus optimizer, and audit them."""
    import torch  # noqa: PLC0415  # each job imports only what it needs
    from opacus import PrivacyEngine  # noqa: PLC0415

    from dpaudit.observers.opacus import observe  # noqa: PLC0415

    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
    plain = torch.nn.Linear(8, 16)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=plain,
        optimizer=torch.optim.SGD(plain.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(data, batch_size=16),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    with profiled() as files:
        with observe(optimizer, noise_multiplier=1.0, seed=1) as recorder:
            for inputs, targets in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
        str(recorder.audit(delta=1e-5))
    return files


def jax() -> set[str]:
    """Observe compiled steps of JAX Privacy, and audit them."""
    import jax.numpy as jnp  # noqa: PLC0415
    from jax import jit  # noqa: PLC0415
    from jax_privacy import clipped_grad, noise_addition  # noqa: PLC0415

    from dpaudit.observers.jax_privacy import observe  # noqa: PLC0415

    def loss(params: Any, inputs: Any, targets: Any) -> Any:
        return ((inputs @ params["weight"] - targets) ** 2).mean()

    rng = np.random.default_rng(0)
    inputs, targets = rng.standard_normal((16, 8)), rng.standard_normal(16)
    grad_fn = clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2))
    privatizer = noise_addition.gaussian_privatizer(stddev=grad_fn.sensitivity(), prng_key=1)
    with profiled() as files:
        grad_fn, privatizer, recorder = observe(
            grad_fn, privatizer, noise_multiplier=1.0, sample_rate=0.25, num_steps=8, delta=1e-5, seed=1
        )

        @jit
        def step(params: Any, state: Any) -> Any:
            noisy, state = privatizer.update(grad_fn(params, inputs, targets), state)
            return {"weight": params["weight"] - 0.1 * noisy["weight"]}, state

        params = {"weight": jnp.zeros(8)}
        state = privatizer.init(params)
        for _ in range(8):
            params, state = step(params, state)
        str(recorder.audit())
    return files


def run() -> set[str]:
    """Call ``dpaudit run`` with a one-run audit."""
    return _command("run", "config.toml")


def report() -> set[str]:
    """Call ``dpaudit report`` on that run."""
    _command("run", "config.toml")
    return _command("report", "run")


def _command(*arguments: str) -> set[str]:
    from digits_config import digits_config  # noqa: PLC0415

    from dpaudit import cli  # noqa: PLC0415

    Path("config.toml").write_text(digits_config("run", num_examples=200, audit="num_canaries = 32"))
    sys.argv = ["dpaudit", *arguments]
    with profiled() as files, contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr):
        cli.main()
    return files


@pytest.mark.parametrize("job", MOST_FILES)
def test_a_job_runs_through_few_files(job: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, __file__, job],
        cwd=tmp_path,
        env={**os.environ, "DPAUDIT_ENVIRONMENT": "as-is"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    files = json.loads(done.stdout.splitlines()[-1])
    assert len(files) <= MOST_FILES[job], "\n".join(files)
    if job == "opacus":  # the job that the map follows
        contributing = (PACKAGE.parents[1] / "CONTRIBUTING.md").read_text()
        assert [file for file in files if f"{Path(file).name}`" not in contributing] == []


if __name__ == "__main__":
    called = {Path(name) for name in globals()[sys.argv[1]]()}
    print(json.dumps(sorted(str(path.relative_to(PACKAGE)) for path in called if PACKAGE in path.parents)))
