"""A driver of trials in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dpaudit.experiments.trials import TrialPlan

HERE = Path(__file__).parent
# Without the usual guard: workers must not run the caller's script again.
DRIVER = """
import json, resource, sys
from pathlib import Path
from dpaudit import IncompleteError
from dpaudit.experiments.trials import Processes, Recipe, Serial, TrialPlan, open_store, run_trials

settings = json.loads(sys.argv[1])
if settings["file_size"] is not None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (settings["file_size"],) * 2)
plan = TrialPlan(recipe=Recipe(**settings["recipe"]), num_trials=settings["num_trials"], seed=1)
pool = Serial() if settings["num_workers"] is None else Processes(num_workers=settings["num_workers"])
try:
    with open_store(Path(settings["folder"]), plan) as store:
        run_trials(plan, pool=pool, store=store)
except IncompleteError as error:
    sys.exit(f"dpaudit: {error}")
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a driver of a plan in a folder; it is ended with the test."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    started: list[subprocess.Popen[str]] = []

    def begin(
        plan: TrialPlan, folder: Path, num_workers: int | None = None, file_size: int | None = None
    ) -> subprocess.Popen[str]:
        settings = {
            "recipe": json.loads(plan.recipe.to_json()),
            "num_trials": plan.num_trials,
            "num_workers": num_workers,
            "folder": str(folder),
            "file_size": file_size,
        }
        process = subprocess.Popen(
            [sys.executable, str(script), json.dumps(settings)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(HERE)])},
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
