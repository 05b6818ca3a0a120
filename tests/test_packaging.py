"""The wheel and the source archive: what is in them, and that the wheel runs outside of the repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest

import dpaudit

ROOT = Path(__file__).parent.parent
NAME = f"dpaudit-{dpaudit.__version__}"
# what is no Python code, and is missed only when it is used
DATA = {
    "dpaudit/py.typed",
    "dpaudit/report/schema/report-2.json",
    "dpaudit/training/files/digits.npz",
    *(
        f"dpaudit/experiments/examples/{path.name}"
        for path in ROOT.glob("src/dpaudit/experiments/examples/*")
    ),
    *(
        f"dpaudit/report/assets/{path.name}"
        for path in ROOT.glob("src/dpaudit/report/assets/*[!y]")
        if path.suffix
    ),
}


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both archives, built as `make dist` does."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    return dist / f"{NAME}-py3-none-any.whl"


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as pip unpacks it; what it needs comes from the environment of these tests."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "install"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--target", str(folder), str(wheel)], check=True)
    return folder


def package() -> set[str]:
    """The files of the package, but not what running it leaves there."""
    found = (path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*") if path.is_file())
    return {path.as_posix() for path in found if "__pycache__" not in path.parts}


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    about = {f"{NAME}.dist-info/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt")}
    assert names == package() | about | {f"{NAME}.dist-info/licenses/LICENSE"}
    assert names >= DATA


def test_the_source_archive_has_what_the_tests_need_and_nothing_that_was_made(dist: Path) -> None:
    with tarfile.open(dist / f"{NAME}.tar.gz") as file:
        names = {name.removeprefix(f"{NAME}/") for name in file.getnames()}
    assert names >= {f"src/{name}" for name in package()}
    assert names >= {"LICENSE", "README.md", "Makefile", "constraints.txt", "pyproject.toml", "CITATION.cff"}
    assert names >= {"SECURITY.md", "tests/conftest.py", "tests/test_packaging.py"}
    fixtures = (path for path in (ROOT / "tests" / "fixtures").rglob("*") if path.is_file())
    assert names >= {path.relative_to(ROOT).as_posix() for path in fixtures}
    made = {"__pycache__", ".venv", ".hypothesis", "site", "dist", "dpaudit-demo", "dpaudit-zoo", "runs"}
    assert [name for name in names if made.intersection(Path(name).parts)] == []


def description(wheel: Path) -> str:
    """What an index shows of the project."""
    with zipfile.ZipFile(wheel) as file:
        return file.read(f"{NAME}.dist-info/METADATA").decode().split("\n\n", 1)[1]


def test_the_long_description_says_how_to_install_and_names_every_extra(wheel: Path) -> None:
    install = description(wheel).split("## Install")[1].split("\n## ")[0]
    assert "pip install -c constraints.txt '.[opacus]'" in install
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"]) - {"dev", "docs"}  # for a clone
    assert {name for name in extras if f"`{name}`" not in install and f"[{name}]" not in install} == set()


def test_links_of_the_long_description_lead_to_files_of_the_source_archive(wheel: Path, dist: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", description(wheel))
    with tarfile.open(dist / f"{NAME}.tar.gz") as file:
        assert len(links) > 10
        assert {f"{NAME}/{link}" for link in links} <= set(file.getnames())


def run(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Call the program of the wheel, in a folder that knows nothing of the repository."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, str(installed / "bin" / "dpaudit"), *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_the_wheel_runs_outside_of_the_repository(installed: Path, tmp_path: Path) -> None:
    where = "import dpaudit; print(dpaudit.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", where],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.strip()).is_relative_to(installed)
    version = run(installed, tmp_path, "--version")
    assert (version.returncode, version.stdout) == (0, f"dpaudit {dpaudit.__version__}\n")
    rng = np.random.default_rng(1)
    np.save(tmp_path / "with.npy", rng.normal(1.0, 0.5, 300))
    np.save(tmp_path / "without.npy", rng.normal(0.0, 0.5, 300))
    claim = "--normalized", "--noise-multiplier", "2", "--delta", "1e-5"
    found = run(installed, tmp_path, "scores", "--with", "with.npy", "--without", "without.npy", *claim)
    assert found.returncode == 1, found.stderr
    assert "VIOLATION" in found.stdout


@pytest.mark.long
def test_the_demo_of_the_wheel_writes_its_report(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "demo")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "dpaudit-demo" / "report.html").stat().st_size > 10_000
