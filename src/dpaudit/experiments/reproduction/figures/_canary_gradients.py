"""Which gradient is inserted, and whether it is the same in every step."""

from __future__ import annotations

from dpaudit.experiments.reproduction._scale import Scale
from dpaudit.experiments.reproduction._study import Study, Variant
from dpaudit.experiments.reproduction._trained import PAPER_CONV, TINY, sizes

__all__ = ["CANARY_GRADIENTS"]

_KINDS = {"Dirac": "dirac", "Constant": "constant", "Random": "random-direction"}


def _variants(column: str) -> dict[str, Variant]:
    return {
        f"{name}, {'moving' if moving else 'static'}": Variant(
            column=column, audit={"canary": {"kind": kind, "moving": moving}}
        )
        for name, kind in _KINDS.items()
        for moving in (False, True)
    }


CANARY_GRADIENTS = Study(
    name="canary-gradients",
    title="Dirac, constant and random canary gradients, static and moving",
    text="Figure of appendix C.2: the Dirac canary is slightly better than the others; static or moving "
    "makes little difference.",
    variants=_variants("CIFAR-10 ConvNet"),
    methods=("f-DP(CP)", "f-DP(ZB)"),
    settings={
        Scale.TINY: {
            "columns": {"CIFAR-10 ConvNet": TINY},
            "epsilons": (8.0,),
            "num_runs": 1,
            "num_canaries": 4,
        },
        Scale.CPU: {
            "columns": {"CIFAR-10 ConvNet": sizes(49, 4, 500, 0.01)},
            "epsilons": (8.0,),
            "num_runs": 3,
            "num_canaries": 64,
        },
        Scale.PAPER: {
            "columns": {"CIFAR-10 ConvNet": PAPER_CONV},
            "epsilons": (8.0,),
            "num_runs": 10,
            "num_canaries": 512,
        },
    },
    remarks=(
        "The paper does not say which network it used here; this is the ConvNet. Its scores are plain dot "
        "products, in which the other examples of the batch are noise too: a Dirac canary meets few of them. "
        "Ours takes them off.",
    ),
).figure()
