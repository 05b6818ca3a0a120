"""Readers of the official files of data sets, which the user has to download.

CIFAR-10 in its binary version; images in MNIST's idx format, also used by Fashion-MNIST, EMNIST and others;
Purchase-100 and Location, binary features with a class, as CSV or npz.
"""

from __future__ import annotations

import gzip
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from dpaudit._io import NOT_AN_ARRAY, open_file
from dpaudit.errors import InputError
from dpaudit.training.data._dataset import Dataset

_TABLES_SOURCE = "https://github.com/privacytrustlab/datasets"
_RECORD = 1 + 3 * 32 * 32  # CIFAR-10: the class, then the red, green and blue pixels
_INPUTS, _TARGETS = ("features", "inputs", "x"), ("labels", "targets", "y")


def cifar10(directory: str | Path, *, train: bool = True) -> Dataset:
    """Read the 50,000 training or the 10,000 test images from the directory with the .bin files."""
    folder = Path(directory)
    inner = folder / "cifar-10-batches-bin"  # the folder inside the archive
    folder = inner if inner.is_dir() else folder
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] if train else ["test_batch.bin"]
    source = "cifar-10-binary.tar.gz at https://www.cs.toronto.edu/~kriz/cifar.html"
    paths = [_first_existing(folder, [name], source) for name in names]
    records = np.concatenate([_records(path) for path in paths])
    images = np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, 32, 32)
    return Dataset(torch.from_numpy(images), torch.from_numpy(records[:, 0].astype(np.int64)), 10)


def _records(path: Path) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    with open_file(path) as file:
        values = np.fromfile(file, dtype=np.uint8)
    if values.size == 0 or values.size % _RECORD:
        raise InputError(
            f"Expected complete records of {_RECORD:,} bytes in {path}, got {values.size:,} bytes: the file "
            "is truncated or not from the binary version of CIFAR-10."
        )
    return values.reshape(-1, _RECORD)


def idx_images(directory: str | Path, *, train: bool = True, num_classes: int = 10) -> Dataset:
    """Read images and labels from ``train-images-idx3-ubyte`` and its siblings, gzipped or not."""
    prefix = "train" if train else "t10k"
    images = _read(_find_idx(directory, f"{prefix}-images", 3), dimensions=3)
    labels = _read(_find_idx(directory, f"{prefix}-labels", 1), dimensions=1)
    inputs = torch.from_numpy(images)[:, None]
    return Dataset(inputs, torch.from_numpy(labels.astype(np.int64)), num_classes)


def _find_idx(directory: str | Path, stem: str, dimensions: int) -> Path:
    plain = [f"{stem}{mark}idx{dimensions}-ubyte" for mark in "-."]
    names = [name + end for name in plain for end in ("", ".gz")]
    return _first_existing(directory, names, "the MNIST or Fashion-MNIST distribution")


def _read(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    with open_file(path) as file:
        content = file.read()
    if content.startswith(b"\x1f\x8b"):
        content = _unzipped(path, content)
    header = 4 * (1 + dimensions)
    # 8 is the code of idx for unsigned bytes
    if len(content) < header or content[:4] != bytes((0, 0, 8, dimensions)):
        raise InputError(f"Expected an idx file of bytes with {dimensions} dimensions in {path}.")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    values = np.frombuffer(content, dtype=np.uint8, offset=header)
    if values.size != np.prod(shape, dtype=np.int64):
        raise InputError(
            f"Expected shape {shape} in {path}, got {values.size:,} values: the file is truncated."
        )
    return values.reshape(shape).copy()


def _unzipped(path: Path, content: bytes) -> bytes:
    try:
        return gzip.decompress(content)
    except (EOFError, OSError) as error:
        raise InputError(f"Expected an intact gzip file, but {path} is truncated or damaged.") from error


def purchase100(directory: str | Path) -> Dataset:
    """Read 600 binary features (products bought) and 100 classes of shoppers.

    The file is ``purchase100.npz`` or the original CSV file.
    """
    names = ("purchase100.npz", "purchase100.csv", "dataset_purchase", "dataset_purchase.csv")
    path = _first_existing(directory, names, f"dataset_purchase.tgz at {_TABLES_SOURCE}")
    return _table(path, num_features=600, num_classes=100)


def location(directory: str | Path) -> Dataset:
    """Read 446 binary features (places visited) and 30 classes of visitors.

    The file is ``location.npz`` or the original CSV file.
    """
    names = ("location.npz", "location.csv", "bangkok", "bangkok.csv")
    path = _first_existing(directory, names, f"dataset_location.tgz at {_TABLES_SOURCE}")
    return _table(path, num_features=446, num_classes=30)


def _table(path: Path, num_features: int, num_classes: int) -> Dataset:
    features, labels = _from_npz(path) if path.suffix == ".npz" else _from_csv(path)
    if features.ndim != 2 or features.shape[1] != num_features:
        raise InputError(
            f"Expected {num_features} features per record in {path}, got shape {features.shape}."
        )
    labels = labels - int(labels.max(initial=0) == num_classes)  # classes start at 1 in the original files
    return Dataset(torch.from_numpy(features), torch.from_numpy(labels.astype(np.int64)), num_classes)


def _from_csv(path: Path) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Read records that consist of the class, possibly in quotes, followed by the features."""
    if path.stat().st_size == 0:
        raise InputError(f"Expected records in {path}, got an empty file.")
    try:
        with open_file(path) as file:
            table = np.loadtxt(file, delimiter=",", dtype=np.int64, quotechar='"', ndmin=2)
    except ValueError as error:
        raise InputError(f"Expected whole numbers, the class first, in {path}: {error}.") from error
    return table[:, 1:].astype(np.float32), table[:, 0]


def _from_npz(path: Path) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    try:
        with open_file(path) as file, np.load(file, allow_pickle=False) as arrays:
            features, labels = _first_array(path, arrays, _INPUTS), _first_array(path, arrays, _TARGETS)
    except InputError:
        raise
    except (*NOT_AN_ARRAY, AttributeError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"Expected NumPy arrays in {path}, but they cannot be read.") from error
    if labels.ndim == 2:  # one column per class
        labels = labels.argmax(axis=1)
    return features.astype(np.float32), labels.astype(np.int64)


def _first_array(path: Path, arrays: np.lib.npyio.NpzFile, names: Sequence[str]) -> npt.NDArray[np.generic]:
    for name in names:
        if name in arrays:
            return np.asarray(arrays[name])
    raise InputError(f"Expected an array named {' or '.join(names)} in {path}, got {', '.join(arrays)}.")


def _first_existing(directory: str | Path, names: Sequence[str], source: str) -> Path:
    """Return the first of these files that exists; otherwise, raise with the download location."""
    folder = Path(directory)
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise InputError(f"Expected {' or '.join(names)} in {folder}; download it from {source}.")
