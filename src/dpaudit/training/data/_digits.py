"""The data set that comes with dpaudit."""

from __future__ import annotations

from importlib import resources

import numpy as np
import torch

from dpaudit.training.data._dataset import Dataset

__all__ = ["digits"]


def digits() -> Dataset:
    """1,797 handwritten digits of 8x8 pixels (Alpaydin and Kaynak 1998, UCI, CC BY 4.0).

    >>> digits()
    Dataset(1,797 examples of 1 x 8 x 8, 10 classes)
    """
    file = resources.files("dpaudit.training.data") / "files" / "digits.npz"
    with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    inputs = torch.from_numpy(images).float().div_(8.0).sub_(1.0)  # 0..16 to [-1, 1]
    return Dataset(inputs[:, None], torch.from_numpy(labels).long(), num_classes=10)
