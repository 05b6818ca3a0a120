"""What the native training and the observers of torch libraries share.

Input canaries as examples: from their descriptions, a model and examples that are held out.
"""

from dpaudit._torch._canaries import CanaryVectors, HeldOutData, fingerprints, held_out, require_fitting

__all__ = ["CanaryVectors", "HeldOutData", "fingerprints", "held_out", "require_fitting"]
