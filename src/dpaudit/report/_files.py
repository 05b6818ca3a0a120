"""Arrays of a run, which may be of anybody: no pickle, and no memory without an end."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dpaudit._foreign import LARGEST_ARRAY, NOT_AN_ARRAY, map_array
from dpaudit.errors import InputError

__all__ = ["read_array"]


def read_array(path: Path, kinds: str) -> np.ndarray | None:
    """An array of one of these kinds of numpy; None if there is no such file."""
    if not path.exists():
        return None
    try:
        mapped = map_array(path)
    except InputError:
        raise
    except (OSError, *NOT_AN_ARRAY) as error:
        raise InputError(f"Expected an array in {path}, but it cannot be read.") from error
    if not isinstance(mapped, np.ndarray) or mapped.dtype.kind not in kinds:
        raise InputError(f"Expected numbers in {path}, got something else.")
    if mapped.nbytes > LARGEST_ARRAY:  # a file has as many bytes as it says, and need not fill a disk
        raise InputError(
            f"Expected an array of at most {LARGEST_ARRAY:,} bytes in {path}, got one of {mapped.nbytes:,}."
        )
    return np.array(mapped)
