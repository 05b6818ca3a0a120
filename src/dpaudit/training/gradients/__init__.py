"""Per-example gradients, clipped and summed, by the fastest way that the model allows."""

from dpaudit.training.gradients._clipped_sum import ClippedSum, clipped_sum, per_example
from dpaudit.training.gradients._flat import flat_parameters, num_parameters, set_flat_gradient
from dpaudit.training.gradients._loss import Loss, cross_entropy
from dpaudit.training.gradients._rows import DenseRows, Rows

__all__ = [
    "ClippedSum",
    "DenseRows",
    "Loss",
    "Rows",
    "clipped_sum",
    "cross_entropy",
    "flat_parameters",
    "num_parameters",
    "per_example",
    "set_flat_gradient",
]
