"""Canaries as tensors, shared by the native engine and the observers of torch libraries."""

from dpaudit._torch._canaries import (
    CanaryVectors,
    HeldOutData,
    largest_absolute,
    require_fitting,
    tensor_fingerprints,
)

__all__ = [
    "CanaryVectors",
    "HeldOutData",
    "largest_absolute",
    "require_fitting",
    "tensor_fingerprints",
]
