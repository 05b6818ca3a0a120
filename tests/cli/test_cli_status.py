"""0, 1 and 3 are verdicts: whatever goes wrong has another exit status, and one sentence."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from digits_config import digits_config

from dpaudit._interrupts import machine_fault
from dpaudit.cli import main
from dpaudit.cli._app import _GROUPS
from dpaudit.cli._console import SentenceErrorGroup
from dpaudit.errors import IncompleteError, InputError


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


CHECKED = "import types\ndef prepare():\n    return types.SimpleNamespace(optimizer=None)\n"
# the words of each command, and a function in the middle of its work
COMMANDS: dict[str, tuple[list[str], str]] = {
    "run": (["run", "config.toml"], "dpaudit.experiments._run._outcome"),
    "scores": (["scores", "scores.npz"], "dpaudit.methods.examine"),
    "check": (["check", "checked.py:prepare"], "dpaudit.observers.opacus.PreparedTraining.of"),
    "plan": (
        ["plan", "--noise-multiplier", "1", "--delta", "1e-5", "--observations", "9"],
        "dpaudit.cli._plan_command.PlanOptions.result",
    ),
    "zoo": (["zoo", "--only", "microbatch", "--output", "out"], "dpaudit.zoo._run.judge"),
    "reproduce": (
        ["reproduce", "regions", "--scale", "tiny", "--output", "out"],
        "dpaudit.experiments.reproduction._reproduce.FigureRun.measure",
    ),
    "verify": (["verify", "."], "dpaudit.experiments._recompute.verify_finished"),
    "report": (["report", "."], "dpaudit.report.Report.read"),
    "demo": (["demo", "--output", "out"], "dpaudit.experiments.rehearse"),
    "explain": (["explain", "noise-variance"], "dpaudit.diagnostics.finding_kinds"),
    "completion": (["completion", "bash"], "dpaudit.cli._app.get_completion_script"),
}
ERRORS = {
    "bug": ZeroDivisionError("division by zero"),
    "assertion": AssertionError(),
    "exit 0": SystemExit(0),
    "exit 1": SystemExit(1),
    "disk": OSError(errno.ENOSPC, "No space left on device"),
    "memory": MemoryError(),
    "torch": RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
    "deep": RecursionError("maximum recursion depth exceeded"),
    "unknown": BaseException("unknown"),
    "typer": typer.Exit(0),
    "generator": GeneratorExit(),
    "not printable": UnprintableError(),
}


def raiser(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def status_of_main(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["dpaudit", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with what the commands need."""
    monkeypatch.chdir(tmp_path)
    Path("config.toml").write_text(digits_config("out"))
    np.savez("scores.npz", with_canary=np.arange(9.0), without_canary=np.arange(9.0))
    Path("checked.py").write_text(CHECKED)
    return tmp_path


