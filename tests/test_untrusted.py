"""What holds of everything that is read and written."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpaudit import _files
from dpaudit.errors import InputError
from dpaudit.report import Report

PACKAGE = Path(__file__).parent.parent / "src" / "dpaudit"
# run code that is in what they read
UNSAFE_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
# only the name of its error is used, which torch raises
PICKLE_ERROR = PACKAGE / "experiments" / "_checkpoint.py"
# a folder of their own, which nobody else reads: the lock, which has no content, and results of a child
NOT_ATOMIC = {PACKAGE / "_files.py", PACKAGE / "zoo" / "specimens" / "_processes.py"}
WRITERS = {
    "write_text",
    "write_bytes",
    "save",
    "savez",
    "savez_compressed",
    "savetxt",
    "savefig",
    "tofile",
    "dump",
}


def calls() -> Iterator[tuple[Path, ast.Call, str]]:
    """Every call in the package, with the last word of what is called."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield path, node, ast.unparse(node.func)


def keywords(call: ast.Call) -> dict[str, str]:
    return {str(one.arg): ast.unparse(one.value) for one in call.keywords}


def test_nothing_that_runs_what_it_reads_is_imported() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            found |= {path for name in names if name.split(".")[0] in UNSAFE_MODULES}
    assert found == {PICKLE_ERROR}
    used = [text for path, _, text in calls() if path == PICKLE_ERROR and text.startswith("pickle")]
    assert used == []


def test_arrays_and_tensors_are_read_without_pickles() -> None:
    loads = [(path, call, text) for path, call, text in calls() if text in ("np.load", "torch.load")]
    assert {text for _, _, text in loads} == {"np.load", "torch.load"}
    for path, call, text in loads:
        given = keywords(call)
        safe = (
            given.get("weights_only") == "True"
            if text == "torch.load"
            else given.get("allow_pickle") == "False"
        )
        assert safe, f"{path}:{call.lineno}"


def test_everything_is_written_as_a_whole_or_not_at_all() -> None:
    found = set()
    for path, call, text in calls():
        module, _, name = text.rpartition(".")
        opened = name == "open" and any(
            isinstance(one, ast.Constant) and "w" in str(one.value) for one in call.args
        )
        into_a_file = "file" in map(ast.unparse, call.args)  # of _files.write
        if opened or (
            name in WRITERS and module in ("np", "torch", "json", "path", "file") and not into_a_file
        ):
            found.add(path)
        if name in ("write_text", "write_bytes") and module not in ("", "_files"):
            found.add(path)
    assert found == NOT_ATOMIC


def _fails_half_way(file: object) -> None:
    file.write(b"half")  # type: ignore[attr-defined]
    raise OSError(28, "No space left on device")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    _files.write_text(path, "old")
    with pytest.raises(InputError, match=r"Cannot write .*result\.json: No space left on device\."):
        _files.write(path, _fails_half_way)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_write_that_is_interrupted_leaves_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    def stop(_: object) -> None:
        raise error

    path = tmp_path / "result.json"
    _files.write_text(path, "old")
    with pytest.raises(error):
        _files.write(path, stop)
    assert [one.read_text() for one in tmp_path.iterdir()] == ["old"]


def test_a_report_that_cannot_be_made_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("old")
    with pytest.raises(InputError):
        Report.read([tmp_path]).write(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == "old"


@pytest.mark.parametrize("path", ["a\0b", "~nobody-of-this-name/x"])
def test_a_path_that_cannot_be_is_told(path: str) -> None:
    with pytest.raises(InputError, match="path"):
        _files.make_folder(_files.expanded(path))
