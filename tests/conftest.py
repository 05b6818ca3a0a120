"""Settings of the whole test run."""

import gc
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

# Two threads of torch that share one core wait for each other; tests run in parallel processes instead. Set
# before numpy is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import accountant_table
import pytest
from cpu_times import CpuTimes
from hypothesis import settings

# A job in the background ignores interrupts and, after nohup, the end of its terminal; so would every process
# that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A process that starts one of these files last would leave the others without work.
SLOWEST = (
    "tests/observers/test_jax",
    "tests/observers/test_opacus",
    "tests/test_readme.py",
    "tests/training/",
    "tests/accounting/",
    "tests/zoo/",
)
IS_LONG = bool(os.environ.get("DPAUDIT_TEST_LONG"))

# The same examples every time: a check that passes here passes everywhere.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=100 if IS_LONG else 15)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    accountant_table.install(config)
    if not IS_LONG:
        config.pluginmanager.register(CpuTimes(), "cpu-times")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one process run all tests of a file, which share fixtures and caches; pages are independent."""
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415  # tests run without xdist too

    class FileScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if nodeid.startswith("tests/test_readme.py") else str(super()._split_scope(nodeid))

    return FileScheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave long tests, of further settings, to `make test-long`, and begin with the slowest files."""
    items.sort(key=lambda item: not item.nodeid.startswith(SLOWEST))
    if not IS_LONG:
        short = [item for item in items if not item.get_closest_marker("long")]
        kept = set(few(short))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def few(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the items; of a test marked ``few(n)`` only n settings, spread evenly over all of them."""
    for _, group in groupby(items, key=lambda item: item.nodeid.split("[")[0]):
        settings_of_one = list(group)
        mark = settings_of_one[0].get_closest_marker("few")
        count = len(settings_of_one) if mark is None else min(mark.args[0], len(settings_of_one))
        yield from (settings_of_one[place * len(settings_of_one) // count] for place in range(count))


def pytest_collection_finish() -> None:
    """Spare the garbage collector, which each observer of Opacus asks for all objects, what was imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def is_long() -> bool:
    """Is this `make test-long`?"""
    return IS_LONG


@pytest.fixture(scope="session")
def seeds() -> range:
    """Return the seeds of tests that repeat a training run: few in `make test`, 40 in `make test-long`."""
    return range(40 if IS_LONG else 6)


@pytest.fixture
def received() -> Iterator[list[int]]:
    """The signals that reach the handlers of this process, which would otherwise end it."""
    numbers: list[int] = []
    kinds = signal.SIGTERM, signal.SIGHUP
    before = [signal.signal(kind, lambda number, _: numbers.append(number)) for kind in kinds]
    yield numbers
    for kind, handler in zip(kinds, before, strict=True):
        signal.signal(kind, handler)


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """A test that waits for a pipe fails, instead of waiting for ever."""

    def give_up(*_: object) -> None:
        pytest.fail("It waits for a process to write into a pipe.")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(300)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A disk of a size that can be changed."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def resize(size: str) -> Path:
        again = "remount," if disk.is_mount() else ""
        command = ["mount", "-t", "tmpfs", "-o", f"{again}size={size}", "none", str(disk)]
        if (
            shutil.which("mount") is None
            or subprocess.run(command, capture_output=True, check=False).returncode
        ):
            pytest.skip("mounting a small disk is not permitted here")
        return disk

    yield resize
    if disk.is_mount():
        subprocess.run(["umount", str(disk)], check=True)
