"""The place where an audit looks into a training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dpaudit.training._step import Step
from dpaudit.training.gradients._rows import Rows

if TYPE_CHECKING:
    from dpaudit.training._training import Training

__all__ = ["Hook"]


class Hook:
    """Lets gradients join a step and sees what comes out; all of it does nothing unless overridden.

    What joins is clipped, summed and noised by the training's own mechanism, like the gradients of examples.
    It is not part of the update: the model is trained as if there were no hook.
    """

    @property
    def num_entries(self) -> int:
        """How many entries the hook adds to the data set: the training's own sampling draws them too."""
        return 0

    def attach(self, training: Training) -> None:
        """Called once, when the training is made."""

    def joining(self, index: int, entries: Sequence[int]) -> Iterable[Rows]:  # noqa: ARG002
        """Gradients that join step ``index``, not clipped yet; ``entries`` are those that were drawn."""
        return ()

    def observe(self, step: Step) -> None:
        """Called in every step, before the model is updated."""

    def after(self, step: Step) -> None:
        """Called in every step, when all of it is done. It may raise to end the training."""

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on from here."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where ``state_dict`` was taken."""
