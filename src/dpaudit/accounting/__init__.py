"""Privacy accounting on top of dp-accounting: claims, whole trainings, calibration."""

from dpaudit.accounting._claim import Claim
from dpaudit.accounting._subsampled import SubsampledGaussian
from dpaudit.accounting._training import noise_for_epsilon, training_epsilon

__all__ = ["Claim", "SubsampledGaussian", "noise_for_epsilon", "training_epsilon"]
