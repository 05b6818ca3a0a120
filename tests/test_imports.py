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


@pytest.mark.slow
def test_short_paths_lead_to_the_observers_and_load_a_framework_only_on_use() -> None:
    code = (
        "import sys, dpaudit; print('torch' in sys.modules, 'jax' in sys.modules);"
        "from dpaudit.opacus import observe; from dpaudit.observers import opacus;"
        "print(observe is opacus.observe is dpaudit.opacus.observe, dpaudit.opacus.__all__ == opacus.__all__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True", "True"]
    assert {"jax_privacy", "opacus", "tensorflow"} <= set(dir(dpaudit))


def test_importing_dpaudit_waits_with_scipy_until_something_is_used() -> None:
    code = "import sys, dpaudit; print('scipy' in sys.modules, dpaudit.Gaussian(), 'scipy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "Gaussian()", "True"]


def test_a_name_that_does_not_exist_is_said_to_be_missing() -> None:
    with pytest.raises(AttributeError, match="module 'dpaudit' has no attribute 'Nothing'"):
        dpaudit.Nothing  # noqa: B018
    assert set(dpaudit.__all__) <= set(dir(dpaudit))


def test_importing_the_command_line_loads_no_library_for_numbers() -> None:
    names = ("numpy", "scipy", "torch", "pydantic", "dp_accounting", "pyarrow")
    code = f"import sys, dpaudit.cli._app; print(*[name for name in {names!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_importing_dpaudit_prints_and_warns_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import dpaudit"], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")
