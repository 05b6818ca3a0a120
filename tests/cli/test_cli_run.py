"""``dpaudit run`` as a program: killed, interrupted, called again; and what it says and prints."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from digits_config import digits_config

MODES = {"one-run": 32, "paper": 1, "end-to-end": 32}
MODULE = [sys.executable, "-m", "dpaudit"]
PREPARED = (
    "MALLOC_MMAP_MAX_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "OMP_WAIT_POLICY",
    "OMP_NUM_THREADS",
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(
        digits_config(tmp_path / "run", top="checkpoint_seconds = 0", num_steps=300, audit="methods = []")
    )
    return path


def bare() -> dict[str, str]:
    """The environment of somebody who set nothing."""
    return {name: value for name, value in os.environ.items() if name not in PREPARED}


@contextmanager
def started(command: Sequence[object], *words: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [str(word) for word in (*command, "run", *words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=bare(),
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    """Until the file is there and newer than it was, looking often; an end of the process is a mistake."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    while not path.exists() or path.stat().st_mtime_ns == before:
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.005)
            pytest.fail(process.stderr.read() if process.stderr else "The run ended.")


def steps_saved(folder: Path) -> int:
    import torch  # noqa: PLC0415

    return int(torch.load(folder / "checkpoint.pt", weights_only=True)["training"]["num_done"])


@pytest.mark.parametrize(
    "mode", [mode if mode == "one-run" else pytest.param(mode, marks=pytest.mark.long) for mode in MODES]
)
def test_a_run_that_was_killed_has_each_observation_once_when_it_goes_on(
    mode: str, config: Path, tmp_path: Path, run: Any
) -> None:
    changes = ["--set", f"audit.mode={mode}", "--set", f"audit.num_canaries={MODES[mode]}"]
    folder, whole = tmp_path / "run", tmp_path / "whole"
    with started(MODULE, config, *changes) as process:
        wait_for(folder / "checkpoint.pt", process)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    saved = steps_saved(folder)
    assert 0 < saved < 300
    assert not (folder / "result.json").exists()
    changes += ["--set", "checkpoint_seconds=99"]
    resumed = run("run", config, *changes, "--json")
    assert f"step {saved:,} of 300" in resumed.stderr
    assert "step 0 of" not in resumed.stderr
    straight = run("run", config, *changes, "--set", f"output={whole}", "--json")
    names = {path.name for path in whole.glob("*.npy")}
    assert len(names) == 2
    assert names == {path.name for path in folder.glob("*.npy")}
    for name in names:
        assert np.load(folder / name).tobytes() == np.load(whole / name).tobytes()
    clock = dict.fromkeys(("timing", "provenance", "seal"))
    found = [json.loads(done.stdout) | clock for done in (resumed, straight)]
    assert found[0] == found[1]
    assert resumed.exit_code == straight.exit_code == 0


# stands in for the commands: tells what is set when they are loaded, and where glibc puts a large block
COMMANDS = """
import ctypes, json, os, sys, types

def app():
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.mallinfo2.restype = type("Info", (ctypes.Structure,), {"_fields_": [("all", ctypes.c_size_t * 10)]})
    before = libc.mallinfo2().all[3]
    assert libc.malloc(ctypes.c_size_t(2**26))
    loaded = [name for name in ("numpy", "torch") if name in sys.modules]
    print(json.dumps([dict(os.environ), loaded, libc.mallinfo2().all[3] - before]))

sys.modules["dpaudit.cli._app"] = types.SimpleNamespace(app=app)
from dpaudit.cli import main
main()
"""


def prepared(*words: str, **variables: str) -> tuple[dict[str, str], int]:
    """The environment of a command, and how often the system is asked for a large block."""
    environment = {**bare(), **variables}
    made = subprocess.run(
        [sys.executable, "-c", COMMANDS, *words], env=environment, capture_output=True, text=True, check=True
    )
    found, loaded, num_mapped = json.loads(made.stdout)
    assert loaded == []  # libraries read the environment when they are loaded
    return {name: found[name] for name in PREPARED if name in found}, num_mapped


