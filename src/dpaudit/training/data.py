"""Data sets in memory: examples with their classes, and the part held out to make canaries.

``digits`` ships with dpaudit, and the paper's Random data set needs no file. The readers need official files,
which you download: CIFAR-10 in its binary version; images in MNIST's idx format, also used by Fashion-MNIST,
EMNIST and others; Purchase-100 and Location, binary features with a class, as CSV or npz.
"""

from __future__ import annotations

import gzip
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpaudit import _validate
from dpaudit._io import NOT_AN_ARRAY, open_file
from dpaudit._torch import HeldOutData, tensor_fingerprints
from dpaudit.canaries import split_indices
from dpaudit.errors import InputError

__all__ = [
    "Dataset",
    "HeldOutData",
    "as_inputs",
    "cifar10",
    "digits",
    "hold_out",
    "idx_images",
    "location",
    "purchase100",
    "random_images",
]

_TABLES_SOURCE = "https://github.com/privacytrustlab/datasets"
_RECORD = 1 + 3 * 32 * 32  # CIFAR-10: the class, then the red, green and blue pixels
_INPUTS, _TARGETS = ("features", "inputs", "x"), ("labels", "targets", "y")


@dataclass(frozen=True, eq=False)
class Dataset:
    """Inputs with their classes, from 0 to ``num_classes`` - 1.

    Pixels may be stored as bytes, in a quarter of the memory: they are scaled to [-1, 1] when a batch is
    read. The range is fixed; computing it from the data would be an additional query.
    """

    inputs: Tensor
    targets: Tensor
    num_classes: int

    def __post_init__(self) -> None:
        _validate.integer("num_classes", self.num_classes, low=2)
        if len(self.inputs) != len(self.targets) or len(self.targets) == 0:
            raise InputError(
                "inputs and targets must have the same number of examples, at least one, got "
                f"{len(self.inputs)} inputs and {len(self.targets)} targets."
            )
        if self.targets.is_floating_point():
            raise InputError(f"Classes must be whole numbers, got {self.targets.dtype}.")
        low, high = int(self.targets.min()), int(self.targets.max())
        if low < 0 or high >= self.num_classes:
            raise InputError(f"Classes must be between 0 and {self.num_classes - 1}, got {low} to {high}.")

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.shape))
        return f"Dataset({len(self):,} examples of {shape}, {self.num_classes} classes)"

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.inputs.shape[1:])

    def at(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of some examples, ready for a model."""
        indices = indices.to(self.inputs.device)
        return as_inputs(self.inputs.index_select(0, indices)), self.targets.index_select(0, indices)

    def chunks(self, chunk_size: int = 1_000) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the inputs and targets of all examples in order, in chunks, ready for a model."""
        for indices in torch.arange(len(self)).split(chunk_size):  # type: ignore[no-untyped-call]
            yield self.at(indices)

    def to(self, device: torch.device | str) -> Dataset:
        """Return a copy on another device."""
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))

    def followed_by(self, inputs: Tensor, targets: Tensor) -> Dataset:
        """Return the data as model inputs, with other examples appended."""
        both = zip(self.at(torch.arange(len(self))), (as_inputs(inputs), targets), strict=True)
        whole = [torch.cat([first, second.to(first)]) for first, second in both]
        return replace(self, inputs=whole[0], targets=whole[1])

    def split(self, num_first: int) -> tuple[Dataset, Dataset]:
        """Split the data after the first ``num_first`` examples, for example into training and test set."""
        if not 0 < num_first < len(self):
            raise InputError(f"num_first must be between 1 and {len(self) - 1}, got {num_first}.")
        first, rest = slice(None, num_first), slice(num_first, None)
        return tuple(  # type: ignore[return-value]
            replace(self, inputs=self.inputs[side], targets=self.targets[side]) for side in (first, rest)
        )


def as_inputs(values: Tensor) -> Tensor:
    """Return model inputs: bytes are scaled to [-1, 1], all other values are unchanged."""
    return values.float().div_(127.5).sub_(1.0) if values.dtype == torch.uint8 else values


