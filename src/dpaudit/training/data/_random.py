"""The paper's Random data set: random pixels and random classes."""

from __future__ import annotations

import numpy as np
import torch

from dpaudit import _validate
from dpaudit.training.data._dataset import Dataset

__all__ = ["random_images"]


def random_images(
    num_examples: int = 50_000,
    *,
    shape: tuple[int, ...] = (3, 32, 32),
    num_classes: int = 10,
    seed: int = 0,
) -> Dataset:
    """Nothing to learn, of the size of CIFAR-10 unless told otherwise.

    >>> random_images(100)
    Dataset(100 examples of 3 x 32 x 32, 10 classes)
    """
    _validate.whole("num_examples", num_examples)
    rng = np.random.default_rng(seed)
    inputs = rng.integers(0, 256, size=(num_examples, *shape), dtype=np.uint8)
    targets = rng.integers(0, num_classes, size=num_examples)
    return Dataset(torch.from_numpy(inputs), torch.from_numpy(targets), num_classes)
