"""Faults of clipping, noise and sampling, in the native engine."""

from __future__ import annotations

from functools import partial

from dpaudit.canaries import Dirac
from dpaudit.stats import ClopperPearson, Fixed
from dpaudit.training import faults
from dpaudit.zoo._entry import Entry
from dpaudit.zoo.specimens import LEAVES, NativeTraining, WholeTraining
from dpaudit.zoo.specimens._claim import EPSILON, noise_of

__all__ = ["NATIVE"]

_TRUE_EPSILON = 1.35  # of the training with too little noise: the paper sees it from 1.57 on
_RATIO = noise_of(_TRUE_EPSILON) / noise_of(EPSILON)

_native = partial(Entry, kind="native training")

NATIVE = (
    _native(
        name="clip-after-mean",
        public="Nasr et al. 2023, violation 1; several codes of federated learning",
        wrong="The averaged gradient is clipped, and not the gradient of each example.",
        specimen=NativeTraining(mechanism=faults.ClippedAfterMean, canary=Dirac(scale=30.0)),
    ),
    _native(
        name="noise-100-seeds",
        public="Nasr et al. 2023, violation 2",
        wrong="The noise of every step is drawn from one of 100 seeds.",
        specimen=NativeTraining(mechanism=faults.FewSeeds),
    ),
    _native(
        name="noise-too-small",
        public="Nasr et al. 2023, violation 3",
        wrong=f"The noise is made for epsilon = {_TRUE_EPSILON}, the claim is {EPSILON}.",
        specimen=NativeTraining(
            mechanism=partial(faults.NoiseTooSmall, factor=_RATIO),
            num_steps=500,
            num_canaries=1200,
            # bets are off by 0.07 after 500 steps, however many canaries there are
            inference=ClopperPearson(),
            threshold=Fixed(0.5),
        ),
    ),
    _native(
        name="seed-per-leaf",
        public="JAX issue 3646",
        wrong="One PRNG key makes the noise of every parameter, so that they have the same noise.",
        specimen=NativeTraining(mechanism=partial(faults.SameSeedForLeaves, leaves=LEAVES)),
    ),
    _native(
        name="seed-constant",
        public="TF Privacy, tree noise, commit 50673fe",
        wrong="The seed is the logarithm of the time, rounded down: the same in every training for decades.",
        specimen=NativeTraining(mechanism=faults.ConstantSeed, num_steps=150, num_runs=2),
    ),
    _native(
        name="closure-clean",
        public="Opacus issue 330",
        wrong="The optimizer calls the closure after the noise was added: what is released are clean sums.",
        specimen=NativeTraining(mechanism=faults.Noiseless),
    ),
    _native(
        name="silent-sgd",
        public="TF Privacy issue 72",
        wrong="The private path was never called: gradients are neither clipped nor noised.",
        specimen=NativeTraining(mechanism=faults.Silent),
    ),
    _native(
        name="raw-gradient-mixed",
        public="dayu11/Differentially-Private-Deep-Learning issue 7",
        wrong="The raw gradient was left where the private one is added.",
        specimen=NativeTraining(mechanism=faults.RawMeanMixed),
    ),
    _native(
        name="sum-mean",
        public="JAX Privacy issues 338 and 383; Tramer et al. 2022, arXiv:2202.12219",
        wrong="Noise that is made for the mean of the batch is added to its sum.",
        specimen=NativeTraining(mechanism=partial(faults.NoiseForTheMean, batch_size=50)),
    ),
    _native(
        name="accumulate-noise",
        public="Optax issues 515 and 527; dp-transformers issue 23",
        wrong="Each of 4 micro-steps draws the noise of a whole step; their noise is averaged, their "
        "gradients are added up.",
        specimen=NativeTraining(mechanism=faults.AveragedNoise),
    ),
    _native(
        name="unnoised-coordinates",
        public="NVFlare issue 343",
        wrong="Some coordinates, 64 of 1,210 here, are released without noise.",
        specimen=NativeTraining(mechanism=partial(faults.UnnoisedCoordinates, count=64)),
    ),
    _native(
        name="empty-batch",
        public="Opacus issues 161, 164, 530 and 631",
        wrong="A step whose batch is empty is released without noise.",
        specimen=NativeTraining(
            mechanism=faults.NoNoiseWhenEmpty, num_canaries=1, num_examples=100, sample_rate=0.01
        ),
    ),
    _native(
        name="not-poisson",
        public="Opacus issue 338; JAX Privacy issue 84; TF Privacy issue 483",
        wrong="Batches of shuffled epochs are accounted as if they were Poisson-sampled.",
        specimen=WholeTraining(faults.ShuffledBatches),
    ),
)
