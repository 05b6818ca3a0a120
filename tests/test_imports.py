"""What `import dpaudit` costs."""

import subprocess
import sys

import pytest

import dpaudit

HEAVY = (
    "dp_accounting",
    "jax",
    "matplotlib",
    "mkdocs",
    "opacus",
    "pandas",
    "pyarrow",
    "pydantic",
    "pytest",
    "ray",
    "tensorflow",
    "torch",
    "typer",
)


def test_importing_dpaudit_loads_no_framework_and_no_plotting() -> None:
    use_all = "[getattr(dpaudit, name) for name in dpaudit.__all__]"
    code = f"import sys, dpaudit; {use_all}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_importing_dpaudit_waits_with_scipy_until_something_is_used() -> None:
    code = "import sys, dpaudit; print('scipy' in sys.modules, dpaudit.Gaussian(), 'scipy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "Gaussian()", "True"]


def test_a_name_that_does_not_exist_is_said_to_be_missing() -> None:
    with pytest.raises(AttributeError, match="module 'dpaudit' has no attribute 'Nothing'"):
        dpaudit.Nothing  # noqa: B018
    assert set(dpaudit.__all__) <= set(dir(dpaudit))


def test_importing_the_command_line_loads_neither_torch_nor_pydantic() -> None:
    names = ("torch", "pydantic", "dp_accounting", "pyarrow")
    code = f"import sys, dpaudit.cli._app; print(*[name for name in {names!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_importing_dpaudit_prints_and_warns_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import dpaudit"], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")
