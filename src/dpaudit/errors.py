"""The exceptions of dpaudit.

DpauditError
|-- FindingError       raised on request by Diagnosis.raise_for_findings(); also an AssertionError
|-- InputError         an invalid value; also a ValueError
|-- MissingExtraError  an optional dependency is not installed; also an ImportError
`-- ViolationError     raised on request by Result.raise_for_violation(); also an AssertionError
"""

from __future__ import annotations

__all__ = ["DpauditError", "FindingError", "InputError", "MissingExtraError", "ViolationError"]


class DpauditError(Exception):
    """The base class of all exceptions that dpaudit raises deliberately."""


class FindingError(DpauditError, AssertionError):
    """Tests of the noise or the batches found deviations that are very unlikely in correct training."""


class InputError(DpauditError, ValueError):
    """A value is invalid; the message names it and states what was expected."""


class MissingExtraError(DpauditError, ImportError):
    """A feature requires an optional dependency; the message contains the command that installs it."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} requires an optional dependency: pip install 'dpaudit[{extra}]'")


class ViolationError(DpauditError, AssertionError):
    """The observations refute the claim at the stated confidence."""
