"""Faults of Opacus in Opacus itself; it is imported when one of them is run."""

from __future__ import annotations

from functools import partial
from importlib import import_module

from dpaudit.zoo._entry import Entry, Specimen
from dpaudit.zoo._evidence import Evidence

__all__ = ["OPACUS"]


def _later(module: str, name: str) -> Specimen:
    """A specimen of a module that is not loaded before it is needed."""

    def specimen(is_broken: bool, seed: int) -> Evidence:
        found: Specimen = getattr(import_module(f"dpaudit.zoo.specimens.{module}"), name)
        return found(is_broken, seed)

    return specimen


_alone = partial(_later, "_opacus")
_together = partial(_later, "_processes")

OPACUS = (
    Entry(
        name="ghost-default-clip",
        public="Opacus issue 664",
        wrong="With ghost clipping the model clips at its default of 1, whatever norm was asked for.",
        kind="Opacus",
        specimen=_alone("ghost_default_clip"),
    ),
    Entry(
        name="ghost-bias-norm",
        public="Opacus issue 751",
        wrong="Ghost clipping finds a wrong norm of the gradient of a bias that is used at many places.",
        kind="Opacus, replay",
        specimen=_alone("ghost_bias_norm"),
    ),
    Entry(
        name="ghost-accumulate",
        public="Opacus issue 707",
        wrong="With virtual batches the summed gradient is the place where the next one is written.",
        kind="Opacus, replay",
        specimen=_alone("ghost_accumulate"),
    ),
    Entry(
        name="tied-weights",
        public="Opacus issues 413 and 417",
        wrong="Each use of a tied weight counts as an example of its own, and is clipped as one.",
        kind="Opacus, replay",
        specimen=_alone("tied_weights"),
    ),
    Entry(
        name="ddp-batch",
        public="Opacus issue 347",
        wrong="The expected batch size is not divided by the number of processes, which are averaged: the "
        "released mean has half of its noise, and half of its sum.",
        kind="Opacus, two processes",
        specimen=_together("ddp_batch"),
    ),
    Entry(
        name="ddp-rank-noise",
        public="Opacus issue 191 and pull request 196",
        wrong="Every process adds noise of the claimed size over their number, so that the sum has too "
        "little; or each adds enough, from the same seed.",
        kind="Opacus, two processes",
        specimen=_together("ddp_rank_noise"),
    ),
)
