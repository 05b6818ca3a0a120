"""Privacy accounting based on dp-accounting: claims, composition over training, calibration."""

from dpaudit.accounting._claim import (
    Accounted,
    AnyMechanism,
    Claim,
    DPSGDRun,
    Full,
    GaussianStep,
    Mechanism,
    NoiseModel,
    Poisson,
    Sampling,
    White,
)
from dpaudit.accounting._log_ratios import log_ratio_attack
from dpaudit.accounting._pld import epsilon_above, epsilon_below
from dpaudit.accounting._subsampled import SubsampledGaussian, noise_for_epsilon, training_epsilon

__all__ = [
    "Accounted",
    "AnyMechanism",
    "Claim",
    "DPSGDRun",
    "Full",
    "GaussianStep",
    "Mechanism",
    "NoiseModel",
    "Poisson",
    "Sampling",
    "SubsampledGaussian",
    "White",
    "epsilon_above",
    "epsilon_below",
    "log_ratio_attack",
    "noise_for_epsilon",
    "training_epsilon",
]
