"""What a fault is put into: trainings and steps that are short, and give all that there is to judge by."""

from dpaudit.zoo.specimens._native import NativeTraining

__all__ = ["NativeTraining"]
