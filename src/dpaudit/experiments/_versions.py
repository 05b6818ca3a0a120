"""What a run was made with."""

from __future__ import annotations

import platform

import numpy as np
import torch

import dpaudit

__all__ = ["versions"]


def versions() -> dict[str, str]:
    """Of everything that its numbers depend on."""
    return {
        "dpaudit": dpaudit.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "platform": platform.platform(),
    }