@pytest.fixture
def in_examine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Let the analysis of scores fail."""
    del folder
    return lambda error: monkeypatch.setattr("dpaudit.methods.examine", raiser(error))


def test_every_command_is_listed_here() -> None:
    names = {command.__name__ for commands in _GROUPS.values() for command in commands}
    assert names <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_bug_in_any_command_is_no_verdict(
    name: str, folder: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, middle = COMMANDS[name]
    for label, error in ERRORS.items():
        monkeypatch.setattr(middle, raiser(error))
        result = run(*words, "--json")
        assert result.exit_code == 4, (label, result.output)
        values, said = json.loads(result.stdout), result.stderr.splitlines()[-1]
        assert (said, values["exit_status"]) == (f"dpaudit: {values['error']}", 4)
        assert said.startswith("dpaudit: Nothing was judged, because the audit could not be completed: ")
        file = Path(said.partition("; the traceback is in ")[2].removesuffix("."))
        traceback = file.read_text()
        assert traceback.startswith("Traceback (most recent call last)"), label
        assert re.search(rf"^(\w+\.)*{type(error).__name__}\b", traceback, re.MULTILINE), label
        assert file.is_relative_to(folder) == (name in ("run", "zoo", "reproduce"))
        if not file.is_relative_to(folder):
            file.unlink()


def test_the_next_attempt_removes_the_traceback(
    folder: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("dpaudit.experiments._run._outcome", raiser(KeyError("lost")))
        assert run("run", "config.toml").exit_code == 4
    assert (folder / "out" / "dpaudit-error.txt").stat().st_mode & 0o077 == 0  # it may quote data
    assert run("run", "config.toml").exit_code in (0, 3)
    assert not (folder / "out" / "dpaudit-error.txt").exists()


def test_without_a_place_to_write_the_traceback_is_printed(
    in_examine: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_examine(ZeroDivisionError())
    monkeypatch.setattr("tempfile.mkstemp", raiser(OSError(errno.ENOSPC, "No space left on device")))
    result = run("scores", "scores.npz")
    assert result.exit_code == 4
    assert "; the traceback follows.\nTraceback (most recent call last)" in result.stderr


def test_what_cannot_be_loaded_is_no_verdict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dpaudit.cli._app", None)
    assert status_of_main(monkeypatch, "scores", "scores.npz", "--json") == 4
    assert "ModuleNotFoundError" in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.parametrize(
    "error", [SystemExit(0), SystemExit(), KeyError("bug"), UnprintableError()], ids=type
)
@pytest.mark.parametrize(
    "place",
    [
        "dpaudit.cli.prepare",
        "dpaudit._interrupts._SignalState.reset",
        "dpaudit.cli._exit_status.exit_status_of",
    ],
)
def test_what_decides_about_the_status_may_fail_itself(
    place: str, error: BaseException, in_examine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_examine(ZeroDivisionError())
    monkeypatch.setattr(place, raiser(error))
    monkeypatch.setattr(os, "_exit", sys.exit)
    assert status_of_main(monkeypatch, "scores", "scores.npz") == 4


def test_a_closed_standard_output_is_no_verdict(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    del folder
    monkeypatch.setattr(sys, "stdout", None)
    assert status_of_main(monkeypatch, "scores", "scores.npz") == 4
    assert "could not be completed: Standard output is closed; " in capsys.readouterr().err


def test_closed_descriptors_are_not_given_to_files(tmp_path: Path) -> None:
    code = (
        "import os; from dpaudit.cli import _open_closed; _open_closed(); print(os.open('file', os.O_CREAT))"
    )
    words = [sys.executable, "-c", f"import os, sys; os.close(0); os.close(2)\n{code}"]
    done = subprocess.run(words, cwd=tmp_path, stdout=subprocess.PIPE, check=True)
    assert int(done.stdout) > 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_has_its_status_and_says_what_is_kept(
    number: signal.Signals, folder: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    del folder
    before = signal.getsignal(number)
    monkeypatch.setattr("dpaudit.methods.examine", lambda *_, **__: os.kill(os.getpid(), number))
    result = run("scores", "scores.npz", "--json")
    assert result.exit_code == 128 + number
    sentence = f"Interrupted by {number.name}; nothing is kept: run the same command again to start over."
    assert result.stderr == f"dpaudit: {sentence}\n"
    assert json.loads(result.stdout) == {"error": sentence, "exit_status": 128 + number}
    assert signal.getsignal(number) is before


def test_a_signal_between_the_parts_of_a_command_has_its_own_status(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # typer itself catches interrupts before and after a command is invoked
    monkeypatch.setattr(SentenceErrorGroup, "invoke", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    result = run("scores", "scores.npz", "--json")
    assert result.exit_code == 143
    assert json.loads(result.stdout)["error"].startswith("Interrupted by SIGTERM; nothing is kept: ")


FULL = OSError(errno.ENOSPC, "No space left on device", "weights.pt")
MISSING = FileNotFoundError(errno.ENOENT, "No such file or directory", "weights.tmp")


@pytest.mark.parametrize(
    ("error", "cause", "reason"),
    [
        (ValueError("Cannot save."), FULL, "weights.pt: No space left on device; "),
        (MISSING, FULL, "Cannot read or write weights.tmp: No such file or directory; "),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), None, "Cannot read or write a pipe: Broken pipe; "),
        (PermissionError(errno.EACCES, "Permission denied"), None, "Cannot read or write standard output"),
    ],
    ids=["behind another", "behind one about a path", "another process", "no path that was named"],
)
def test_a_fault_of_the_machine_is_named(
    error: Exception, cause: Exception, reason: str, in_examine: Any, run: Any
) -> None:
    error.__cause__ = cause
    in_examine(error)
    result = run("scores", "scores.npz")
    assert result.exit_code == 4, result.stderr
    assert f"could not be completed: {reason}" in result.stderr


@pytest.mark.parametrize(
    ("status", "names"),
    [
        (2, "EACCES EEXIST EINVAL EISDIR ELOOP ENAMETOOLONG ENOENT ENOTDIR ENOTEMPTY EPERM EROFS"),
        (4, "EAGAIN ECONNRESET EDQUOT EFBIG EIO EMFILE ENFILE ENODEV ENOLCK ENOMEM ENOSPC EPIPE ESTALE"),
    ],
)
def test_an_error_of_the_system_is_about_the_path_or_about_the_machine(
    status: int, names: str, in_examine: Any, run: Any
) -> None:
    for name in names.split():
        error = OSError(getattr(errno, name), "for some reason", "some.file")
        in_examine(error)
        result = run("scores", "scores.npz")
        assert result.exit_code == status, name
        assert "Cannot read or write some.file: for some reason" in result.stderr
        assert (machine_fault(error) is not None) == (status == 4), name


def test_a_sentence_is_short_whatever_it_quotes(in_examine: Any, run: Any) -> None:
    for error in (InputError("\x1b" * 900), ZeroDivisionError("x" * 5000), IncompleteError("x" * 5000)):
        in_examine(error)
        result = run("scores", "scores.npz", "--json")
        assert len(result.stderr) <= len("dpaudit: \n") + 1000
        assert len(json.loads(result.stdout)["error"]) <= 1000
        if result.exit_code == 4:
            assert Path(result.stderr.rpartition(" is in ")[2].rstrip(".\n")).exists()


def test_a_file_may_be_named_like_an_option(folder: Path, run: Any) -> None:
    del folder
    result = run("scores", "--", "--json")
    assert result.exit_code == 2
    assert result.stdout == ""


def broken_pipe() -> Any:
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w", buffering=1)  # noqa: PTH123


def test_a_status_does_not_depend_on_whether_the_output_can_be_written(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    del folder
    monkeypatch.setattr(sys, "stdout", pipe := broken_pipe())
    assert status_of_main(monkeypatch, "scores", "missing.csv", "--json") == 2
    pipe.close()  # as Python does at its end, which changes the status to 120 if it fails
    assert "missing.csv does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_pipe_whose_reader_has_left_is_neither_a_verdict_nor_a_fault(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    del folder
    monkeypatch.setattr(sys, name, pipe := broken_pipe())
    words = ["scores", "scores.npz"] if name == "stdout" else ["run", "config.toml"]
    assert status_of_main(monkeypatch, *words) == 141
    with suppress(BrokenPipeError) if name == "stderr" else nullcontext():
        pipe.close()
    assert "".join(capsys.readouterr()) == ""


def at_step(number: int, action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something in the middle of a training run."""
    from dpaudit.experiments._loop import _Clock  # noqa: PLC0415

    original = _Clock.progress

    def progress(self: Any) -> Any:
        if self._training.num_done == number:
            action()
        return original(self)

    monkeypatch.setattr(_Clock, "progress", progress)


