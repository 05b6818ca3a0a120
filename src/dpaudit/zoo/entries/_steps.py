"""Faults of a step on gradients, on a batch, or of the search for its noise."""

from __future__ import annotations

from dpaudit.zoo._entry import Entry
from dpaudit.zoo.specimens import (
    PlainStep,
    batch_norm,
    calibration,
    clipped_by_layer,
    clipped_by_parameter_and_noised_twice,
    floor_batch,
    microbatch,
)

__all__ = ["STEPS"]

STEPS = (
    Entry(
        name="per-layer-clip",
        public="Opacus issue 202",
        wrong="Every layer is clipped to the norm that the noise is made for, instead of a share of it.",
        kind="plain step",
        specimen=PlainStep(broken=clipped_by_layer, leaves=(64,) * 4),
    ),
    Entry(
        name="double-clip-per-parameter",
        public="Fed-BioMed issue 1443",
        wrong="Every parameter is clipped by itself, and noise is added twice, which is not enough.",
        kind="plain step",
        specimen=PlainStep(broken=clipped_by_parameter_and_noised_twice, leaves=(16,) * 16),
    ),
    Entry(
        name="microbatch",
        public="TF Privacy issues 81, 135 and 620",
        wrong="The mean of a microbatch is clipped, so that one example can turn the sign of another.",
        kind="plain step, replay (TF Privacy itself: tests_tensorflow)",
        specimen=microbatch,
    ),
    Entry(
        name="floor-batch",
        public="Opacus issues 571 and 819",
        wrong="The sum is divided by the rounded sample rate x number of examples, which tells of the data.",
        kind="plain step, replay",
        specimen=floor_batch,
    ),
    Entry(
        name="batch-norm",
        public="Opacus issues 319 and 472",
        wrong="Batch normalization makes the gradient of every example depend on all others.",
        kind="plain step, replay",
        specimen=batch_norm,
    ),
    Entry(
        name="sigma-search",
        public="Opacus issue 346; TF Privacy issue 227",
        wrong="The search for a noise multiplier returns one with more epsilon than was asked for.",
        kind="accounting",
        specimen=calibration,
    ),
)