def test_training_starts_with_the_environment_that_torch_needs() -> None:
    variables, num_mapped = prepared("run", "c.toml")
    assert set(variables) == set(PREPARED)  # for processes that it starts
    assert variables["OMP_WAIT_POLICY"] == "PASSIVE"
    assert num_mapped == 0


@pytest.mark.parametrize(
    ("words", "variables"), [((), {}), (("scores",), {}), (("run",), {"DPAUDIT_ENVIRONMENT": "as-is"})]
)
def test_the_environment_is_set_only_for_training(words: tuple[str, ...], variables: dict[str, str]) -> None:
    assert prepared(*words, **variables) == ({}, 1)


def test_variables_of_the_user_stay() -> None:
    own = {"OMP_NUM_THREADS": "2", "MALLOC_MMAP_MAX_": "9"}
    variables, num_mapped = prepared("demo", **own)
    assert own.items() <= variables.items()
    assert num_mapped == 1


def test_without_settings_of_the_allocator_threads_are_set_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dpaudit.cli import prepare  # noqa: PLC0415

    variables: dict[str, str] = {}
    monkeypatch.setattr("os.environ", variables)
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())  # as on macOS and with musl
    prepare(["run"])
    assert set(variables) == set(PREPARED)


def test_the_allocator_of_this_process_gets_the_settings_of_its_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dpaudit.cli import prepare  # noqa: PLC0415

    variables: dict[str, str] = {}
    settings: dict[int, int] = {}
    monkeypatch.setattr("os.environ", variables)
    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace(mallopt=settings.__setitem__))
    prepare(["run"])
    # as malloc.h defines them: M_MMAP_MAX, M_TRIM_THRESHOLD (an int, so -1 for no limit) and M_TOP_PAD
    assert settings == {-4: 0, -1: -1, -2: 2**26}
    assert [variables[name] for name in PREPARED[:3]] == ["0", str(2**34), str(2**26)]


SHORT = ["--set", "training.num_steps=40", "--set", "audit.num_canaries=64", "--set", "checkpoint_seconds=99"]
BROKEN = ["--set", "training.fault.name=noise-too-small", "--set", "training.fault.factor=0.3"]


@pytest.mark.parametrize(
    ("changes", "status", "verdict"),
    [
        ([], 0, "NO_VIOLATION"),
        (BROKEN, 1, "VIOLATION"),
        (["--set", "training.num_steps=1", "--set", "audit.num_canaries=2"], 3, "UNDERPOWERED"),
    ],
)
def test_the_exit_status_is_the_verdict(
    changes: list[str], status: int, verdict: str, config: Path, run: Any
) -> None:
    result = run("run", config, *SHORT, *changes, "--json")
    assert result.exit_code == status, result.stderr
    assert json.loads(result.stdout)["verdict"] == verdict


def test_a_run_tells_its_progress_in_about_ten_lines(config: Path, run: Any) -> None:
    result = run("run", config, *SHORT)
    lines = [line for line in result.stderr.splitlines() if line.startswith("step ")]
    assert len(lines) == 11
    assert lines[0] == "step 0 of 40"
    assert lines[-1].startswith("step 40 of 40, ")
    assert "steps/s" in lines[-1]
    assert "left, epsilon >= " in lines[-1]
    assert "claimed" in lines[-1]
    assert result.stdout.startswith("○ NO VIOLATION FOUND   epsilon >= ")
    assert len(result.stdout.partition("Written:")[0].splitlines()) <= 14
    assert re.search(r"\n  basis +95 % confidence, ", result.stdout)
    result = run("run", config, *SHORT, "-v")
    assert re.search(r"\n  estimate +effective noise ", result.stdout)
    assert re.search(r"\n  rates +true positive rate of this attack at a false positive rate", result.stdout)
    assert re.search(r"\n  errors +5 % in total: 4 % for the bound, 1 % for \d+ tests\n", result.stdout)
    assert not re.search(r"\n  finding ", result.stdout)
    assert "test accuracy" in result.stdout
    assert f"Written: {config.parent / 'run'}" in result.stdout


