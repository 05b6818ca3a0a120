"""Whether larger models leak more, and whether augmented copies matter."""

from __future__ import annotations

from dpaudit.experiments.reproduction._scale import Scale
from dpaudit.experiments.reproduction._study import Study, Variant
from dpaudit.experiments.reproduction._trained import PAPER_CONV, PAPER_WIDE, TINY, sizes

__all__ = ["AUGMULT", "MODEL_SIZE"]

_SIZES = "CIFAR-10 WRN-16", "CIFAR-10 WRN-40"
_CONV = "CIFAR-10 ConvNet"
_COPIES = 1, 2, 4, 8, 16

MODEL_SIZE = Study(
    name="model-size",
    title="WRN-16 and WRN-40 on CIFAR-10 at epsilon = 8",
    text="Figure of appendix D.2: by the Gaussian curve the larger model leaks slightly more; by other "
    "methods it seems to leak less.",
    variants={name.removeprefix("CIFAR-10 "): Variant(column=name) for name in _SIZES},
    settings={
        Scale.TINY: {
            "columns": dict.fromkeys(_SIZES, TINY),
            "epsilons": (8.0,),
            "num_runs": 1,
            "num_canaries": 16,
        },
        Scale.CPU: {
            "columns": dict.fromkeys(_SIZES, sizes(25, 2, 150, 0.01)),
            "epsilons": (8.0,),
            "num_runs": 2,
            "num_canaries": 512,
        },
        Scale.PAPER: {
            "columns": dict.fromkeys(_SIZES, PAPER_WIDE),
            "epsilons": (8.0,),
            "num_runs": 10,
            "num_canaries": 512,
        },
    },
    remarks=("A gradient canary does not depend on the model: differences in size are not expected.",),
).figure()

AUGMULT = Study(
    name="augmult",
    title="Augmentation multiplicity at epsilon = 8",
    axis="augmented copies of an example",
    text="Figure of appendix D.3: no clear trend between the number of augmented copies and the bound.",
    variants={f"{copies}": Variant(column=_CONV, training={"multiplicity": copies}) for copies in _COPIES},
    settings={
        Scale.TINY: {
            "columns": {_CONV: TINY},
            "variants": ("1", "2"),
            "epsilons": (8.0,),
            "num_runs": 1,
            "num_canaries": 16,
        },
        Scale.CPU: {
            "columns": {_CONV: sizes(49, 4, 400, 0.02)},
            "epsilons": (8.0,),
            "num_runs": 3,
            "num_canaries": 512,
        },
        Scale.PAPER: {
            "columns": {_CONV: PAPER_CONV},
            "epsilons": (8.0,),
            "num_runs": 10,
            "num_canaries": 512,
        },
    },
    remarks=("The paper does not say which network it used here; this is the ConvNet.",),
).figure()
