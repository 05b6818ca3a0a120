"""Privacy accounting based on dp-accounting: claims, composition over training, calibration."""

from dpaudit.accounting._claim import Claim
from dpaudit.accounting._epsilon import noise_for_epsilon, training_epsilon
from dpaudit.accounting._subsampled import SubsampledGaussian

__all__ = ["Claim", "SubsampledGaussian", "noise_for_epsilon", "training_epsilon"]