def test_a_finished_run_prints_its_result_again(config: Path, run: Any) -> None:
    methods = ["--set", 'audit.methods=["f-DP(CP)", "f-DP(joint)"]']
    first, again = (run("run", config, *SHORT, *methods, "--all-methods") for _ in range(2))
    assert again.stdout == first.stdout
    assert "f-DP(joint)" in again.stdout
    assert "This run is already finished" in again.stderr
    assert "step" not in again.stderr
    assert again.exit_code == first.exit_code == 0
    values = json.loads(run("run", config, *SHORT, *methods, "--json").stdout)
    stored = json.loads((config.parent / "run" / "result.json").read_text())
    seal = json.loads((config.parent / "run" / "manifest.json").read_text())["seal"]
    assert values == {**stored, "seal": seal, "remarks": []}


@pytest.mark.long
def test_a_run_of_the_whole_without_a_live_bound_shows_none(config: Path, run: Any) -> None:
    result = run("run", config, *SHORT, "--set", "audit.mode=end-to-end")
    assert result.exit_code in (0, 3)
    assert "claimed" not in result.stderr


def test_another_config_in_the_directory_is_refused(config: Path, run: Any) -> None:
    run("run", config, *SHORT)
    result = run("run", config, *SHORT, "--set", "training.num_steps=41")
    assert result.exit_code == 2
    assert "training.num_steps is 41 instead of the stored 40" in result.stderr


def test_an_unknown_example_lists_the_known_ones(refused: Any) -> None:
    sentence = refused("run", "--example", "x")
    assert sentence == (
        "--example must be 'digits', 'paper-cifar10', 'end-to-end', 'purchase', 'input', 'black-box', "
        "'black-box-one-run' or 'black-box-function', got 'x'."
    )


def test_without_a_config_it_says_how_to_get_one(refused: Any) -> None:
    assert refused("run").endswith("dpaudit run --example digits")


def test_mistakes_of_a_config_end_in_status_2_without_a_traceback(config: Path, run: Any) -> None:
    result = run("run", config, "--set", "training.num_stepz=3", "--set", "seed=-1")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        f"dpaudit: {config} has 2 errors:",
        "  --set seed: seed must be at least 0, got -1.",
        "  --set training.num_stepz: Unknown key. Did you mean 'num_steps'?",
    ]


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "noise_multiplier = 1.0",
            "target_epsilon = 1e-300",
            "training.target_epsilon: No noise multiplier has",
        ),
        (
            "num_steps = 20",
            'num_steps = 20\noptimizer = {name = "sgd", learning_rate = 1e300}',
            "learning_rate must be at most 1e+30, got 1e+300.",
        ),
        (
            "num_steps = 20",
            "num_steps = 20\nmultiplicity = 100000",
            "multiplicity must be at most 1,000, got 100000.",
        ),
    ],
)
def test_a_number_that_no_training_can_use_is_named(
    old: str, new: str, sentence: str, run: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text(digits_config(tmp_path / "run").replace(old, new))
    result = run("run", tmp_path / "config.toml")
    assert result.exit_code == 2
    assert sentence in result.stderr


def test_escape_sequences_of_a_path_are_printed_as_text(run: Any, tmp_path: Path) -> None:
    text = digits_config(str(tmp_path / "run") + r"\u001b[31m", num_steps=2)
    (tmp_path / "config.toml").write_text(text)
    result = run("run", tmp_path / "config.toml")
    assert r"run\x1b[31m" in result.stdout
    assert "\x1b" not in result.output


def test_a_terminal_gets_a_bar_with_the_live_bound(
    config: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # what makes rich take standard error for a terminal
    monkeypatch.setenv("COLUMNS", "120")
    result = run("run", config, *SHORT, "--json")
    assert result.exit_code == 0
    assert "━" in result.stderr
    assert "step 40 of 40, " in result.stderr
    assert "claimed" in result.stderr
    assert json.loads(result.stdout)["num_done"] == 40
