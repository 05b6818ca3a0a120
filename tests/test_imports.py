"""What `import dpaudit` costs."""

import subprocess
import sys

HEAVY = (
    "dp_accounting",
    "jax",
    "matplotlib",
    "mkdocs",
    "opacus",
    "pandas",
    "pyarrow",
    "pytest",
    "ray",
    "tensorflow",
    "torch",
    "typer",
)


def test_importing_dpaudit_loads_no_framework_and_no_plotting() -> None:
    code = f"import sys, dpaudit; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_importing_dpaudit_prints_and_warns_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import dpaudit"], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")
