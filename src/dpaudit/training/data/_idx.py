"""Images in the format of MNIST (idx), as Fashion-MNIST, EMNIST and others use it too."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from dpaudit._foreign import open_file
from dpaudit.errors import InputError
from dpaudit.training.data._dataset import Dataset
from dpaudit.training.data._missing import first_existing

__all__ = ["idx_images"]

_SOURCE = "the MNIST or Fashion-MNIST distribution"
_GZIP = b"\x1f\x8b"
_BYTES = 0x08  # idx's code for unsigned bytes


def idx_images(directory: str | Path, *, train: bool = True, num_classes: int = 10) -> Dataset:
    """Images and labels from ``train-images-idx3-ubyte`` and its siblings, gzipped or not."""
    part = "train" if train else "t10k"
    images = _read(_find(directory, f"{part}-images", 3), dimensions=3)
    labels = _read(_find(directory, f"{part}-labels", 1), dimensions=1)
    inputs = torch.from_numpy(images)[:, None]
    return Dataset(inputs, torch.from_numpy(labels.astype(np.int64)), num_classes)


def _find(directory: str | Path, stem: str, dimensions: int) -> Path:
    plain = [f"{stem}{mark}idx{dimensions}-ubyte" for mark in "-."]
    return first_existing(directory, [name + end for name in plain for end in ("", ".gz")], _SOURCE)


def _read(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    with open_file(path) as file:
        content = file.read()
    if content.startswith(_GZIP):
        content = _unzipped(path, content)
    header = 4 * (1 + dimensions)
    if len(content) < header or content[:4] != bytes((0, 0, _BYTES, dimensions)):
        raise InputError(f"Expected an idx file of bytes with {dimensions} dimensions in {path}.")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    values = np.frombuffer(content, dtype=np.uint8, offset=header)
    if values.size != np.prod(shape, dtype=np.int64):
        raise InputError(f"Expected {shape} values in {path}, got {values.size:,}: the file is cut off.")
    return values.reshape(shape).copy()


def _unzipped(path: Path, content: bytes) -> bytes:
    try:
        return gzip.decompress(content)
    except (EOFError, OSError) as error:
        raise InputError(f"Expected a whole gzip file, but {path} is cut off or damaged.") from error
