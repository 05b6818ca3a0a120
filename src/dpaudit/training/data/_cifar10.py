"""CIFAR-10 from its official binary files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from dpaudit._foreign import open_file
from dpaudit.errors import InputError
from dpaudit.training.data._dataset import Dataset
from dpaudit.training.data._missing import first_existing

__all__ = ["cifar10"]

_SOURCE = "cifar-10-binary.tar.gz of https://www.cs.toronto.edu/~kriz/cifar.html"
_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_TEST = ("test_batch.bin",)
_RECORD = 1 + 3 * 32 * 32  # the class, then the red, green and blue pixels


def cifar10(directory: str | Path, *, train: bool = True) -> Dataset:
    """The 50,000 images for training, or the 10,000 for test, from the folder with the .bin files."""
    folder = Path(directory)
    inner = folder / "cifar-10-batches-bin"  # the folder that the archive makes
    folder = inner if inner.is_dir() else folder
    paths = [first_existing(folder, [name], _SOURCE) for name in (_TRAIN if train else _TEST)]
    records = np.concatenate([_records(path) for path in paths])
    images = np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, 32, 32)
    return Dataset(torch.from_numpy(images), torch.from_numpy(records[:, 0].astype(np.int64)), 10)


def _records(path: Path) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    with open_file(path) as file:
        values = np.fromfile(file, dtype=np.uint8)
    if values.size == 0 or values.size % _RECORD:
        raise InputError(
            f"Expected whole records of {_RECORD:,} bytes in {path}, got {values.size:,} bytes: it is cut "
            "off, or not from the binary version of CIFAR-10."
        )
    return values.reshape(-1, _RECORD)
