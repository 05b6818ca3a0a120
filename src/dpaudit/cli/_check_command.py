"""``dpaudit check`` and ``dpaudit explain``: mistakes in an Opacus setup, and what a finding means."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from dpaudit._interrupts import raise_if_machine
from dpaudit.cli._console import output, print_json, print_rows
from dpaudit.cli._exit_status import ExitStatus
from dpaudit.cli._options import Json
from dpaudit.errors import DpauditError, InputError

if TYPE_CHECKING:  # loads scipy
    from dpaudit.diagnostics import FindingKind

_Target = Annotated[
    str,
    typer.Argument(
        metavar="FILE.py:FUNCTION",
        help="Your function, which takes no arguments; or package.module:FUNCTION.",
        show_default=False,
    ),
]
_NoiseMultiplier = Annotated[
    float | None, typer.Option(min=0.0, help="Noise multiplier that you claim. Default: not checked.")
]
_SampleRate = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="Sample rate that you claim. Default: read from the accountant."),
]


def check(
    *,
    target: _Target,
    noise_multiplier: _NoiseMultiplier = None,
    sample_rate: _SampleRate = None,
    as_json: Json = False,
) -> None:
    """Check an Opacus setup for mistakes, without training.

    Calls your function, which returns what make_private returned, or a dict or
    an object with any of optimizer, module, loader, criterion and
    privacy_engine.

    Exit status: 0 no finding, 1 findings, 2 bad input.
    """
    from dpaudit.observers import opacus  # noqa: PLC0415  # loads torch, or raises if it is missing

    function = _function(target)
    with _others_code(f"Calling {target}"):
        prepared = function()
    training = opacus.PreparedTraining.of(prepared)
    lint_report = opacus.check_prepared(training, noise_multiplier=noise_multiplier, sample_rate=sample_rate)
    if as_json:
        print_json(lint_report.to_dict())
    else:
        output().print(str(lint_report), soft_wrap=True)
    if lint_report.findings:
        raise ExitStatus(1)


def _function(target: str) -> Callable[[], Any]:
    place, separator, name = target.rpartition(":")
    if not separator or not place or not name:
        raise InputError(f"Pass FILE.py:FUNCTION or package.module:FUNCTION, got {target!r}.")
    module = _module(place)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [
            attribute
            for attribute, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise InputError(f"{place} has no function {name!r} (found: {', '.join(functions) or 'none'}).")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise InputError(f"{target} must take no arguments ({error}).") from error
    return function  # type: ignore[no-any-return]


def _module(place: str) -> ModuleType:
    """Import a file or a module; modules beside the file or in the current directory can be imported."""
    path, is_file = Path(place), place.endswith(".py")
    if is_file and not path.is_file():
        raise InputError(f"{place} does not exist.")
    sys.path.insert(0, str(path.resolve().parent if is_file else Path.cwd()))
    with _others_code(f"Importing {place}"):
        return _loaded(path) if is_file else importlib.import_module(place)


def _loaded(path: Path) -> ModuleType:
    name = f"checked_{path.stem}"  # not the name of an installed package
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the name of the file ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where pickle and dataclasses look it up
    spec.loader.exec_module(module)
    return module


@contextmanager
def _others_code(doing: str) -> Iterator[None]:
    """Report errors as one sentence, since exit status 1 would mean a finding; keep standard output clean."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except DpauditError:
        raise
    except (Exception, SystemExit) as error:
        raise_if_machine(error, doing)
        lines = str(error).strip().splitlines()
        described = f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
        raise InputError(f"{doing} raised {described}.") from error


_Name = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="Name of a finding, such as noise-variance. Default: list all.",
        show_default=False,
    ),
]


def explain(*, name: _Name = None, as_json: Json = False) -> None:
    """Explain a finding: what it tests, why it matters, what to do.

    Without a name, lists all findings.

    Exit status: 0, or 2 for an unknown name.
    """
    from dpaudit._validate import either  # noqa: PLC0415  # loads numpy
    from dpaudit.diagnostics import finding_kinds  # noqa: PLC0415  # loads scipy

    kinds = finding_kinds()
    if name is not None and name not in kinds:
        near = difflib.get_close_matches(name, kinds, n=3, cutoff=0.5)
        hint = f"Did you mean {either(near)}?" if near else "List all with: dpaudit explain"
        raise InputError(f"There is no finding {name!r}. {hint}")
    explained = [_explained(kind) for kind in ([kinds[name]] if name else kinds.values())]
    if as_json:
        print_json(explained[0] if name else {"findings": explained})
    elif name:
        output().print(name, style="bold")
        print_rows(output(), _rows(explained[0]))
    else:
        for kind in explained:
            line = Text.assemble(f"{kind['name']:<{max(map(len, kinds))}}  ", (kind["tests"], "dim"))
            output().print(line, no_wrap=True, overflow="ellipsis")


def _explained(kind: FindingKind) -> dict[str, Any]:
    """Return what the registry and the zoo say about a finding, as sentences."""
    from dpaudit._io import packaged  # noqa: PLC0415
    from dpaudit.diagnostics import finding_kinds  # noqa: PLC0415

    catalogue = packaged("zoo", "catalogue.toml")
    sources = kind.follows | kind.may_follow
    return {
        "name": kind.name,
        "topic": kind.topic,
        "tests": f"{kind.tests[:1].upper()}{kind.tests[1:]}.",
        "matters": kind.matters,
        "cause": f"{kind.question[:1].upper()}{kind.question[1:]}",
        "advice": kind.advice,
        "verdict": kind.verdict,
        "may_follow_from": sorted(
            other.name for other in finding_kinds().values() if other.is_among(sources) and other != kind
        ),
        "zoo": [
            {field: entry.get(field) for field in ("name", "wrong", "fix", "public")}
            for entry in tomllib.loads(catalogue)["entry"]
            if kind.name in entry["expected"]
        ],
    }


def _rows(explained: dict[str, Any]) -> list[tuple[str, str]]:
    """Return labeled lines; of the zoo's entries, the first three in full."""
    faults = [f"{entry['name']}: {entry['wrong']}" for entry in explained["zoo"]]
    rest = [f"and {len(faults) - 3} more: --json lists them"] if len(faults) > 4 else faults[3:]
    rows = [
        ("tests", explained["tests"]),
        ("why", explained["matters"]),
        ("cause", explained["cause"]),
        ("to do", explained["advice"]),
        ("verdict", explained["verdict"]),
        ("related", ", ".join(explained["may_follow_from"])),
        *(("zoo" if index == 0 else "", text) for index, text in enumerate((*faults[:3], *rest))),
    ]
    return [(label, text) for label, text in rows if text]
