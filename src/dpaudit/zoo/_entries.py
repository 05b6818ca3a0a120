"""All entries of the zoo, in two halls. Add new ones to ``SECOND_HALL``, in ``_second_hall``.

Specimens of the first hall are grouped by kind: training runs of the native engine in ``_native`` (their
faulty mechanisms in ``dpaudit.training.faults``), steps on per-example gradients in ``_steps``, and Opacus in
``_opacus`` and ``_opacus_distributed``, which are imported only when one of their entries is run.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module

from dpaudit.canaries import Dirac
from dpaudit.stats import ClopperPearson, Fixed
from dpaudit.training import faults
from dpaudit.zoo._entry import EPSILON, Entry, Evidence, Specimen, noise_of
from dpaudit.zoo._native import LEAVES, NativeTraining, WholeTraining
from dpaudit.zoo._second_hall import SECOND_HALL
from dpaudit.zoo._steps import (
    PlainStep,
    batch_norm,
    calibration,
    clipped_by_layer,
    clipped_by_parameter_and_noised_twice,
    floor_batch,
    microbatch,
)

_TRUE_EPSILON = 1.35  # true epsilon with too little noise; the paper detects 1.57 and above
_RATIO = noise_of(_TRUE_EPSILON) / noise_of(EPSILON)


def _lazy(module: str, name: str) -> Specimen:
    """Return a specimen whose module is imported only when it runs."""

    def specimen(is_broken: bool, seed: int) -> Evidence:
        found: Specimen = getattr(import_module(f"dpaudit.zoo.{module}"), name)
        return found(is_broken, seed)

    return specimen


_opacus = partial(_lazy, "_opacus")
_distributed = partial(_lazy, "_opacus_distributed")
_native = partial(Entry, kind="native training")

FIRST_HALL: tuple[Entry, ...] = (
    # clipping, noise and sampling, in the native engine
    _native(
        name="clip-after-mean",
        public="Nasr et al. 2023, violation 1; several federated learning codebases",
        wrong="The averaged gradient is clipped instead of each per-example gradient.",
        fix="Clip the gradient of each example, then add them.",
        specimen=NativeTraining(mechanism=faults.ClippedAfterMean, canary=Dirac(scale=30.0)),
    ),
    _native(
        name="noise-100-seeds",
        public="Nasr et al. 2023, violation 2",
        wrong="The noise of every step is drawn from one of 100 seeds.",
        fix="Draw all noise from one generator that is seeded once.",
        specimen=NativeTraining(mechanism=faults.FewSeeds),
    ),
    _native(
        name="noise-too-small",
        public="Nasr et al. 2023, violation 3",
        wrong=f"The noise is calibrated to epsilon = {_TRUE_EPSILON}, but the claim is {EPSILON}.",
        fix="Calibrate the noise to the epsilon that is claimed.",
        specimen=NativeTraining(
            mechanism=partial(faults.NoiseTooSmall, factor=_RATIO),
            num_steps=500,
            num_canaries=1200,
            # the betting bound is 0.07 too low after 500 steps, whatever the number of canaries
            inference=ClopperPearson(),
            threshold=Fixed(0.5),
        ),
    ),
    _native(
        name="seed-per-leaf",
        public="JAX issue 3646",
        wrong="The same PRNG key generates the noise of every parameter, so that all have the same noise.",
        fix="Split the key, one part for each parameter.",
        specimen=NativeTraining(mechanism=partial(faults.SameSeedForLeaves, leaves=LEAVES)),
    ),
    _native(
        name="seed-constant",
        public="TF Privacy, tree noise, commit 50673fe",
        wrong="The seed is the logarithm of the time, rounded down, which stays the same for decades.",
        fix="Seed the generator from the operating system.",
        specimen=NativeTraining(mechanism=faults.ConstantSeed, num_steps=150, num_runs=2),
    ),
    _native(
        name="closure-clean",
        public="Opacus issue 330",
        wrong="The optimizer calls the closure after noise is added, so that noiseless sums are released.",
        fix="Call the closure before noise is added.",
        specimen=NativeTraining(mechanism=faults.Noiseless),
    ),
    _native(
        name="silent-sgd",
        public="TF Privacy issue 72",
        wrong="The private code path is never called: gradients are neither clipped nor noised.",
        fix="Call the private code path, and test that it is called.",
        specimen=NativeTraining(mechanism=faults.Silent),
    ),
    _native(
        name="raw-gradient-mixed",
        public="dayu11/Differentially-Private-Deep-Learning issue 7",
        wrong="The raw gradient is not cleared before the private one is added to it.",
        fix="Clear the raw gradient before the private one is stored.",
        specimen=NativeTraining(mechanism=faults.RawMeanMixed),
    ),
    _native(
        name="sum-mean",
        public="JAX Privacy issues 338 and 383; Tramer et al. 2022, arXiv:2202.12219",
        wrong="Noise calibrated to the mean of the batch is added to its sum.",
        fix="Add noise to the sum, then divide both.",
        specimen=NativeTraining(mechanism=partial(faults.NoiseForTheMean, batch_size=50)),
    ),
    _native(
        name="accumulate-noise",
        public="Optax issues 515 and 527; dp-transformers issue 23",
        wrong="Each of 4 micro-steps draws the noise of a full step; their noise is averaged, but their "
        "gradients are summed.",
        fix="Sum the micro-steps, and draw noise once.",
        specimen=NativeTraining(mechanism=faults.AveragedNoise),
    ),
    _native(
        name="unnoised-coordinates",
        public="NVFlare issue 343",
        wrong="Some coordinates (here 64 of 1,210) are released without noise.",
        fix="Add noise to every coordinate that is released.",
        specimen=NativeTraining(mechanism=partial(faults.UnnoisedCoordinates, count=64)),
    ),
    _native(
        name="empty-batch",
        public="Opacus issues 161, 164, 530 and 631",
        wrong="A step with an empty batch is released without noise.",
        fix="Release noise for an empty batch, too.",
        specimen=NativeTraining(
            mechanism=faults.NoNoiseWhenEmpty, num_canaries=1, num_examples=100, sample_rate=0.01
        ),
    ),
    _native(
        name="not-poisson",
        public="Opacus issue 338; JAX Privacy issue 84; TF Privacy issue 483",
        wrong="Batches from shuffled epochs are accounted for as if they were Poisson-sampled.",
        fix="Draw each example independently in every step, or account for shuffling.",
        specimen=WholeTraining(faults.ShuffledBatches),
    ),
    # steps on gradients or on a batch, and noise calibration
    Entry(
        name="per-layer-clip",
        public="Opacus issue 202",
        wrong="Every layer is clipped to the full norm that the noise is calibrated to, not to its share.",
        kind="plain step",
        fix="Clip every layer to its share of the norm, or scale the noise by the norm of all shares.",
        specimen=PlainStep(broken=clipped_by_layer, leaves=(64,) * 4),
    ),
    Entry(
        name="double-clip-per-parameter",
        public="Fed-BioMed issue 1443",
        wrong="Every parameter is clipped separately; noise is added twice, which is still not enough.",
        kind="plain step",
        fix="Clip by the norm over all parameters, and add noise once.",
        specimen=PlainStep(broken=clipped_by_parameter_and_noised_twice, leaves=(16,) * 16),
    ),
    Entry(
        name="microbatch",
        public="TF Privacy issues 81, 135 and 620",
        wrong="The mean of each microbatch is clipped, so that one example can flip the sign of another.",
        kind="plain step, replay (TF Privacy itself: tests_tensorflow)",
        fix="Use microbatches of one example, or account for twice the sensitivity.",
        specimen=microbatch,
    ),
    Entry(
        name="floor-batch",
        public="Opacus issues 571 and 819",
        wrong="The sum is divided by rate x number of examples, rounded down, which reveals that number.",
        kind="plain step, replay",
        fix="Divide by a public number.",
        specimen=floor_batch,
    ),
    Entry(
        name="batch-norm",
        public="Opacus issues 319 and 472",
        wrong="Batch normalization makes the gradient of every example depend on all others.",
        kind="plain step, replay",
        fix="Use a normalization within each example.",
        specimen=batch_norm,
    ),
    Entry(
        name="sigma-search",
        public="Opacus issue 346; TF Privacy issue 227",
        wrong="The search for a noise multiplier returns one whose epsilon exceeds the target.",
        kind="accounting",
        fix="Return the end of the interval with more noise.",
        specimen=calibration,
    ),
    # Opacus itself
    Entry(
        name="ghost-default-clip",
        public="Opacus issue 664",
        wrong="With ghost clipping, the model clips at its default norm of 1, whatever norm is requested.",
        kind="Opacus",
        fix="Pass the clipping norm to the model.",
        specimen=_opacus("ghost_default_clip"),
    ),
    Entry(
        name="ghost-bias-norm",
        public="Opacus issue 751",
        wrong="Ghost clipping computes the wrong gradient norm for a bias that is used at many positions.",
        kind="Opacus, replay",
        fix="Sum the bias gradient over positions before its norm is taken.",
        specimen=_opacus("ghost_bias_norm"),
    ),
    Entry(
        name="ghost-accumulate",
        public="Opacus issue 707",
        wrong="With virtual batches, the next gradient overwrites the memory of the summed gradient.",
        kind="Opacus, replay",
        fix="Copy the gradient before it is added to the sum.",
        specimen=_opacus("ghost_accumulate"),
    ),
    Entry(
        name="tied-weights",
        public="Opacus issues 413 and 417",
        wrong="Each use of a tied weight is treated as a separate example and clipped as such.",
        kind="Opacus, replay",
        fix="Add the gradients of all uses before clipping.",
        specimen=_opacus("tied_weights"),
    ),
    Entry(
        name="ddp-batch",
        public="Opacus issue 347",
        wrong="The expected batch size is not divided by the number of processes, whose results are "
        "averaged: the released mean has half of its noise and half of its sum.",
        kind="Opacus, two processes",
        fix="Divide the expected batch size by the number of processes.",
        specimen=_distributed("ddp_batch"),
    ),
    Entry(
        name="ddp-rank-noise",
        public="Opacus issue 191 and pull request 196",
        wrong="Every process adds the claimed noise divided by the number of processes, which is too little "
        "for the sum; or each adds enough, but from the same seed.",
        kind="Opacus, two processes",
        fix="Add the noise on one process, or independent shares whose variances add up to it.",
        specimen=_distributed("ddp_rank_noise"),
    ),
)

ENTRIES: tuple[Entry, ...] = *FIRST_HALL, *SECOND_HALL
