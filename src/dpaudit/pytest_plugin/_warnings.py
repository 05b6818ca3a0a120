"""What a green test may still have to say."""

from __future__ import annotations

__all__ = ["NothingAuditedWarning", "UnderpoweredWarning"]


class UnderpoweredWarning(UserWarning):
    """An audit that could not have seen even a serious leak: its green says little."""


class NothingAuditedWarning(UserWarning):
    """A test that asked for ``dp_audit``, passed, and audited nothing."""
