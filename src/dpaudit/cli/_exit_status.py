"""How a command ends: the only place that turns whatever ended it into a sentence and an exit status.

It imports neither typer nor numpy, so that it also serves if one of them cannot be loaded.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from dpaudit import _interrupts
from dpaudit.errors import DpauditError, IncompleteError, message_of, shortened

VIOLATION: Final = 1
BAD_INPUT: Final = 2
UNDERPOWERED: Final = 3
INCOMPLETE: Final = 4
_ARGUMENTS = {"--with": "with_canary", "--without": "without_canary"}  # options named unlike what they set
_ALSO = "_dpaudit_values"  # attribute of an exception: finished results to print beside the error


class ExitStatus(SystemExit):
    """The end of a command whose status is decided."""


class UnexpectedExitError(Exception):
    """Code within a command has asked for an exit, whose status would be taken for a verdict."""


@contextmanager
def exit_on_error(words: Sequence[str]) -> Iterator[None]:
    """Handle signals, and end the process with the status of whatever ends the block.

    ``words`` are the arguments of the command line. ``ExitStatus`` is passed on, but no other ``SystemExit``.
    """
    with _interrupts.handled():
        try:
            with _without_exit():
                yield
                flush()
        except ExitStatus:
            raise
        except BaseException as error:
            raise ExitStatus(_concluded(error, words)) from error


def flush() -> None:
    """Write what was printed: a full disk must not be noticed after the status is decided."""
    if sys.stdout is None:  # closed by whoever started the process
        raise IncompleteError("Standard output is closed.")
    sys.stdout.flush()


@contextmanager
def _without_exit() -> Iterator[None]:
    try:
        yield
    except ExitStatus:
        raise
    except SystemExit as error:
        raise UnexpectedExitError(f"sys.exit({error.code!r}) was called") from error


def _concluded(error: BaseException, words: Sequence[str]) -> int:
    """Return the status, also if what is to say cannot be said: Python would exit with 1."""
    with suppress(Exception):
        return exit_status_of(error, words)
    _print("Nothing was judged: the audit could not be completed, and the reason cannot be stated.")
    return INCOMPLETE


@contextmanager
def with_partial_json(values: Mapping[str, Any]) -> Iterator[None]:
    """If an error ends the block, print these values in the same JSON object."""
    try:
        yield
    except BaseException as error:
        setattr(error, _ALSO, values)
        raise


def exit_status_of(error: BaseException, words: Sequence[str]) -> int:
    """Print what ended a command as a sentence, and return its exit status."""
    number = _interrupts.requested() or (signal.SIGINT if isinstance(error, KeyboardInterrupt) else None)
    if number is None and _is_output_unread(error):
        _discard_output()
        return 128 + signal.SIGPIPE
    path = None
    if number is not None:
        status, sentence = 128 + number, _interrupted(error, number)
    elif _is_bad_input(error):
        status, sentence = BAD_INPUT, _with_options(_described(error), words)
    else:
        status, path = INCOMPLETE, _write_traceback(error)
        sentence = _incomplete(error, path)
    sentence = shortened(sentence)
    if "--json" in (words[: words.index("--")] if "--" in words else words):
        _print_json(error, sentence, status)
    _print(sentence)
    with suppress(Exception):
        if status == INCOMPLETE and path is None:
            traceback.print_exception(error)
    with suppress(Exception):
        sys.stdout.flush()
        return status
    _discard_output()  # otherwise Python would fail to flush it and change the status to 120
    return status


def _is_output_unread(error: BaseException) -> bool:
    """Return whether the reader of the output has left; rich then closes it and calls ``sys.exit``."""
    if isinstance(error, UnexpectedExitError) and error.__cause__ is not None:
        return isinstance(error.__cause__.__context__, BrokenPipeError)
    return isinstance(error, BrokenPipeError) and _is_reader_gone()


def _is_bad_input(error: BaseException) -> bool:
    if isinstance(error, OSError):
        is_about_path = _interrupts.is_about_input(error) and error.filename is not None
        return is_about_path and _interrupts.machine_fault(error) is None
    return isinstance(error, DpauditError) and not isinstance(error, IncompleteError)


def _described(error: BaseException) -> str:
    if isinstance(error, DpauditError):
        return str(error)
    if isinstance(error, OSError):
        place = error.filename or ("a pipe" if isinstance(error, BrokenPipeError) else "standard output")
        return f"Cannot read or write {place}: {error.strerror or error}."
    lines = message_of(error).strip().splitlines()
    return f"dpaudit failed with {type(error).__name__}{f': {lines[0]}' if lines else ''}"


def _with_options(sentence: str, words: Sequence[str]) -> str:
    """Return a sentence about an argument that names the option of the command line which sets it."""
    for option in (word.partition("=")[0] for word in words if word.startswith("--") and len(word) > 2):
        name = _ARGUMENTS.get(option, option.removeprefix("--").replace("-", "_"))
        sentence = re.sub(rf"^{re.escape(name)}(?=\W)", option, sentence)
    return sentence


def _reason(error: BaseException) -> str:
    fault = None if isinstance(error, DpauditError | OSError) else _interrupts.machine_fault(error)
    return fault or _described(error).rstrip(".")


def _incomplete(error: BaseException, path: Path | None) -> str:
    folder = _interrupts.work_folder()
    finished = "" if folder is None or not folder.is_dir() else f"finished work is kept in {folder}; "
    place = "follows" if path is None else f"is in {path}"
    return (
        f"Nothing was judged, because the audit could not be completed: {_reason(error)}; {finished}"
        f"run the same command again once this is resolved; the traceback {place}."
    )


def _interrupted(error: BaseException, number: int) -> str:
    """Return what is kept after a signal, and how to resume."""
    folder, progress = _interrupts.work_folder(), ""
    if isinstance(error, KeyboardInterrupt | IncompleteError):  # others have notes for the traceback
        progress = "".join(getattr(error, "__notes__", ()))
    start = f"Interrupted by {signal.Signals(number).name}{progress}"
    if folder is not None and not folder.is_dir():
        return f"{start}; nothing is kept, because the directory {folder} has vanished."
    if not isinstance(error, KeyboardInterrupt):
        start += f", but the last state could not be saved: {_reason(error)}"
    if folder is None:
        return f"{start}; nothing is kept: run the same command again to start over."
    if not _interrupts.is_work_resumed():
        return f"{start}; finished work is kept in {folder}, but the same command starts over."
    return f"{start}; finished work is kept in {folder}: run the same command again to resume."


def _write_traceback(error: BaseException) -> Path | None:
    """Write the traceback into the directory of the run or the temporary directory; return the file."""
    text = "".join(traceback.format_exception(error))
    with suppress(Exception):
        if (folder := _interrupts.work_folder()) is not None and folder.is_dir():
            from dpaudit import _io  # noqa: PLC0415  # loads numpy

            _io.write_text(path := folder / _io.ERROR_FILE, text, private=True)
            return path
    with suppress(Exception):
        handle, name = tempfile.mkstemp(prefix="dpaudit-error-", suffix=".txt")
        with os.fdopen(handle, "w", errors="backslashreplace") as file:
            file.write(text)
        return Path(name)
    return None


def printable(text: str) -> str:
    """Return a text that may quote a file or a path, without control sequences for the terminal."""
    return "".join(
        character if character.isprintable() or character == "\n" else ascii(character)[1:-1]
        for character in text
    )


def _print(sentence: str) -> None:
    with suppress(Exception):  # shortened again: what replaces a character is longer
        sys.stderr.write(f"dpaudit: {shortened(printable(sentence))}\n")
        sys.stderr.flush()


def _print_json(error: BaseException, sentence: str, status: int) -> None:
    values = {**getattr(error, _ALSO, {}), "error": sentence, "exit_status": status}
    with suppress(Exception):
        sys.stdout.write(json.dumps(values, indent=2) + "\n")


def _is_reader_gone() -> bool:
    """Return whether the reader of standard output or standard error has left: other pipes break, too."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # it may have no descriptor
            poll = select.poll()
            poll.register(stream.fileno(), 0)  # only errors, of which a missing reader is one
            if poll.poll(0):
                return True
    return False


def _discard_output() -> None:
    with suppress(Exception):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
