"""What dpaudit raises.

DpauditError
|-- FindingError       raised on request by Diagnosis.raise_for_findings(); also an AssertionError
|-- InputError         a value that cannot be used; also a ValueError
|-- MissingExtraError  an optional dependency is not installed; also an ImportError
`-- ViolationError     raised on request by Result.raise_for_violation(); also an AssertionError
"""

from __future__ import annotations

__all__ = ["DpauditError", "FindingError", "InputError", "MissingExtraError", "ViolationError"]


class DpauditError(Exception):
    """The base of everything dpaudit raises on purpose."""


class FindingError(DpauditError, AssertionError):
    """Tests of a training's noise or batches found what a correct training would hardly show."""


class InputError(DpauditError, ValueError):
    """A value cannot be used; the message names it and says what was expected."""


class MissingExtraError(DpauditError, ImportError):
    """A feature needs an optional dependency; the message is the line that installs it."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs an optional dependency: pip install 'dpaudit[{extra}]'")


class ViolationError(DpauditError, AssertionError):
    """The observations refute the claim at the stated confidence."""
