"""The training setup of the tests, for benchmarks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from digits_config import digits_config
from digits_training import DELTA, dpsgd_training, finished

__all__ = ["DELTA", "digits_config", "dpsgd_training", "finished"]
