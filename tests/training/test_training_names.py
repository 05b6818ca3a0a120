"""The public names of the training package: a change here is a change for users."""

import inspect

import dpaudit.training
from dpaudit.training import data, ensemble, gradients, models

NAMES = """
    DPSGD SGD Adam Augmentation Batch Diagnose EndToEnd FlipAndCrop GaussianSum Hook OneRun Optimizer
    PoissonSampling PrivateSum Sampler Seeds Step Training TwoBatches accuracy cross_entropy
    generator initialize
"""


def test_the_public_names_are_these() -> None:
    assert dpaudit.training.__all__ == NAMES.split()


def test_every_public_name_exists_and_is_documented() -> None:
    for module in (dpaudit.training, data, ensemble, gradients, models):
        for name in module.__all__:
            assert name in ("Loss", "Score") or inspect.getdoc(getattr(module, name)), name
