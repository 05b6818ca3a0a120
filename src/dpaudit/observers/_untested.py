"""A training whose noise cannot be tested."""

from __future__ import annotations

from dpaudit.errors import InputError

__all__ = ["UntestedError"]


class UntestedError(InputError):
    """There is no noise to test, or its tests would not have the error rate that they say."""
