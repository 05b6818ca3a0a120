"""Data sets: readers of official files, random pixels, and the digits that ship with dpaudit."""

from dpaudit._torch import HeldOutData
from dpaudit.training.data._dataset import Dataset, as_inputs, digits, hold_out, random_images
from dpaudit.training.data._readers import cifar10, idx_images, location, purchase100

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
