"""The public names, so that none comes or goes unnoticed."""

from dpaudit import zoo
from dpaudit.training import faults

ZOO = "ENTRIES Entry Evidence Judged Replay Scores Specimen chosen examine_entry judge run_zoo"
FAULTS = """
    AveragedNoise ClippedAfterMean ConstantSeed FewSeeds NoNoiseWhenEmpty NoiseForTheMean NoiseTooSmall
    Noiseless RawMeanMixed SameSeedForLeaves ShuffledBatches Silent Unclipped UnnoisedCoordinates
"""


def test_public_names():
    assert zoo.__all__ == ZOO.split()
    assert faults.__all__ == FAULTS.split()
    for module in (zoo, faults):
        assert all(hasattr(module, name) for name in module.__all__)
