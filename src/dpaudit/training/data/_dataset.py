"""In-memory data sets: examples with their classes, and the part held out to make canaries.

Two data sets need no files: ``digits``, which ships with dpaudit, and the paper's Random data set.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import resources

import numpy as np
import torch
from torch import Tensor

from dpaudit import _validate
from dpaudit._torch import HeldOutData, tensor_fingerprints
from dpaudit.canaries import split_indices
from dpaudit.errors import InputError


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
                f"Expected equal numbers of inputs and targets, at least one each, got {len(self.inputs)} "
                f"inputs and {len(self.targets)} targets."
            )
        if self.targets.is_floating_point():
            raise InputError(f"Expected classes to be whole numbers, got {self.targets.dtype}.")
        low, high = int(self.targets.min()), int(self.targets.max())
        if low < 0 or high >= self.num_classes:
            raise InputError(f"Expected classes in 0..{self.num_classes - 1}, got {low}..{high}.")

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

    def split(self, num_first: int) -> tuple[Dataset, Dataset]:
        """Split the data after the first ``num_first`` examples, for example into training and test set."""
        if not 0 < num_first < len(self):
            raise InputError(f"Expected num_first={num_first} in [1, {len(self) - 1}].")
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
    """Return the data without ``num_held_out`` random examples, and those examples.

    Train on the first part, or test on it if other data are used for training: an audit raises if held-out
    examples are in the training data. Duplicates of examples in the first part, or in ``apart_from``, are
    removed from the second.

    >>> from dpaudit.training.data import digits
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
    file = resources.files("dpaudit.training.data") / "files" / "digits.npz"
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
    """Return random pixels and classes, with nothing to learn; the default size is that of CIFAR-10.

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
