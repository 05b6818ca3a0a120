"""Declarations of findings that other packages produce: facts about a replayed step or about settings.

They need no statistics, so their tests live with the library that they read.
"""

from dpaudit.diagnostics._registry import declare

# Replayed steps: the same step is run on a batch and on a neighbor of it, with the same random numbers.

declare(
    "failing-step",
    "replay",
    tests="whether the step runs on a batch with one example more, less or replaced",
    matters="A step that refuses some batches cannot be the mechanism that is accounted for.",
    question="does the step require a fixed number of examples, which sampling does not have?",
)
declare(
    "release-count",
    "replay",
    tests="whether neighboring batches lead to equally many releases",
    matters="A release that is skipped for some batches reveals which batch was drawn.",
    question="are small, empty or unusual batches skipped?",
)
declare(
    "missing-clipping",
    "replay",
    tests="whether the gradients of a replayed step are clipped",
    matters="Without clipping, one example can change the release by any amount.",
    question="is backward() called on a loss that the private criterion did not compute?",
)
declare(
    "rows-per-example",
    "replay",
    tests="how many rows of gradients one example becomes",
    matters="Each row is clipped for itself, so an example of several rows contributes more than the norm.",
    question="does an example become several rows, by augmentation or as padding?",
)
declare(
    "coupled-examples",
    "replay",
    tests="whether gradients of other examples change with one example",
    matters="An example then contributes through the others, beyond its own clipped gradient.",
    question="is the loss or an input computed from the whole batch, as with class weights, a "
    "weighted mean, a contrastive loss or batch normalization, or are examples selected by comparison?",
)
declare(
    "batch-dependent-noise",
    "replay",
    tests="whether the noise changes with one example, although the random numbers are the same",
    matters="The accounting assumes noise that is independent of the data.",
    question="is the noise scaled by the batch size or by norms of its gradients, or is a "
    "gradient added with it?",
)
declare(
    "divisor",
    "replay",
    tests="whether the noisy sum is divided by a number that changes with one example",
    matters="The size of the batch is private under Poisson sampling, and the division has no noise.",
    question="is the sum divided by the number of examples in the batch instead of the expected number?",
)
declare(
    "sensitivity",
    "replay",
    tests="how far the sum before the noise moves if one example changes",
    matters="The noise is scaled for a change of at most the clipping norm.",
    question="is a gradient not clipped, clipped in another norm, added to the sum several times, or "
    "selected by comparison with others?",
)
declare(
    "gradient-after-noise",
    "replay",
    tests="whether the gradient of the update changes although the release is the same",
    matters="What is added after the noise is not protected by it.",
    question="is a gradient, such as one of an auxiliary loss, added after the noise?",
)
declare(
    "hyperparameters",
    "replay",
    tests="whether a setting of the optimizer changes although the release is the same",
    matters="A setting that is computed from the data leaks it without noise.",
    question="is a setting such as the learning rate computed from the loss, the gradients or "
    "the number of examples?",
)
declare(
    "optimizer-state",
    "replay",
    tests="whether the state of the optimizer changes although the release is the same",
    matters="Moments without noise reach the weights in later steps.",
    question="are moments computed from gradients without noise?",
)
declare(
    "buffers",
    "replay",
    tests="whether a buffer of the model changes although the release is the same",
    matters="Buffers are published with the model, without noise.",
    question="does the model keep statistics of its inputs, such as running means?",
)
declare(
    "weights",
    "replay",
    tests="whether a weight changes although the release is the same",
    matters="An update besides the private one has neither clipping nor noise.",
    question="are weights updated outside of the private optimizer, such as by a second one?",
)
declare(
    "other-state",
    "replay",
    tests="whether any other state that the step writes changes although the release is the same",
    matters="What is kept without noise may be published or used in later steps.",
    question="does another optimizer, average or counter use the examples or gradients without noise?",
)
declare(
    "next-release",
    "replay",
    tests="whether an example changes the release of the next step as well",
    matters="An example that contributes to steps in which it was not drawn is not accounted for there.",
    question="is a sum, a statistic or a queue of examples carried over to the next batch?",
)
declare(
    "non-finite-example",
    "replay",
    tests="what an example with a non-finite gradient does to the release",
    matters="A release that is not a number reveals that the example was in the batch.",
    question="is a non-finite gradient multiplied by its clipping factor instead of removed?",
)

# Settings of Opacus, read from the prepared training.

declare(
    "noise-multiplier",
    "settings",
    tests="whether the optimizer's noise multiplier is the one that is claimed and accounted for",
    matters="Epsilon is computed for the noise in the accounting, not for the noise in use.",
    question="was the noise multiplier changed after the accounting, by a scheduler or by hand?",
)
declare(
    "clipping-norm",
    "settings",
    tests="whether gradients are clipped to the norm for which the noise is scaled",
    matters="A larger norm than that of the noise makes the noise too small.",
    question="was max_grad_norm changed in the optimizer or in the model, but not in both?",
)
declare(
    "loader-rate",
    "settings",
    tests="whether the loader draws examples as often as the accountant assumes",
    matters="Examples that are drawn more often lose more privacy.",
    question="was the loader replaced after make_private, or its sampler changed?",
)
declare(
    "batch-sampler",
    "settings",
    tests="whether the loader has a Poisson sampler",
    matters="Amplification by Poisson sampling does not hold for shuffled epochs.",
    question="was make_private called with poisson_sampling=False, or its loader not used?",
)
declare(
    "repeated-entries",
    "settings",
    tests="whether the data set lists an example several times",
    matters="Each copy is drawn and clipped for itself, so that the example counts more than once.",
    question="is a class oversampled by listing its examples several times?",
)
declare(
    "accountant-steps",
    "settings",
    tests="whether the accountant knows all steps",
    matters="Steps that are not counted cost privacy all the same.",
    question="was the accountant's step hook replaced by another hook?",
)
declare(
    "accountant-noise",
    "settings",
    tests="whether the accountant knows the noise multiplier of each step",
    matters="Steps with less noise than accounted for cost more privacy.",
    question="does a scheduler change the noise without the accountant's knowledge?",
)
declare(
    "mixing-module",
    "settings",
    tests="whether a layer mixes the examples of a batch or keeps averages of them",
    matters="Per-example gradients are then not those of single examples.",
    question="should the layer be replaced, as by ModuleValidator.fix, or keep no averages?",
)
declare(
    "public-parameters",
    "settings",
    tests="whether another optimizer updates parameters of the model",
    matters="Its updates have neither clipping nor noise.",
    question="was only a part of the optimizers passed to make_private?",
)
declare(
    "private-criterion",
    "settings",
    tests="whether ghost clipping gets the criterion that make_private returned",
    matters="Another criterion does not clip.",
    question="is the original loss used instead of the one that make_private returned?",
)
declare(
    "loss-reduction",
    "settings",
    tests="whether the loss is reduced as make_private assumes, without weights of the batch",
    matters="Otherwise the gradient of an example depends on the others before it is clipped.",
    question="should the loss be the plain mean, as loss_reduction states?",
)
declare(
    "noise-seed",
    "settings",
    tests="whether the generator of the noise has a fixed or guessable seed",
    matters="Whoever knows the seed can subtract the noise.",
    question="was noise_generator seeded to make experiments reproducible?",
)
declare(
    "data-set-size",
    "settings",
    tests="whether the accounting has the number of examples of the data set",
    matters="The sample rate and a suitable delta follow from it.",
)
