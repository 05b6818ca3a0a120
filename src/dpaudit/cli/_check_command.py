"""``dpaudit check``: look for faults in the settings of a training run with Opacus, without running it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from dpaudit._interrupts import raise_if_machine
from dpaudit.cli._console import output, print_json
from dpaudit.cli._exit_status import ExitStatus
from dpaudit.cli._options import Json
from dpaudit.errors import DpauditError, InputError

_Target = Annotated[
    str,
    typer.Argument(
        metavar="FILE.py:FUNCTION",
        help="Function without arguments that prepares the training run; or package.module:FUNCTION.",
        show_default=False,
    ),
]
_NoiseMultiplier = Annotated[
    float | None, typer.Option(min=0.0, help="Claimed noise multiplier. Default: not compared.")
]
_SampleRate = Annotated[
    float | None, typer.Option(min=0.0, max=1.0, help="Claimed sample rate. Default: the accountant's.")
]


def check(
    *,
    target: _Target,
    noise_multiplier: _NoiseMultiplier = None,
    sample_rate: _SampleRate = None,
    as_json: Json = False,
) -> None:
    """Look for faults in the settings of a training run with Opacus, before its first step.

    The function is called, and returns what make_private returned, or a dict or
    an object with optimizer, module, loader, criterion and privacy_engine, as
    far as they exist. Nothing is trained.

    Exit status: 0 if there is no finding, 1 if there is one, 2 for bad input.
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
        raise InputError(f"Expected FILE.py:FUNCTION or package.module:FUNCTION, got {target!r}.")
    module = _module(place)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [
            attribute
            for attribute, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise InputError(
            f"Expected a function of {place}, got {name!r}: it has {', '.join(functions) or 'no functions'}."
        )
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise InputError(f"Expected a function that needs no arguments, got {target}: {error}.") from error
    return function  # type: ignore[no-any-return]


def _module(place: str) -> ModuleType:
    """Import a file or a module; modules beside the file or in the current directory can be imported."""
    path, is_file = Path(place), place.endswith(".py")
    if is_file and not path.is_file():
        raise InputError(f"Expected a file {place}, but there is none.")
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
