"""The exceptions of dpaudit.

DpauditError
|-- FindingError       raised on request by Diagnosis.raise_for_findings(); also an AssertionError
|-- IncompleteError    the machine or dpaudit itself failed, for example a full disk; nothing is judged
|-- InputError         an invalid value; also a ValueError
|-- MissingExtraError  an optional dependency is not installed; also an ImportError
`-- ViolationError     raised on request by Result.raise_for_violation(); also an AssertionError
"""

from __future__ import annotations

__all__ = [
    "DpauditError",
    "FindingError",
    "IncompleteError",
    "InputError",
    "MissingExtraError",
    "ViolationError",
]


class DpauditError(Exception):
    """The base class of all exceptions that dpaudit raises deliberately."""


class FindingError(DpauditError, AssertionError):
    """Tests of the noise or the batches found deviations that are very unlikely in correct training."""


_LONGEST = 1_000  # characters of a message
_END = 300  # characters kept at the end of a longer one, where sentences say what to do


def shortened(message: str) -> str:
    """Return a message of at most 1,000 characters: what it quotes is usually in the middle, which is cut."""
    if len(message) <= _LONGEST:
        return message
    return f"{message[: _LONGEST - _END - 5]} ... {message[-_END:]}"


def quoted(value: object) -> str:
    """Return the beginning of a value for an error message: short, on one line and in ASCII."""
    return " ".join(f"{value!a:.80}".split())


def message_of(error: BaseException) -> str:
    """Return the message of an exception; nothing if it cannot be printed."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001  # of the class of the exception, which may be anyone's
        return ""


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an exception, without a period at its end."""
    return (message_of(error).strip().splitlines() or ["no message"])[0].rstrip(".")


class IncompleteError(DpauditError):
    """The audit could not be completed because of the machine or of dpaudit itself, and nothing is judged.

    The disk is full, memory is short, or worker processes or a cluster are lost. Finished work is kept.
    """


class InputError(DpauditError, ValueError):
    """A value is invalid; the message, of at most 1,000 characters, names it and says what is allowed."""

    def __init__(self, message: str = "") -> None:
        super().__init__(shortened(message))


class MissingExtraError(DpauditError, ImportError):
    """A feature needs packages that are not installed; the message has the command that installs them."""

    def __init__(self, feature: str, packages: str) -> None:
        super().__init__(f"{feature} needs packages that are not installed: pip install {packages}")


class ViolationError(DpauditError, AssertionError):
    """The observations refute the claim at the stated confidence."""
