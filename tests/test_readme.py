"""The pages say what the code does: their blocks are run, and the output they show is compared."""

import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import ModuleType

import pytest
from short_blocks import printed_blocks, require_short
from typer.testing import CliRunner

from dpaudit.cli._app import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# a comment before a block says which environment it needs, if it is another one than that of these tests
FENCE = re.compile(r"^(?:<!-- needs (\w+) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
FILE = re.compile(r"# (\w+\.py)\n")
COMMANDS = ("dpaudit", "pytest")
DURATION = re.compile(r" in \d+\.\d+s\b")  # of a session of pytest
VERDICT_STATUSES = (0, 1, 3)  # 2 is wrong usage
# With this variable a page whose output changed is rewritten. Read the diff before you commit it.
IS_UPDATE = bool(os.environ.get("DPAUDIT_TEST_UPDATE_PAGES"))


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int
    output: str | None  # of a text block that follows directly
    needs: str | None = None
    place: int = 0  # of the output in the page


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    found = list(FENCE.finditer(text))
    for match, following in zip_longest(found, found[1:]):
        shown, place = None, 0
        if following and following[2] == "text" and not text[match.end() : following.start()].strip():
            shown, place = following[3], following.start(3)
        yield Block(match[2], match[3], text[: match.start(2)].count("\n") + 1, shown, match[1], place)


def run_python(block: Block, page: Path, module: ModuleType) -> str:
    """Run the block, or write it if its first line is the name of a file."""
    if file := FILE.match(block.text):
        Path(file[1]).write_text(block.text)
        return ""
    # the empty lines make a traceback point at the line of the page
    code = compile("\n" * block.line + block.text, str(page), "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, module.__dict__)
    return printed.getvalue()


def run_command(words: list[str]) -> tuple[int, str, str]:
    """Return the exit status and both outputs; the commands run in this process, which is faster."""
    if words[0] == "dpaudit":
        result = CliRunner().invoke(app, words[1:], env={"COLUMNS": "80"})
        if not isinstance(result.exception, SystemExit | None):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr
    outputs = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(outputs[0]), contextlib.redirect_stderr(outputs[1]), own_modules():
        status = pytest.main([*words[1:], "-p", "no:cacheprovider"])
    return int(status), outputs[0].getvalue(), outputs[1].getvalue()


@contextlib.contextmanager
def own_modules() -> Iterator[None]:
    """Hide modules that have the name of a file in this folder, such as tests of dpaudit."""
    hidden = {path.stem: sys.modules.pop(path.stem, None) for path in Path().glob("*.py")}
    yield
    for name, module in hidden.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def run_shell(block: Block) -> str:
    """Run the lines that call our commands. Of the others only ``echo $?  # 1`` means something here."""
    printed, status = "", None
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words == ["echo", "$?"]:
            assert line.endswith(f"# {status}"), f"{line}: it was {status}"
        if not words or words[0] not in COMMANDS:
            continue
        words, target = (words[:-2], words[-1]) if words[-2] == ">" else (words, None)
        status, output, errors = run_command(words)
        # a crash prints nothing there
        assert status in VERDICT_STATUSES, f"{line}\n{output}{errors}"
        assert output, f"{line}\n{errors}"
        if target is not None:
            Path(target).write_text(output)
        printed += DURATION.sub("", output)
    return printed


def same(printed: str, shown: str) -> bool:
    """The same words, and the same numbers up to what another machine or a finer search may change.

    Output that is shown from "..." on is compared from there on, and up to one at the end.
    """
    if shown.startswith("..."):
        shown = shown.removeprefix("...").lstrip()
        printed = printed[printed.rfind(" ".join(shown.split()[:2])) :]
    if shown.rstrip().endswith("..."):
        shown = shown.rstrip().removesuffix("...")
        printed = "\n".join(printed.splitlines()[: len(shown.splitlines())])
    numbers = [[float(text.replace(",", "")) for text in NUMBER.findall(side)] for side in (printed, shown)]
    words = [NUMBER.sub("#", side).split() for side in (printed, shown)]
    return words[0] == words[1] and numbers[0] == pytest.approx(numbers[1], rel=0.01)


def excerpt(printed: str, shown: str) -> str:
    """Return the part of the output that the page showed, in its new words."""
    lines, old = printed.splitlines(), shown.splitlines()
    if old[0] == "...":
        first = max(
            (place for place, line in enumerate(lines) if line.split()[:2] == old[1].split()[:2]), default=0
        )
        lines = ["...", *lines[first:]]
    if old[-1] == "...":
        lines = [*lines[: len(old) - 1], "..."]
    return "".join(f"{line.rstrip()}\n" for line in lines)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work in an empty folder, as a reader would; forget the modules that the page wrote there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


# what Opacus and torch say of every private training
@pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # by PEFT
# JAX Privacy with a newer optax, and Keras with a newer numpy
@pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.usefixtures("folder")
def test_every_block_runs_and_prints_what_the_page_shows(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look themselves up there
    changed: list[tuple[Block, str]] = []
    for block in blocks(page):
        if block.needs is not None:
            continue
        if block.language == "python":
            printed = run_python(block, page, module)
        elif block.language == "sh":
            printed = run_shell(block)
        else:
            continue
        if block.output is not None and not same(printed, block.output):
            assert IS_UPDATE, f"{page.name}:{block.line} printed\n{printed}"
            changed.append((block, excerpt(printed, block.output)))
    text = page.read_text()
    for shown in printed_blocks(text):
        require_short(shown)
    for block, output in reversed(changed):
        text = text[: block.place] + output + text[block.place + len(str(block.output)) :]
    if changed:
        page.write_text(text)


def test_the_readme_names_the_two_commands_and_shows_a_loop_and_a_test() -> None:
    found = list(blocks(ROOT / "README.md"))
    shell = "".join(block.text for block in found if block.language == "sh")
    assert "make demo" in shell
    assert "make test" in shell
    assert "pytest" in shell
    assert any(block.language == "python" for block in found)


def test_a_python_block_is_never_hidden_by_its_indentation() -> None:
    for page in PAGES:
        indented = re.findall(r"^ +```(?:python|sh)", page.read_text(), re.MULTILINE)
        assert not indented, f"{page.name} has blocks that no test runs"
