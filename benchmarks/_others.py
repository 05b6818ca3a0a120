"""Calls to other tools, which run in a separate environment and process."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from _measure import ONE_THREAD

__all__ = ["Answer", "Job", "ask", "parser"]

_SCRIPT = Path(__file__).with_name("compare_others.py")
Scores = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Job:
    """One method of another tool on a table of scores, one row per repetition."""

    method: str
    present: Scores
    absent: Scores
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """The bound of every row, the median time per row, and the last error, if any."""

    bounds: list[float]
    seconds: float
    error: str | None


def ask(python: Path, jobs: list[Job]) -> list[Answer]:
    """Run the jobs with the other interpreter, one after another."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        descriptions = []
        for number, job in enumerate(jobs):
            scores = here / f"{number}.npz"
            np.savez(scores, present=np.atleast_2d(job.present), absent=np.atleast_2d(job.absent))
            descriptions.append({"method": job.method, "scores": str(scores), "settings": job.settings})
        question, answer = here / "jobs.json", here / "answers.json"
        question.write_text(json.dumps(descriptions))
        command = [str(python), "-W", "ignore", str(_SCRIPT), str(question), str(answer)]
        subprocess.run(command, check=True, env={**os.environ, **ONE_THREAD})
        return [Answer(**found) for found in json.loads(answer.read_text())]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the argument shared by all scripts that use other tools."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument(
        "--others",
        type=_interpreter,
        metavar="PYTHON",
        help="interpreter with jax_privacy and privacy-estimates, which are skipped without it",
    )
    return arguments


def _interpreter(text: str) -> Path | None:
    path = Path(text)
    if path.exists():
        return path
    print(f"The other tools are skipped: {text} does not exist.")
    return None
