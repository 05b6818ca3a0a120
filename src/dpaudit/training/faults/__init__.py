"""Ways in which DP-SGD really went wrong, to be put into a training: an audit has to see them.

Each is a broken ``mechanism`` or ``sampling`` for :class:`dpaudit.training.Training`.
"""

from dpaudit.training.faults._clipping import ClippedAfterMean, RawMeanMixed, Unclipped
from dpaudit.training.faults._noise import (
    AveragedNoise,
    ConstantSeed,
    FewSeeds,
    NoiseForTheMean,
    Noiseless,
    NoiseTooSmall,
    NoNoiseWhenEmpty,
    SameSeedForLeaves,
    UnnoisedCoordinates,
)
from dpaudit.training.faults._sampling import ShuffledBatches
from dpaudit.training.faults._silent import Silent

__all__ = [
    "AveragedNoise",
    "ClippedAfterMean",
    "ConstantSeed",
    "FewSeeds",
    "NoNoiseWhenEmpty",
    "NoiseForTheMean",
    "NoiseTooSmall",
    "Noiseless",
    "RawMeanMixed",
    "SameSeedForLeaves",
    "ShuffledBatches",
    "Silent",
    "Unclipped",
    "UnnoisedCoordinates",
]
