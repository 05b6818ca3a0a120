"""From the description of a canary to what joins the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn

from dpaudit._torch import HeldOutData, require_fitting
from dpaudit.canaries import Coins, GradientCanary, InputCanary
from dpaudit.errors import InputError
from dpaudit.observers.opacus._held_out import require_apart
from dpaudit.observers.opacus._inputs import InputCanaries
from dpaudit.observers.opacus._model import Model
from dpaudit.observers.opacus._passes import GhostPass, Pass, RowPass

__all__ = ["input_canaries", "require_kind"]


def require_kind(
    canary: object, held_out: object, criterion: object, *, sampling: bool, several: bool
) -> None:
    """Gradients need no data; examples need some, and do not work everywhere."""
    if isinstance(canary, GradientCanary):
        given = [name for name, it in (("held_out", held_out), ("criterion", criterion)) if it is not None]
        if given:
            raise InputError(f"Expected no {given[0]} with {canary!r}, which is made from no example.")
        return
    if not isinstance(canary, InputCanary):
        raise InputError(f"Expected canary to be such as Dirac() or Crafted(), got {canary!r}.")
    if not isinstance(held_out, HeldOutData):
        raise InputError(
            f"Expected held_out, the examples that hold_out() splits off, for {canary!r} to be made from, "
            f"got {held_out if held_out is None else type(held_out).__name__}."
        )
    if sampling:
        raise InputError(
            f"Expected a canary that is a gradient, such as Dirac(), with sampling=True, got {canary!r}: "
            "scores of whole runs need canaries that are orthogonal."
        )
    if several:
        raise InputError(
            f"Expected one process with {canary!r}, got an optimizer that adds up gradients of several: "
            "observe those with a canary that is a gradient, such as Dirac()."
        )


def input_canaries(
    optimizer: DPOptimizer,
    canary: InputCanary,
    coins: Coins,
    *,
    module: Any,
    criterion: Callable[..., Any] | None,
    data: HeldOutData | None,
    loader: Any,
) -> InputCanaries:
    """Examples for the steps of this optimizer, made from held-out data."""
    if not isinstance(module, nn.Module):
        raise InputError(
            "Expected module=..., the model that PrivacyEngine.make_private returned: it finds the "
            f"gradients of canaries; got {type(module).__name__}."
        )
    assert data is not None  # as require_kind requires
    require_apart(data, loader)
    loss = _criterion(optimizer, criterion)
    require_fitting(module, getattr(loss, "criterion", loss), data)  # what ghost clipping has around a loss
    kind: type[Pass] = GhostPass if isinstance(optimizer, DPOptimizerFastGradientClipping) else RowPass
    own = kind(optimizer, module, loss)
    return InputCanaries(optimizer, canary, coins, model=Model(optimizer, module, loss), own=own, data=data)


def _criterion(optimizer: DPOptimizer, given: Any) -> Any:
    """The loss of the training; cross-entropy unless told otherwise."""
    if isinstance(optimizer, DPOptimizerFastGradientClipping):
        if not isinstance(given, DPLossFastGradientClipping):
            raise InputError(
                "Expected criterion=..., the loss that PrivacyEngine.make_private returned: with ghost "
                f"clipping it clips; got {type(given).__name__}."
            )
        return given
    return nn.CrossEntropyLoss(reduction=optimizer.loss_reduction) if given is None else given
