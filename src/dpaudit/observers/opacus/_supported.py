"""Which of the optimizers of Opacus can be observed, and where each of them clips."""

from __future__ import annotations

from typing import Any

from opacus.optimizers import (
    DPOptimizer,
    DPOptimizerFastGradientClipping,
    FSDPOptimizerFastGradientClipping,
)
from opacus.optimizers.ddp_perlayeroptimizer import DistributedPerLayerOptimizer

from dpaudit.errors import InputError
from dpaudit.observers.opacus._clips import Clip, GhostClip, RowClip

__all__ = ["clip_of"]

_NO_PLACE: dict[type, str] = {
    DistributedPerLayerOptimizer: "it clips and adds noise inside of the backward pass, a layer at a time; "
    "make_private gives a SimpleDistributedPerLayerOptimizer, which can be observed",
    FSDPOptimizerFastGradientClipping: "no process has a whole gradient; observe the same training with "
    'grad_sample_mode="ghost" on a smaller model',
}


def clip_of(optimizer: Any, module: Any) -> Clip:
    """The place where canaries join, or a sentence that says why there is none."""
    if not isinstance(optimizer, DPOptimizer):
        raise InputError(
            "Expected the optimizer that PrivacyEngine.make_private returned, got a "
            f"{type(optimizer).__name__}, which is not private."
        )
    for kind, reason in _NO_PLACE.items():
        if isinstance(optimizer, kind):
            raise InputError(
                f"Expected an optimizer that can be observed, got a {type(optimizer).__name__}: {reason}."
            )
    if not isinstance(optimizer, DPOptimizerFastGradientClipping):
        return RowClip(optimizer)
    if not hasattr(module, "get_clipping_coef"):
        raise InputError(
            "Expected module=..., the model that PrivacyEngine.make_private returned: with ghost clipping "
            f"it clips, and not the optimizer; got {type(module).__name__}."
        )
    return GhostClip(optimizer, module)
