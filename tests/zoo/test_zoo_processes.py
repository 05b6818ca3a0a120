"""Processes of an entry end with it, and say nothing of it."""

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("opacus") is None, reason="The processes are of Opacus.")

CODE = """
from slow_to_import import work
from dpaudit.zoo._opacus_distributed import _on_processes
if __name__ == "__main__":
    try:
        _on_processes(work, False, 0)
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.long
def test_an_interrupt_while_processes_start_ends_them_without_a_traceback(tmp_path):
    (tmp_path / "main.py").write_text(CODE)
    started = tmp_path / "started"
    os.mkfifo(started)
    # whoever collects the tests of this folder has imported slow_to_import, and is not the first here
    inherited = {name: value for name, value in os.environ.items() if name != "FIRST"}
    places = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "main.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**inherited, "PYTHONPATH": places, "STARTED": str(started)},
        start_new_session=True,
    )
    try:
        # open for both, so that there is no end between two that write
        with os.fdopen(os.open(started, os.O_RDWR), "rb", buffering=0) as pipe:
            pids = [pipe.readline().decode().strip() for _ in range(2)]
        os.killpg(process.pid, signal.SIGINT)
        assert process.communicate() == ("interrupted\n", "")
        assert not any(Path("/proc", pid).exists() for pid in pids)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
