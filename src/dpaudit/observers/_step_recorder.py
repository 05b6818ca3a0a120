"""What the observers of compiled training share: canaries on parameters known late, and recorded steps.

:class:`LaidOutCanaries` draws the canaries of each step, once the first gradient shows the parameters.
:class:`StepRecorder` assembles the recorder and its checks. Its method ``record`` is the only place where a
step is handed to them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from dpaudit.canaries import CanaryPlan, Directions, GradientCanary, InputCanary, ParameterLayout
from dpaudit.diagnostics import BatchRecord, NoiseCheck, ObservedStep, SumRecord
from dpaudit.errors import InputError
from dpaudit.recording import DPSGDParams, ObservedCanaries, ReadClaim, Recorder, TrainingInfo


class LaidOutCanaries:
    """The gradient canaries of all steps, on parameters that are known from the first gradient on.

    ``num_canaries`` may be None until then.
    """

    def __init__(self, canary: GradientCanary, num_canaries: int | None, seed: int) -> None:
        self.canary, self.is_number_known = canary, num_canaries is not None
        self.draws = CanaryPlan(canary, 1 if num_canaries is None else num_canaries, seed)
        self.eps = 0.0
        """The relative precision of gradients."""
        self._layout: ParameterLayout | None = None
        self._directions: dict[int, Directions] = {}

    def choose_number(self, num_canaries: int) -> None:
        """Set the number of canaries."""
        self.draws, self.is_number_known = CanaryPlan(self.canary, num_canaries, self.draws.seed), True

    @property
    def layout(self) -> ParameterLayout:
        """The named parameters of a gradient; none before the first."""
        return ParameterLayout((), ()) if self._layout is None else self._layout

    def lay_out(self, layout: ParameterLayout) -> None:
        """Lay the canaries out on the parameters of a gradient; raise if the first one had others."""
        if self._layout is None:
            self._layout = layout
        require_same_parameters(self._layout, layout)

    def directions(self, index: int) -> Directions:
        """Return the directions of a step's canaries."""
        variant = self.canary.variant(index)
        if variant not in self._directions:
            if self.canary.moving:
                self._directions.clear()
            self._directions[variant] = self.draws.directions(index, self.layout)
        return self._directions[variant]

    def observed(self) -> ObservedCanaries:
        """Return the canaries for tests of what arrives of them."""
        return ObservedCanaries(self.canary, self.directions, lambda: self.layout, lambda: self.eps)


def require_same_parameters(first: ParameterLayout, layout: ParameterLayout) -> None:
    """Raise if a gradient has other parameters than the first one, as after unfreezing a layer."""
    if (layout.names, layout.shapes) != (first.names, first.shapes):
        raise InputError(
            f"Expected gradients with {first.num_parameters:,} entries in every step, in the same "
            f"{len(first.names)} arrays, got {layout.num_parameters:,} in {len(layout.names)} arrays: were "
            "layers frozen or unfrozen? Call observe() once for each phase of the training run, after the "
            "change."
        )


class StepRecorder:
    """The recorder of a training run and the checks of its sums and batches.

    A step that is not finite ends the recording with a warning; what was recorded before can be audited.
    """

    def __init__(
        self,
        canary: GradientCanary | InputCanary,
        read: Callable[[], DPSGDParams],
        claimed: DPSGDParams,
        *,
        batches: BatchRecord,
        facts: Callable[[], TrainingInfo],
        **options: Any,
    ) -> None:
        self.batches, self.is_over = batches, False
        self.recorder = Recorder(
            claim=ReadClaim(read, claimed),
            num_steps=claimed.num_steps,
            signal=min(canary.scale, 1.0) if isinstance(canary, GradientCanary) else 1.0,
            facts=facts,
            checks=[NoiseCheck(), SumRecord(), batches],
            **options,
        )

    @property
    def index(self) -> int:
        """The number of the current step."""
        return self.recorder.num_done

    def note_not_covered(self, sentence: str) -> None:
        """Add a sentence to what the recorder does not cover, once."""
        if sentence not in self.recorder.not_covered:
            self.recorder.not_covered += (sentence,)

    def record(self, step: ObservedStep) -> None:
        """Record a step, or end the recording if it is not finite."""
        if np.isfinite(step.scores).all() and np.isfinite(step.released).all():
            self.recorder.observe(step)
        else:
            self.end()

    def end(self) -> None:
        """Record no further step: the training run may continue, but its gradients reveal nothing more."""
        self.is_over = True
        overflow = ", or a norm overflows, as in half precision, for canaries of 1e6 clipping norms"
        gap = (
            f"steps from step {self.index} on are not audited: its gradients are not finite, so the training "
            f"run diverged{'' if self.index else overflow}"
        )
        self.recorder.not_covered += (gap,)
        warnings.warn(f"The audit ends: {gap}.", stacklevel=2)