def hold_out(
    data: Dataset, num_held_out: int, *, seed: int = 0, apart_from: Dataset | None = None
) -> tuple[Dataset, HeldOutData]:
    """Split off random examples, from which input canaries are made.

    Train on the first part, or test on it if other data are used for training: an audit raises if held-out
    examples are in the training data.

    Args:
        data: The examples.
        num_held_out: How many to split off.
        seed: The seed of the choice.
        apart_from: Further data whose examples are removed from the second part, as duplicates of the first
            are.

    Returns:
        The rest of the data, and the held-out examples.

    >>> hold_out(digits(), 297)
    (Dataset(1,500 examples of 1 x 8 x 8, 10 classes), HeldOutData(297 examples, 10 classes))

    """
    remaining, held = map(torch.from_numpy, split_indices(len(data), num_held_out, seed))
    rest = replace(data, inputs=data.inputs[remaining], targets=data.targets[remaining])
    inputs, targets = data.at(held)
    seen = fingerprints_of(rest) | (set() if apart_from is None else fingerprints_of(apart_from))
    return rest, HeldOutData.split_off(inputs, targets, data.num_classes).apart_from(seen)


def fingerprints_of(data: Dataset) -> set[int]:
    """Return the fingerprints of all inputs, after scaling."""
    return {fingerprint for inputs, _ in data.chunks() for fingerprint in tensor_fingerprints(inputs)}


def digits() -> Dataset:
    """Return 1,797 handwritten digits with 8x8 pixels (Alpaydin and Kaynak 1998, UCI, CC BY 4.0).

    >>> digits()
    Dataset(1,797 examples of 1 x 8 x 8, 10 classes)
    """
    file = resources.files("dpaudit.training") / "files" / "digits.npz"
    with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    inputs = torch.from_numpy(images).float().div_(8.0).sub_(1.0)  # 0..16 to [-1, 1]
    return Dataset(inputs[:, None], torch.from_numpy(labels).long(), num_classes=10)


def random_images(
    num_examples: int = 50_000,
    *,
    shape: tuple[int, ...] = (3, 32, 32),
    num_classes: int = 10,
    seed: int = 0,
) -> Dataset:
    """Return random pixels and classes, with nothing to learn.

    Args:
        num_examples: How many.
        shape: The shape of an image, by default that of CIFAR-10.
        num_classes: The number of classes.
        seed: The random seed.

    Returns:
        The images and their classes.

    >>> random_images(100)
    Dataset(100 examples of 3 x 32 x 32, 10 classes)

    """
    _validate.integer("num_examples", num_examples)
    sizes = " x ".join(map(str, shape))
    _validate.fits_memory(f"{num_examples} examples of shape {sizes}", num_examples * math.prod(shape))
    rng = np.random.default_rng(seed)
    inputs = rng.integers(0, 256, size=(num_examples, *shape), dtype=np.uint8)
    targets = rng.integers(0, num_classes, size=num_examples)
    return Dataset(torch.from_numpy(inputs), torch.from_numpy(targets), num_classes)


def cifar10(directory: str | Path, *, train: bool = True) -> Dataset:
    """Read the images of CIFAR-10.

    Args:
        directory: The directory with the ``.bin`` files.
        train: Whether to read the 50,000 training images instead of the 10,000 test images.

    Returns:
        The images and their classes.

    Example:
        ``train = cifar10("cifar-10-batches-bin")``

    """
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
            f"{path} has {values.size:,} bytes, which are no complete records of {_RECORD:,} bytes: it is "
            "truncated or not from the binary version of CIFAR-10."
        )
    return values.reshape(-1, _RECORD)


