"""What a fault is put into: trainings and steps that are short, and give all that there is to judge by."""

from dpaudit.zoo.specimens._calibration import calibration
from dpaudit.zoo.specimens._native import LEAVES, NativeTraining
from dpaudit.zoo.specimens._replays import batch_norm, floor_batch, microbatch
from dpaudit.zoo.specimens._step import PlainStep
from dpaudit.zoo.specimens._steps_with_faults import clipped_by_layer, clipped_by_parameter_and_noised_twice
from dpaudit.zoo.specimens._whole_run import WholeTraining

__all__ = [
    "LEAVES",
    "NativeTraining",
    "PlainStep",
    "WholeTraining",
    "batch_norm",
    "calibration",
    "clipped_by_layer",
    "clipped_by_parameter_and_noised_twice",
    "floor_batch",
    "microbatch",
]
