"""Faults of the step itself, in the native engine."""

from __future__ import annotations

from functools import partial

from dpaudit.canaries import Dirac
from dpaudit.training import faults
from dpaudit.zoo._entry import Entry
from dpaudit.zoo.specimens._claim import EPSILON, noise_of
from dpaudit.zoo.specimens._native import LEAVES, NativeTraining

__all__ = ["NATIVE"]

_KIND = "native training"
_TRUE_EPSILON = 1.35  # of the training with too little noise: the paper sees it from 1.57 on
_RATIO = noise_of(_TRUE_EPSILON) / noise_of(EPSILON)

NATIVE = (
    Entry(
        name="clip-after-mean",
        public="Nasr et al. 2023, violation 1",
        wrong="The averaged gradient is clipped, and not the gradient of each example.",
        kind=_KIND,
        specimen=NativeTraining(mechanism=faults.ClippedAfterMean, canary=Dirac(scale=30.0)),
    ),
    Entry(
        name="noise-100-seeds",
        public="Nasr et al. 2023, violation 2",
        wrong="The noise of every step is drawn from one of 100 seeds.",
        kind=_KIND,
        specimen=NativeTraining(mechanism=faults.FewSeeds),
    ),
    Entry(
        name="noise-too-small",
        public="Nasr et al. 2023, violation 3",
        wrong=f"The noise is made for epsilon = {_TRUE_EPSILON}, the claim is {EPSILON}.",
        kind=_KIND,
        specimen=NativeTraining(
            mechanism=partial(faults.NoiseTooSmall, factor=_RATIO), num_steps=500, num_canaries=1024
        ),
    ),
    Entry(
        name="seed-per-leaf",
        public="JAX issue 3646",
        wrong="One PRNG key makes the noise of every parameter, so that they have the same noise.",
        kind=_KIND,
        specimen=NativeTraining(mechanism=partial(faults.SameSeedForLeaves, leaves=LEAVES)),
    ),
)
