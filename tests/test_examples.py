"""Every example runs, states its claim in numbers, and tells a correct run from a broken one."""

from __future__ import annotations

import ast
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import dpaudit

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(EXAMPLES.rglob("*.py"))
VERDICTS = ("VIOLATION", "NO VIOLATION", "NO_VIOLATION", "UNDERPOWERED")
NOT_HERE = {"tensorflow_digits.py"}  # tests_tensorflow runs it


def run(*command: str | Path, directory: Path = EXAMPLES) -> subprocess.CompletedProcess[str]:
    """Run a command of an example without a terminal or a CI server around it."""
    hidden = ("CI", "GITHUB_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # compiling takes most of the time
    return subprocess.run(
        [sys.executable, "-B", "-W", "ignore", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=directory,
        env=environment,
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_an_example_is_short_and_writes_its_claim_down(script: Path) -> None:
    text = script.read_text()
    assert len(text.splitlines()) < 60
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    claims = [call for call in calls if ast.unparse(call.func) == "dpaudit.Claim.dpsgd"]
    assert len(claims) == (script.name != "training.py")  # which is what the claim is about
    for claim in claims:
        assert {word.arg for word in claim.keywords} == {
            "noise_multiplier", "sample_rate", "num_steps", "delta",
        }  # fmt: skip
        assert all(isinstance(word.value, ast.Constant) for word in claim.keywords)


@pytest.mark.slow  # two training runs of each library, whose import and compilation take most of it
@pytest.mark.parametrize(
    "name", [path.name for path in sorted(EXAMPLES.glob("*.py")) if path.name not in NOT_HERE]
)
def test_a_script_accepts_the_correct_run_and_refutes_the_broken_one(name: str) -> None:
    done = run(name)
    assert done.returncode == 0, done.stderr
    headlines = [line for line in done.stdout.splitlines() if line.startswith(VERDICTS)]
    assert [line.startswith("VIOLATION") for line in headlines] == [False, True]
    assert headlines[0].startswith(("NO VIOLATION", "NO_VIOLATION"))


def test_the_cells_of_the_notebook_run_in_order() -> None:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert sum(len(cell.splitlines()) for cell in cells) < 60
    names: dict[str, object] = {}
    for cell in cells:
        exec(compile(cell, "notebook.ipynb", "exec"), names)
    results = [names["correct"], names["broken"]]
    assert all(isinstance(result, dpaudit.Result) for result in results)
    assert [result.verdict.name for result in results] == ["NO_VIOLATION", "VIOLATION"]


@pytest.mark.slow  # two sessions of pytest that import torch and Opacus
def test_the_workflow_of_the_project_runs_its_privacy_test(tmp_path: Path) -> None:
    project = shutil.copytree(EXAMPLES / "project", tmp_path / "project")
    workflow = yaml.safe_load((project / ".github/workflows/privacy.yml").read_text())
    (job,) = workflow["jobs"].values()
    (command,) = [step["run"] for step in job["steps"] if step.get("run", "").startswith("pytest ")]
    command = ["-m", *shlex.split(command), "-p", "no:cacheprovider", "--dp-audit-seed=1"]
    done = run(*command, directory=project)
    assert done.returncode == 0, done.stdout
    training = project / "training.py"
    training.write_text(training.read_text().replace("noise_multiplier=0.9", "noise_multiplier=0.7"))
    done = run(*command, directory=project)
    assert done.returncode == 1
    assert "noise-multiplier" in done.stdout