def resumable_config() -> None:
    text = digits_config("out", top="checkpoint_seconds = 0")
    Path("config.toml").write_text(text)


def test_a_signal_ends_a_run_after_the_current_step_and_the_same_command_resumes_it(
    folder: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumable_config()
    with monkeypatch.context() as interrupted:
        at_step(3, lambda: os.kill(os.getpid(), signal.SIGTERM), interrupted)
        result = run("run", "config.toml")
    assert result.exit_code == 143
    kept = f"finished work is kept in {folder / 'out'}: run the same command again to resume."
    assert result.stderr.endswith(f"dpaudit: Interrupted by SIGTERM at step 3; {kept}\n")
    resumed = run("run", "config.toml")
    assert "step 3 of 20" in resumed.stderr
    assert "step 2 of 20" not in resumed.stderr
    run("run", "config.toml", "--set", "output=whole")
    for name in ("scores.npy", "present.npy"):
        assert np.array_equal(np.load(folder / "out" / name), np.load(folder / "whole" / name))


def test_a_signal_while_the_last_step_is_saved_ends_the_run_and_the_same_command_judges_it(
    folder: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dpaudit.experiments import _loop  # noqa: PLC0415

    original = _loop._Clock.save

    def save(self: Any) -> None:
        original(self)
        if self._training.num_done == 20:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as interrupted:
        interrupted.setattr(_loop._Clock, "save", save)
        result = run("run", "config.toml")
    assert result.exit_code == 143
    kept = f"finished work is kept in {folder / 'out'}: run the same command again to resume."
    assert result.stderr.endswith(f"dpaudit: Interrupted by SIGTERM at step 20; {kept}\n")
    assert not (folder / "out" / "result.json").exists()
    resumed = run("run", "config.toml", "--json")
    assert resumed.exit_code in (0, 3)
    assert "step 20 of 20" in resumed.stderr
    assert json.loads(resumed.stdout)["num_done"] == 20


def test_a_state_that_cannot_be_saved_after_a_signal_is_reported(
    folder: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_step(3, lambda: os.kill(os.getpid(), signal.SIGHUP), monkeypatch)
    monkeypatch.setattr("dpaudit.experiments._loop.save", raiser(IncompleteError("The disk is full.")))
    result = run("run", "config.toml")
    assert result.exit_code == 129
    lost = "but the last state could not be saved: The disk is full"
    kept = f"finished work is kept in {folder / 'out'}: run the same command again to resume."
    assert result.stderr.endswith(f"Interrupted by SIGHUP at step 3, {lost}; {kept}\n")


def test_a_folder_that_vanished_is_named_after_a_signal_and_without_one(
    folder: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanish() -> None:
        shutil.rmtree(folder / "out")

    resumable_config()
    with monkeypatch.context() as vanished:
        at_step(3, vanish, vanished)
        result = run("run", "config.toml")
    assert result.exit_code == 4
    assert f"could not be completed: The directory {folder / 'out'} has vanished; " in result.stderr
    assert not (folder / "out").exists()

    at_step(3, lambda: (vanish(), os.kill(os.getpid(), signal.SIGINT)), monkeypatch)
    result = run("run", "config.toml")
    assert result.exit_code == 130
    assert result.stderr.endswith(
        f"at step 3; nothing is kept, because the directory {folder / 'out'} has vanished.\n"
    )


def test_a_lock_that_was_removed_is_noticed_before_the_next_write(
    folder: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace() -> None:
        (folder / "out" / ".lock").unlink()
        (folder / "out" / ".lock").touch()
        (folder / "out" / "checkpoint.pt").unlink()

    resumable_config()
    at_step(3, replace, monkeypatch)
    result = run("run", "config.toml")
    assert result.exit_code == 4
    assert f"The lock {folder / 'out' / '.lock'} was removed or replaced" in result.stderr
    assert not (folder / "out" / "checkpoint.pt").exists()


def test_a_figure_that_cannot_be_completed_ends_all_of_them(
    folder: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    del folder
    monkeypatch.setattr("dpaudit.cli._reproduce_command._measure", raiser(IncompleteError("No disk.")))
    result = run("reproduce", "all", "--scale", "tiny", "--json")
    assert result.exit_code == 4
    values = json.loads(result.stdout)
    assert values["figures"] == []
    assert "could not be completed: No disk; " in values["error"]
