"""The example scripts run as they are, and are short."""

import runpy
from pathlib import Path

import pytest

# that of TensorFlow runs where TensorFlow is: see tests_tensorflow
EXAMPLES = sorted(
    path
    for path in (Path(__file__).parents[2] / "examples").glob("*.py")
    if not path.name.startswith("tensorflow")
)

# what the libraries say of every private training
pytestmark = [
    pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
]


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_and_has_fewer_than_40_lines(script, capsys):
    assert len(script.read_text().splitlines()) < 40
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.startswith("NO_VIOLATION")


def test_there_are_examples():
    assert EXAMPLES
