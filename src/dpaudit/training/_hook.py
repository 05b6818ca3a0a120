"""The place where an audit looks into a training."""

from __future__ import annotations

from collections.abc import Iterable

from dpaudit.training._step import Step
from dpaudit.training.gradients._rows import Rows

__all__ = ["Hook"]


class Hook:
    """Lets gradients join a step and sees what comes out; both do nothing unless overridden.

    What joins is clipped, summed and noised by the training's own mechanism, like the gradients of examples.
    It is not part of the update: the model is trained as if there were no hook.
    """

    def joining(self, index: int) -> Iterable[Rows]:  # noqa: ARG002  # for those who override it
        """Gradients that join step ``index``, not clipped yet. None of them by default."""
        return ()

    def observe(self, step: Step) -> None:
        """Called in every step, before the model is updated."""
