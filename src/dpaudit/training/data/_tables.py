"""Purchase-100 and Location: binary features with a class, as CSV or npz."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from dpaudit._foreign import NOT_AN_ARRAY, open_file
from dpaudit.errors import InputError
from dpaudit.training.data._dataset import Dataset
from dpaudit.training.data._missing import first_existing

__all__ = ["location", "purchase100"]

_SOURCE = "https://github.com/privacytrustlab/datasets"
_INPUTS, _TARGETS = ("features", "inputs", "x"), ("labels", "targets", "y")


def purchase100(directory: str | Path) -> Dataset:
    """600 products bought or not, 100 kinds of buyers: ``purchase100.npz``, or the original CSV file."""
    names = ("purchase100.npz", "purchase100.csv", "dataset_purchase", "dataset_purchase.csv")
    path = first_existing(directory, names, f"dataset_purchase.tgz of {_SOURCE}")
    return _table(path, num_features=600, num_classes=100)


def location(directory: str | Path) -> Dataset:
    """446 places visited or not, 30 kinds of visitors: ``location.npz``, or the original CSV file."""
    names = ("location.npz", "location.csv", "bangkok", "bangkok.csv")
    path = first_existing(directory, names, f"dataset_location.tgz of {_SOURCE}")
    return _table(path, num_features=446, num_classes=30)


def _table(path: Path, num_features: int, num_classes: int) -> Dataset:
    features, labels = _from_npz(path) if path.suffix == ".npz" else _from_csv(path)
    if features.ndim != 2 or features.shape[1] != num_features:
        raise InputError(f"Expected {num_features} features a record in {path}, got shape {features.shape}.")
    labels = labels - _first_class(labels, num_classes)
    return Dataset(torch.from_numpy(features), torch.from_numpy(labels.astype(np.int64)), num_classes)


def _first_class(labels: npt.NDArray[np.int64], num_classes: int) -> int:
    """Classes are counted from 1 in the original files, and often from 0 in copies."""
    return int(labels.max(initial=0) == num_classes)


def _from_csv(path: Path) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """The class first, perhaps in quotes, then the features."""
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
            features, labels = _named(path, arrays, _INPUTS), _named(path, arrays, _TARGETS)
    except InputError:
        raise
    except (*NOT_AN_ARRAY, AttributeError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"Expected the arrays of numpy in {path}, but they cannot be read.") from error
    if labels.ndim == 2:  # one column a class
        labels = labels.argmax(axis=1)
    return features.astype(np.float32), labels.astype(np.int64)


def _named(path: Path, arrays: np.lib.npyio.NpzFile, names: tuple[str, ...]) -> npt.NDArray[np.generic]:
    for name in names:
        if name in arrays:
            return np.asarray(arrays[name])
    raise InputError(f"Expected an array named {' or '.join(names)} in {path}, got {', '.join(arrays)}.")
