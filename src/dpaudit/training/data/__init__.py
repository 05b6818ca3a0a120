"""Data sets: readers of the official files, one made of noise, and one that comes with dpaudit."""

from dpaudit._torch import HeldOutData
from dpaudit.training.data._cifar10 import cifar10
from dpaudit.training.data._dataset import Dataset, as_inputs
from dpaudit.training.data._digits import digits
from dpaudit.training.data._hold_out import hold_out
from dpaudit.training.data._idx import idx_images
from dpaudit.training.data._random import random_images
from dpaudit.training.data._tables import location, purchase100

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
