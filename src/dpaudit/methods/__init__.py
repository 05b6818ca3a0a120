"""Every method on the same scores, side by side: what ``dpaudit scores`` and ``dpaudit run`` report."""

from dpaudit.methods._examine import REVERSED, Examined, Row, examine
from dpaudit.methods._methods import NAMES, Method, is_large, methods

__all__ = ["NAMES", "REVERSED", "Examined", "Method", "Row", "examine", "is_large", "methods"]
