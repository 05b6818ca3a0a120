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


class IncompleteError(DpauditError):
    """The audit could not be completed because of the machine or of dpaudit itself, and nothing is judged.

    The disk is full, memory is short, or worker processes or a cluster are lost. Finished work is kept.
    """


class InputError(DpauditError, ValueError):
    """A value is invalid; the message names it and states what was expected."""


class MissingExtraError(DpauditError, ImportError):
    """A feature requires an optional dependency; the message contains the command that installs it."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} requires an optional dependency: pip install 'dpaudit[{extra}]'")


class ViolationError(DpauditError, AssertionError):
    """The observations refute the claim at the stated confidence."""
