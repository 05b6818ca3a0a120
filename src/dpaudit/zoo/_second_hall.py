"""The second hall of the zoo: faults that only tests of noise, sums and batches, lints or a replay reveal.

Every entry is observed with default settings. Entries are grouped by family; where no public report about
training code is known, ``public`` says so and names the text that describes the fault.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module

from dpaudit.zoo import _observed_steps as steps
from dpaudit.zoo._entry import Entry, Evidence, Specimen
from dpaudit.zoo._observed_steps import ObservedStep, with_noise

_GUIDE = "JAX Privacy, guide to pitfalls of DP training"


def _loop(name: str) -> Specimen:
    """Return a specimen with Opacus, which is imported only when it runs."""

    def specimen(is_broken: bool, seed: int) -> Evidence:
        found: Specimen = getattr(import_module("dpaudit.zoo._opacus_loops"), name)
        return found(is_broken, seed)

    return specimen


_few_numbers = partial(Entry, family="noise from few numbers")
_no_tails = partial(Entry, family="noise without tails", kind="plain step")
_shared = partial(Entry, family="shared noise", kind="plain step")
_by_data = partial(Entry, family="noise that depends on the data", kind="plain step")
_clipping = partial(Entry, family="clipping of another norm", kind="plain step")
_sums = partial(Entry, family="sums of other things")
_sampling = partial(Entry, family="sampling")
_non_finite = partial(Entry, family="non-finite gradients", kind="Opacus, replay")
_size = partial(Entry, family="number of examples")
_beside = partial(Entry, family="beside the release", kind="Opacus, replay")

SECOND_HALL: tuple[Entry, ...] = (
    _few_numbers(
        name="noise-half-precision",
        public="JAX Privacy, guide to mixed precision; attacks: Mironov 2012, Haney et al. 2022 "
        "(arXiv:2207.13793)",
        wrong="Noise is drawn in half precision and added to a sum in single precision, whose low bits stay "
        "readable.",
        fix="Draw noise and sum gradients in single precision, and round only the release.",
        kind="plain step",
        specimen=ObservedStep(broken=with_noise(steps.half_precision)),
    ),
    _few_numbers(
        name="noise-grid",
        public="Opacus issue 616; OpenDP issue 414; diffprivlib issue 94",
        wrong="The noise is rounded to a grid, but the sum is not: the release modulo the grid is the sum.",
        fix="Round the sum to the same grid before discrete noise is added.",
        kind="plain step",
        specimen=ObservedStep(broken=with_noise(steps.fixed_point)),
    ),
    _few_numbers(
        name="noise-table",
        public="no report about training code; noise with few values is attacked as by Mironov 2012",
        wrong="Noise is looked up in a precomputed table of 4,096 normal numbers.",
        fix="Draw the noise of every step from a generator.",
        kind="plain step",
        specimen=ObservedStep(broken=with_noise(steps.from_table)),
    ),
    _few_numbers(
        name="noise-box-muller",
        public="Jin et al. 2022 (arXiv:2112.05307); Opacus pull request 260",
        wrong="Normal numbers are computed in pairs from uniform numbers of 16 bits.",
        fix="Use uniform numbers with as many bits as the data type has.",
        kind="plain step",
        specimen=ObservedStep(broken=with_noise(steps.box_muller)),
    ),
    _few_numbers(
        name="noise-seed-in-code",
        public="Fed-BioMed issue 973; Optax pull request 1167",
        wrong="The generator of the noise is seeded with a constant, so that anyone can subtract the noise.",
        fix="Leave the generator unseeded, or seed it from the operating system.",
        kind="Opacus, settings",
        specimen=_loop("seed_in_code"),
    ),
    _no_tails(
        name="noise-truncated",
        public="no report about training code; OpenDP issue 2375 states the delta that truncation costs",
        wrong="Numbers beyond 3 standard deviations are drawn again, so that large releases prove presence.",
        fix="Use normal noise, or add the probability of the tails to delta.",
        specimen=ObservedStep(broken=with_noise(steps.truncated)),
    ),
    _no_tails(
        name="noise-twelve-uniforms",
        public="no report about training code; a classical approximation of normal numbers",
        wrong="The sum of 12 uniform numbers stands in for a normal number.",
        fix="Draw normal numbers.",
        specimen=ObservedStep(broken=with_noise(steps.sum_of_uniforms), num_steps=500),
    ),
    _no_tails(
        name="noise-uniform",
        public="Fed-BioMed issue 1443, item 1",
        wrong="`rand_like` is called instead of `randn_like`: noise is uniform between 0 and 1.",
        fix="Draw normal numbers.",
        specimen=ObservedStep(broken=with_noise(steps.uniform)),
    ),
    _no_tails(
        name="noise-laplace",
        public="smartnoise-sdk issue 204, the other way around",
        wrong="Laplace noise of the right variance is accounted for as normal noise.",
        fix="Account for the distribution that is drawn.",
        specimen=ObservedStep(broken=with_noise(steps.laplace)),
    ),
    _shared(
        name="noise-forked",
        public="OpenDP issue 2934",
        wrong="Two forked workers inherit the same state of the generator, and each draws half of the noise.",
        fix="Seed the generator of each worker after the fork.",
        specimen=ObservedStep(broken=with_noise(steps.forked)),
    ),
    _shared(
        name="seed-plus-index",
        public="NumPy, parallel random number generation",
        wrong="The seed of a parameter is seed + step + number of the parameter, so that noise returns in a "
        "later step at another parameter.",
        fix="Derive seeds with `SeedSequence` or `fold_in`.",
        specimen=ObservedStep(broken=steps.seed_plus_index),
    ),
    _shared(
        name="noise-low-rank",
        public="no report; described as a risk of training in subspaces, as Yu et al. 2021 "
        "(arXiv:2102.12677) do correctly",
        wrong="Noise is drawn in a subspace of 50 dimensions, but the sum has 600.",
        fix="Project the sum to the same subspace, or add noise to all coordinates.",
        specimen=ObservedStep(broken=steps.low_rank),
    ),
    _by_data(
        name="noise-by-largest-norm",
        public="asked for in Opacus issue 152 and TF Privacy issue 157",
        wrong="The noise is scaled by the largest norm in the batch, which is private.",
        fix="Scale the noise by the clipping norm.",
        specimen=ObservedStep(broken=steps.noise_by_largest_norm),
    ),
    _by_data(
        name="noise-by-batch-size",
        public="asked for in TF Privacy issue 88",
        wrong="The noise is scaled by the square root of the number of examples that were drawn.",
        fix="Scale the noise by the clipping norm alone.",
        specimen=ObservedStep(broken=steps.noise_by_batch_size),
    ),
    _clipping(
        name="clip-by-value",
        public="Truxify issue 3844",
        wrong="Each number of a gradient is limited to the clipping norm, instead of the norm.",
        fix="Scale each gradient by its Euclidean norm.",
        specimen=ObservedStep(broken=steps.clip_by_value),
    ),
    _clipping(
        name="clip-without-biases",
        public="Opacus pull request 729",
        wrong="Parameters that train are missing from the norm: a gradient in a bias is not clipped.",
        fix="Compute the norm over all parameters that train.",
        specimen=ObservedStep(broken=steps.clip_without_biases),
    ),
    _clipping(
        name="clip-overflow",
        public="FairScale pull request 263",
        wrong="The norm overflows in half precision, and a gradient without a finite norm is not clipped.",
        fix="Compute norms in single precision, and drop gradients whose norm is not finite.",
        specimen=ObservedStep(broken=steps.clip_unless_overflow),
    ),
    _clipping(
        name="clip-each-leaf",
        public="JAX Privacy pull request 338 and issue 385",
        wrong="Every leaf is clipped to the full norm, and the documented sensitivity is that of one leaf.",
        fix="Scale the noise by the sensitivity that the clipped function reports.",
        specimen=ObservedStep(broken=steps.clip_each_leaf),
    ),
    _sums(
        name="sum-not-cleared",
        public="Opacus issues 54, 93 and 143",
        wrong="The sum of the last step is not cleared, so that every example counts in two steps.",
        fix="Clear the sum after each release.",
        kind="plain step",
        specimen=ObservedStep(broken=steps.sum_not_cleared),
    ),
    _sums(
        name="shortcut-after-noise",
        public="DP-Forward issue 4",
        wrong="A residual connection adds half of the noiseless value to the noisy one.",
        fix="Compute everything that is published from the release.",
        kind="plain step",
        specimen=ObservedStep(broken=steps.shortcut_after_noise),
    ),
    _sums(
        name="ghost-plain-loss",
        public="Opacus pull request 668",
        wrong="With ghost clipping, the loop uses the original loss, whose backward pass clips nothing.",
        fix="Use the criterion that `make_private` returns.",
        kind="Opacus",
        specimen=_loop("plain_loss"),
    ),
    _sums(
        name="ghost-adaptive",
        public="no report; Opacus 1.6.0, `utils/adaptive_clipping/adaptive_clipping_utils.py`, lines 117 and "
        "222",
        wrong="Adaptive ghost clipping multiplies the mean loss by the clipping coefficients of examples, "
        "so that no example is clipped.",
        fix='Compute the losses of single examples (`reduction="none"`) before they are multiplied.',
        kind="Opacus",
        specimen=_loop("adaptive_ghost"),
    ),
    _sums(
        name="rows-per-example",
        public="Opacus issues 455 and 461",
        wrong="An example passes through the model twice, as two rows that are clipped separately.",
        fix="Average the gradients of all views of an example before clipping.",
        kind="Opacus",
        specimen=_loop("repeated_forward"),
    ),
    _sampling(
        name="weighted-sampler",
        public="Opacus issues 600 and 813",
        wrong="A weighted sampler draws with replacement, but Poisson sampling is accounted for.",
        fix="Use the loader that `make_private` returns, and weight the loss by a public number instead.",
        kind="Opacus",
        specimen=_loop("weighted_sampler"),
    ),
    _sampling(
        name="same-order",
        public="Spijkervet/SimCLR pull request 26; Annamalai et al. 2024 and Chua et al. 2024 on shuffling",
        wrong="The data are shuffled once, and every epoch has the same batches.",
        fix="Use the loader that `make_private` returns.",
        kind="Opacus",
        specimen=_loop("same_order"),
    ),
    _sampling(
        name="two-batches-per-step",
        public="JAX Privacy issue 234; Opacus pull request 219",
        wrong="Two Poisson batches are summed in each step, but the rate of one is accounted for.",
        fix="Account for the rate of all batches of a step, or split one batch with `BatchMemoryManager`.",
        kind="Opacus",
        specimen=_loop("two_batches"),
    ),
    _sampling(
        name="poisson-off",
        public="Opacus issue 80 and pull request 128; private-transformers issue 7",
        wrong="`make_private` is called with `poisson_sampling=False`, and its accountant assumes Poisson "
        "sampling.",
        fix="Leave `poisson_sampling` on.",
        kind="Opacus, settings",
        specimen=_loop("fixed_batches"),
    ),
    _sampling(
        name="oversampled-class",
        public="PyTorch forum, category Opacus: a question about oversampling",
        wrong="Examples of a rare class are listed three times, so that each moves the sum three times.",
        fix="List every example once.",
        kind="Opacus, settings",
        specimen=_loop("oversampled_class"),
    ),
    _non_finite(
        name="non-finite-gradient",
        public=f"Opacus 1.6.0, as released; {_GUIDE}",
        wrong="A non-finite gradient times its clipping factor makes the whole release NaN, which reveals "
        "the example.",
        fix="Remove non-finite gradients before clipping, as `nan_safe=True` does in JAX Privacy.",
        specimen=_loop("non_finite_gradient"),
    ),
    _non_finite(
        name="skip-if-non-finite",
        public=f"loss scaling, requested in Opacus issue 377; {_GUIDE}",
        wrong="The step is skipped if the loss is not finite, which reveals the example that causes it.",
        fix="Release noise in every step.",
        specimen=_loop("skipped_if_non_finite"),
    ),
    _size(
        name="divisor-from-size",
        public="Opacus 1.6.0, as released; Opacus issues 571 and 819, pull request 838",
        wrong="Sample rate and divisor are computed from the number of examples, and both change with one "
        "more example.",
        fix="Set rate and divisor to public numbers.",
        kind="Opacus, settings",
        specimen=_loop("size_in_divisor"),
    ),
    _size(
        name="divided-by-batch",
        public=f"asked for in Opacus issue 420; {_GUIDE}",
        wrong="The noisy sum is divided by the number of examples that were drawn, which is private.",
        fix="Divide by the expected number.",
        kind="Opacus, replay",
        specimen=_loop("actual_batch_size"),
    ),
    _size(
        name="small-batch-skipped",
        public=f"{_GUIDE}; Opacus issues 161 and 164",
        wrong="A batch that is smaller than usual is skipped, so that a release shows its size.",
        fix="Release noise for every batch, even an empty one.",
        kind="Opacus, replay",
        specimen=_loop("small_batches_skipped"),
    ),
    _beside(
        name="class-weights",
        public=f"no single report; {_GUIDE}: operations across examples",
        wrong="Class weights are computed from the batch, so that an example changes the gradients of all.",
        fix="Use public class weights.",
        specimen=_loop("class_weights"),
    ),
    _beside(
        name="contrastive-loss",
        public="Kong et al. 2023 (arXiv:2310.03104)",
        wrong="A contrastive loss compares all pairs of examples, so that an example changes the gradients "
        "of all.",
        fix="Bound the sensitivity of the whole loss, or use a loss of single examples.",
        specimen=_loop("contrastive_loss"),
    ),
    _beside(
        name="running-statistics",
        public="Opacus issue 472",
        wrong="A running mean of the inputs is saved with the model, without noise.",
        fix="Freeze the statistics, or use a normalization without them.",
        specimen=_loop("running_statistics"),
    ),
    _beside(
        name="rate-from-loss",
        public=f"{_GUIDE}: auxiliary information",
        wrong="The learning rate follows the training loss, which is private.",
        fix="Use a fixed schedule, or a loss on public data.",
        specimen=_loop("rate_from_loss"),
    ),
    _beside(
        name="raw-moments",
        public="asked about in SPRINT_gan issue 5",
        wrong="The moments of an adaptive optimizer are computed from sums without noise.",
        fix="Compute moments from the release.",
        specimen=_loop("raw_moments"),
    ),
    _beside(
        name="second-optimizer",
        public="Opacus issue 225, the other way around",
        wrong="A second optimizer trains a layer without clipping and noise.",
        fix="Pass all parameters that train to `make_private`.",
        specimen=_loop("second_optimizer"),
    ),
)
