"""Asks the other tools, which live in an environment and a process of their own."""

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
    """One method of another tool on a table of scores, a row for each repetition."""

    method: str
    present: Scores
    absent: Scores
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """The bound of every row, the median time of one, and what went wrong, if anything."""

    bounds: list[float]
    seconds: float
    error: str | None


def ask(python: Path, jobs: list[Job]) -> list[Answer]:
    """Have the other interpreter do the jobs, one after another."""
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
    """The argument that every script with other tools takes."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument(
        "--others",
        type=_interpreter,
        metavar="PYTHON",
        help="the interpreter with jax_privacy and privacy-estimates; without it they are left out",
    )
    return arguments


def _interpreter(text: str) -> Path | None:
    path = Path(text)
    if path.exists():
        return path
    print(f"The other tools are left out: there is no {text}.")
    return None
