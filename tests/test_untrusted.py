"""What holds of everything that is read and written."""

from __future__ import annotations

import ast
import importlib
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from dpaudit import _io
from dpaudit._io import open_file, read_array, read_json
from dpaudit.errors import IncompleteError, InputError
from dpaudit.experiments import load_config
from dpaudit.report import Report

PACKAGE = Path(__file__).parent.parent / "src" / "dpaudit"
# run code that is in what they read
UNSAFE_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
# the lock, which has no content, the file beside the one that is written, and results of a child in a folder
# that nobody else reads
NOT_ATOMIC = {("_io.py", "_lock_file"), ("_io.py", "write"), ("zoo/_opacus_distributed.py", "_process")}
# look at what they open, and read nothing that is no file
OPEN_SAFELY = {("_io.py", "open_file"), ("_io.py", "map_array")}
OPENERS = {"open", "read_text", "read_bytes", "fromfile", "genfromtxt", "loadtxt", "memmap", "ZipFile"}
# write; map what was written; a member of an open archive; the data that come with dpaudit; the standard
# streams, which are closed; the kernel's lists of processes
OPEN_NOTHING = {
    ("_io.py", "append"),
    ("_io.py", "_lock_file"),
    ("_io.py", "write"),
    ("_io.py", "stored"),
    ("_html.py", "asset"),  # styles that come with dpaudit
    ("pytest_plugin/_suite.py", "_write_job_summary"),  # appends to the file that the CI service names
    ("cli/_formats.py", "words"),
    ("training/data.py", "digits"),
    ("cli/__init__.py", "_open_closed"),
    ("cli/_exit_status.py", "_discard_output"),
    ("experiments/trials/_worker.py", "_descendants"),
    ("experiments/trials/_worker.py", "_open_marked"),
    ("_io.py", "packaged"),  # catalogues that come with dpaudit
}
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
    """Every call in the package, with what is called."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield path, node, ast.unparse(node.func)


def place(path: Path, call: ast.Call) -> tuple[str, str]:
    """The file of a call, and the innermost function that it is in."""
    around = [
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.lineno <= call.lineno <= (node.end_lineno or 0)
    ]
    return path.relative_to(PACKAGE).as_posix(), around[-1] if around else ""


def keywords(call: ast.Call) -> dict[str, str]:
    return {str(one.arg): ast.unparse(one.value) for one in call.keywords}


def test_nothing_that_runs_what_it_reads_is_imported() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            found |= {path for name in names if name.split(".")[0] in UNSAFE_MODULES}
    assert found == set()


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


def test_whatever_is_read_is_opened_by_one_function() -> None:
    found = set()
    for path, call, text in calls():
        module, _, name = text.rpartition(".")
        given = ast.unparse(call.args[0]) if call.args else ""
        opens = name in OPENERS or text in ("np.load", "torch.load")
        if opens and given != "file" and not module.startswith("(resources.files"):
            found.add(place(path, call))
    assert found == OPEN_SAFELY | OPEN_NOTHING


def _checkpoint(path: Path) -> object:
    return importlib.import_module("dpaudit.experiments._loop").restore(path, None, "run")


def _cell(path: Path) -> object:
    cells = importlib.import_module("dpaudit.experiments.reproduction._reproduce")._finished_cells
    path.rename(path.parent / "one.json")
    return cells(path.parent, {}).read("one")


def _canary(path: Path) -> object:
    return importlib.import_module("dpaudit.experiments.black_box._canary")._read(str(path))


def _made(path: Path) -> object:
    path.rename(path.parent / "canary.json")
    return importlib.import_module("dpaudit.experiments.black_box._canary").SharedCanary.read(path.parent, "")


def _trials(path: Path) -> object:
    return importlib.import_module("dpaudit.experiments.trials._store").count_rows(path)


def _images(path: Path) -> object:
    return importlib.import_module("dpaudit.training.data")._read(path, 3)


def _zoo(path: Path) -> object:
    finished = importlib.import_module("dpaudit.zoo._run")._finished
    path.rename(path.parent / "one.json")
    return finished(path.parent, seed=0, confidence=0.95, twin_confidence=0.95).read("one")


READERS: dict[str, Callable[[Path], object]] = {
    "json": read_json,
    "config": load_config,
    "array": partial(read_array, kinds="f"),
    "checkpoint": _checkpoint,
    "cell": _cell,
    "canary": _canary,
    "made": _made,
    "trials": _trials,
    "images": _images,
    "zoo": _zoo,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.usefixtures("no_waiting")
def test_nothing_waits_for_a_pipe(read: Callable[[Path], object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError) as caught:
        read(tmp_path / "pipe")
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("no_waiting")
def test_what_is_no_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for path in (tmp_path / "link", Path(os.devnull)):
        with pytest.raises(InputError, match=f"^{path} is a pipe or a device, not a file.$"):
            open_file(path)
    with pytest.raises(IsADirectoryError):
        open_file(tmp_path)


@pytest.mark.usefixtures("no_waiting")
def test_a_lock_that_is_a_pipe_locks_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lock")
    with _io.locked(tmp_path), pytest.raises(InputError, match="another process"), _io.locked(tmp_path):
        pass


def test_everything_is_written_as_a_whole_or_not_at_all() -> None:
    found = set()
    for path, call, text in calls():
        module, _, name = text.rpartition(".")
        opened = name == "open" and any(
            (isinstance(one, ast.Constant) and "w" in str(one.value)) or "O_CREAT" in ast.unparse(one)
            for one in call.args
        )
        into_a_file = "file" in map(ast.unparse, call.args)  # of _io.write
        if opened or (
            name in WRITERS and module in ("np", "torch", "json", "path", "file") and not into_a_file
        ):
            found.add(place(path, call))
        if name in ("write_text", "write_bytes") and module not in ("", "_io"):
            found.add(place(path, call))
    assert found == NOT_ATOMIC


def _fails_half_way(file: object) -> None:
    file.write(b"half")  # type: ignore[attr-defined]
    raise OSError(28, "No space left on device")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    _io.write_text(path, "old")
    with pytest.raises(IncompleteError, match=r"Cannot write .*result\.json: No space left on device\."):
        _io.write(path, _fails_half_way)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_write_that_is_interrupted_leaves_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    def stop(_: object) -> None:
        raise error

    path = tmp_path / "result.json"
    _io.write_text(path, "old")
    with pytest.raises(error):
        _io.write(path, stop)
    assert [one.read_text() for one in tmp_path.iterdir()] == ["old"]


def test_a_report_that_cannot_be_made_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("old")
    with pytest.raises(InputError):
        Report.read([tmp_path]).write(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == "old"


def _special(path: Path, kind: str) -> Path:
    """What is no file, and would be gone if one took its place."""
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    else:
        path.symlink_to(os.devnull)  # a device needs rights to be made
    return path


@pytest.mark.parametrize("kind", ["a pipe", "a socket", "a device"])
def test_what_is_no_file_is_not_replaced_by_one(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    path = _special(Path("report.html"), kind)
    sentence = r"^report\.html is a pipe or a device, which cannot be replaced by a file\.$"
    with pytest.raises(InputError, match=sentence):
        _io.followed(path)
    if not path.is_symlink():
        with pytest.raises(InputError, match=sentence):
            _io.write_text(path, "new")
    assert not path.is_file()
    assert list(Path().iterdir()) == [path]


def test_a_link_that_the_user_names_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    real, link = tmp_path / "elsewhere" / "real.html", tmp_path / "link.html"
    real.parent.mkdir()
    link.symlink_to(real)
    for text in ("first", "second"):
        _io.write_text(_io.followed(link), text)
        assert link.is_symlink()
        assert real.read_text() == text
    assert list(real.parent.iterdir()) == [real]


def test_a_link_that_leads_to_itself_is_told(tmp_path: Path) -> None:
    link = tmp_path / "link.html"
    link.symlink_to(link)
    with pytest.raises(InputError, match=r"Cannot write .*link\.html: Too many levels of symbolic links\."):
        _io.followed(link)


def test_a_link_in_a_directory_of_anybody_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "result.json").symlink_to(tmp_path / "mine")
    _io.write_text(folder / "result.json", "new")
    assert (folder / "result.json").read_text() == "new"
    (folder / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(InputError, match="Cannot write"), _io.locked(folder):
        pass
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("umask", [0o077, 0o027, 0o002])
def test_who_may_read_a_file_is_what_the_user_said(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        _io.write_text(tmp_path / "report.html", "text")
        _io.write_text(tmp_path / "config.json", "seeds", private=True)
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("report.html", "config.json")]
    assert modes == [0o666 & ~umask, 0o600]


@pytest.mark.parametrize("path", ["a\0b", "~nobody-of-this-name/x"])
def test_a_path_that_cannot_be_is_told(path: str) -> None:
    with pytest.raises(InputError, match=r"path|home directory that does not exist"):
        _io.make_folder(_io.expanded(path))
