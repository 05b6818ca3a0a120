"""Kills, signals, full disks and lost workers at random moments change no score of the resumed run."""

from __future__ import annotations

import os
import random
import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from robustness_runs import MODES, POOLS, FaultyRun, config_of, failures, num_kept, observations, result
from typer.testing import CliRunner

from dpaudit.cli._app import app

pytestmark = pytest.mark.long
Begin = Callable[..., FaultyRun]
NUM_MOMENTS = int(os.environ.get("DPAUDIT_TEST_MOMENTS", "1"))
# "ray::" alone would also find agents of Ray, whose end is that of the whole cluster
WORKERS = {"processes": "worker_main", "ray": "ray::_call"}


def finished(config: Path, folder: Path, mode: str) -> None:
    """Run the same config in this process to its end; a pool does not change the scores."""
    words = [
        "run",
        str(config),
        "--set",
        f"output={folder}",
        *(["--set", "pool=serial"] if mode in POOLS else []),
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code in (0, 1, 3), done.stderr


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of an undisturbed run; one for all pools."""
    folder, made = tmp_path_factory.mktemp("undisturbed"), {}

    def call(mode: str) -> Path:
        name = "trials" if mode in POOLS else mode
        if name not in made:
            (folder / f"{name}.toml").write_text(config_of(mode, folder / name))
            finished(folder / f"{name}.toml", folder / name, mode)
            made[name] = folder / name
        return made[name]

    return call


def begun(begin: Begin, mode: str, folder: Path, moment: int, **options: Any) -> tuple[FaultyRun, Path]:
    """Start a run and return it at a random moment; of five moments, one is before the first checkpoint."""
    config = folder / "config.toml"
    config.write_text(config_of(mode, folder / "run"))
    run = begin(config, **options)
    rng = random.Random(f"{mode} {moment}")
    if moment % 5 == 4:
        run.wait_until((folder / "run" / "config.json").exists)
    elif mode in POOLS:
        wanted = rng.randint(1, 160)
        run.wait_until(lambda: num_kept(folder / "run") >= wanted)
    else:
        for _ in range(rng.randint(1, 15)):
            wait_for_new(run, folder / "run" / "checkpoint.pt")
    run.watch()
    return run, config


def wait_for_new(run: FaultyRun, path: Path) -> None:
    before = path.stat().st_mtime_ns if path.exists() else 0  # the number of a file may be used again
    run.wait_until(lambda: path.exists() and path.stat().st_mtime_ns != before)


def require_same(folder: Path, whole: Path, config: Path, mode: str) -> None:
    """Resume, and compare every score and the result."""
    if mode in POOLS:
        assert failures(folder) == 0
    finished(config, folder, mode)
    assert observations(folder) == observations(whole)
    assert result(folder) == result(whole)


@pytest.mark.parametrize("moment", range(NUM_MOMENTS))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGHUP"])
def test_a_signal_at_any_moment(
    name: str, mode: str, moment: int, *, begin: Begin, undisturbed: Any, tmp_path: Path
) -> None:
    number = signal.Signals[name]
    run, config = begun(begin, mode, tmp_path, moment)
    run.process.send_signal(number)
    status, printed, said = run.end()
    run.require_gone()
    assert printed == ""
    if number == signal.SIGKILL:
        assert status == -signal.SIGKILL
    else:
        assert status == 128 + number
        last = said.splitlines()[-1]
        assert last.startswith(f"dpaudit: Interrupted by {number.name}")
        assert f"kept in {tmp_path / 'run'}: run the same command again to resume." in last
        assert "Traceback" not in said
    require_same(tmp_path / "run", undisturbed(mode), config, mode)


@pytest.mark.parametrize("mode", POOLS)
def test_two_signals_end_a_run_at_once(mode: str, begin: Begin, undisturbed: Any, tmp_path: Path) -> None:
    run, config = begun(begin, mode, tmp_path, 98)
    run.process.send_signal(signal.SIGINT)
    run.wait_for_line("a second signal stops at once")  # two pending signals would become one
    run.process.send_signal(signal.SIGINT)
    status, _, said = run.end()
    assert status == 130
    assert "Traceback" not in said
    run.require_gone()
    require_same(tmp_path / "run", undisturbed(mode), config, mode)


@pytest.mark.parametrize("moment", range(NUM_MOMENTS))
@pytest.mark.parametrize("mode", WORKERS)
def test_a_killed_worker_changes_nothing(
    mode: str, moment: int, begin: Begin, undisturbed: Any, tmp_path: Path
) -> None:
    run, config = begun(begin, mode, tmp_path, moment)
    with suppress(ProcessLookupError):  # it may have ended by itself in between
        os.kill(run.wait_for(WORKERS[mode]), signal.SIGKILL)
    status, _, said = run.end()
    assert status in (0, 1, 3), said
    run.require_gone()
    require_same(tmp_path / "run", undisturbed(mode), config, mode)


@pytest.mark.parametrize("moment", range(NUM_MOMENTS))
@pytest.mark.parametrize("helper", ["raylet/raylet", "gcs_server"])
def test_a_lost_cluster_ends_the_run_with_4_and_the_same_command_resumes_it(
    helper: str, moment: int, begin: Begin, undisturbed: Any, tmp_path: Path
) -> None:
    run, config = begun(begin, "ray", tmp_path, moment)
    os.kill(run.wait_for(helper), signal.SIGKILL)
    status, printed, said = run.end()
    assert (status, printed) == (4, ""), said
    assert "could not be completed: The Ray cluster was lost: " in said.splitlines()[-1]
    assert "Traceback" not in said
    assert "Traceback" in (tmp_path / "run" / "dpaudit-error.txt").read_text()
    run.require_gone()
    require_same(tmp_path / "run", undisturbed("ray"), config, "ray")


@pytest.mark.parametrize("moment", range(NUM_MOMENTS))
@pytest.mark.parametrize("mode", MODES)
def test_a_disk_that_fills_up_at_any_moment_is_a_fault_of_the_machine(
    mode: str, moment: int, begin: Begin, undisturbed: Any, tmp_path: Path
) -> None:
    run, config = begun(begin, mode, tmp_path, moment)
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    status, printed, said = run.end()
    assert (status, printed) == (4, ""), said
    assert "could not be completed: Cannot write " in said
    run.require_gone()
    require_same(tmp_path / "run", undisturbed(mode), config, mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_full_disk_is_a_fault_of_the_machine(
    mode: str, begin: Begin, undisturbed: Any, small_disk: Callable[[str], Path], tmp_path: Path
) -> None:
    disk, config = small_disk("32k"), tmp_path / "config.toml"
    config.write_text(config_of(mode, disk / "run"))
    run = begin(config)
    status, printed, said = run.end()
    assert (status, printed) == (4, ""), said
    assert "could not be completed: Cannot write " in said
    run.require_gone()
    small_disk("64m")
    require_same(disk / "run", undisturbed(mode), config, mode)


# the logs of Ray would not fit, and all files of a final model would fit into the larger size
@pytest.mark.parametrize(
    ("size", "mode"),
    [
        (size, mode)
        for size in (9_000, 40_000)
        for mode in MODES
        if mode != "ray" and (size, mode) != (40_000, "final-model")
    ],
)
def test_a_limit_of_the_file_size_is_a_fault_of_the_machine(
    size: int, mode: str, begin: Begin, undisturbed: Any, tmp_path: Path
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(config_of(mode, tmp_path / "run"))
    run = begin(config, "--json", limit=f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size},) * 2)")
    status, printed, said = run.end()
    assert status == 4, said
    assert '"exit_status": 4' in printed
    assert "could not be completed: Cannot write " in said.splitlines()[-1]
    run.require_gone()
    if mode in POOLS and not (tmp_path / "run" / "trials.jsonl").exists():
        finished(config, tmp_path / "run", mode)
    require_same(tmp_path / "run", undisturbed(mode), config, mode)
