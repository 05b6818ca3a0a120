"""The example scripts run as they are, and are short."""

import subprocess
import sys
from pathlib import Path

import pytest

# that of TensorFlow runs where TensorFlow is: see tests_tensorflow
EXAMPLES = sorted(
    path
    for path in (Path(__file__).parents[2] / "examples").glob("*.py")
    if not path.name.startswith("tensorflow")
)


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_and_has_fewer_than_40_lines(script):
    assert len(script.read_text().splitlines()) < 40
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("NO_VIOLATION")


def test_there_are_examples():
    assert EXAMPLES