def idx_images(directory: str | Path, *, train: bool = True, num_classes: int = 10) -> Dataset:
    """Read images such as those of MNIST.

    Args:
        directory: The directory with ``train-images-idx3-ubyte`` and its siblings, gzipped or not.
        train: Whether to read the training images instead of the test images.
        num_classes: The number of classes.

    Returns:
        The images and their classes.

    Example:
        ``train = idx_images("fashion-mnist")``

    """
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
        raise InputError(f"{path} is not an idx file of bytes with {dimensions} dimensions.")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    values = np.frombuffer(content, dtype=np.uint8, offset=header)
    if values.size != np.prod(shape, dtype=np.int64):
        raise InputError(
            f"{path} is truncated: shape {shape} is declared, but there are {values.size:,} values."
        )
    return values.reshape(shape).copy()


def _unzipped(path: Path, content: bytes) -> bytes:
    try:
        return gzip.decompress(content)
    except (EOFError, OSError) as error:
        raise InputError(f"{path} is a truncated or damaged gzip file.") from error


def purchase100(directory: str | Path) -> Dataset:
    """Read 600 binary features (products bought) and 100 classes of shoppers.

    Args:
        directory: The directory with ``purchase100.npz`` or the original CSV file.

    Returns:
        The features and their classes.

    Example:
        ``purchase100("data")``

    """
    names = ("purchase100.npz", "purchase100.csv", "dataset_purchase", "dataset_purchase.csv")
    path = _first_existing(directory, names, f"dataset_purchase.tgz at {_TABLES_SOURCE}")
    return _table(path, num_features=600, num_classes=100)


def location(directory: str | Path) -> Dataset:
    """Read 446 binary features (places visited) and 30 classes of visitors.

    Args:
        directory: The directory with ``location.npz`` or the original CSV file.

    Returns:
        The features and their classes.

    Example:
        ``location("data")``

    """
    names = ("location.npz", "location.csv", "bangkok", "bangkok.csv")
    path = _first_existing(directory, names, f"dataset_location.tgz at {_TABLES_SOURCE}")
    return _table(path, num_features=446, num_classes=30)


def _table(path: Path, num_features: int, num_classes: int) -> Dataset:
    features, labels = _from_npz(path) if path.suffix == ".npz" else _from_csv(path)
    if features.ndim != 2 or features.shape[1] != num_features:
        raise InputError(f"{path} must have {num_features} features per record, got shape {features.shape}.")
    labels = labels - int(labels.max(initial=0) == num_classes)  # classes start at 1 in the original files
    return Dataset(torch.from_numpy(features), torch.from_numpy(labels.astype(np.int64)), num_classes)


def _from_csv(path: Path) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Read records that consist of the class, possibly in quotes, followed by the features."""
    if path.stat().st_size == 0:
        raise InputError(f"{path} is empty.")
    try:
        with open_file(path) as file:
            table = np.loadtxt(file, delimiter=",", dtype=np.int64, quotechar='"', ndmin=2)
    except ValueError as error:
        raise InputError(f"{path} must contain whole numbers, the class first: {error}.") from error
    return table[:, 1:].astype(np.float32), table[:, 0]


def _from_npz(path: Path) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    try:
        with open_file(path) as file, np.load(file, allow_pickle=False) as arrays:
            features, labels = _first_array(path, arrays, _INPUTS), _first_array(path, arrays, _TARGETS)
    except InputError:
        raise
    except (*NOT_AN_ARRAY, AttributeError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{path} does not contain NumPy arrays, or is damaged.") from error
    if labels.ndim == 2:  # one column per class
        labels = labels.argmax(axis=1)
    return features.astype(np.float32), labels.astype(np.int64)


def _first_array(path: Path, arrays: np.lib.npyio.NpzFile, names: Sequence[str]) -> npt.NDArray[np.generic]:
    for name in names:
        if name in arrays:
            return np.asarray(arrays[name])
    raise InputError(f"{path} has no array named {' or '.join(names)} (found: {', '.join(arrays)}).")


def _first_existing(directory: str | Path, names: Sequence[str], source: str) -> Path:
    """Return the first of these files that exists; otherwise, raise with the download location."""
    folder = Path(directory)
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise InputError(f"{folder} has no {' or '.join(names)}; download it from {source}.")
