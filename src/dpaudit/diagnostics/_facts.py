"""Findings that need no statistics and are produced elsewhere: facts about replayed steps, updates, settings.

They need no statistics, so their tests live with the library that they read. Each has what is tested, why it
matters, and a question to the developer. A fourth text makes it *to check*: the call that decides a fact
which a correct training run may have.
"""

# The same step is run on a batch and on a neighbor of it, with the same random numbers.
REPLAYED = {
    "failing-step": (
        "whether the step runs on a batch with one example more, less or replaced",
        "A step that refuses some batches cannot be the mechanism that is accounted for.",
        "does the step require a fixed number of examples, which sampling does not have?",
    ),
    "release-count": (
        "whether neighboring batches lead to equally many releases",
        "A release that is skipped for some batches reveals which batch was drawn.",
        "are small, empty or unusual batches skipped?",
    ),
    "missing-clipping": (
        "whether the gradients of a replayed step are clipped",
        "Without clipping, one example can change the release by any amount.",
        "is backward() called on a loss that the private criterion did not compute?",
    ),
    "rows-per-example": (
        "how many rows of gradients one example becomes",
        "Each row is clipped for itself, so an example of several rows contributes more than the norm.",
        "does an example become several rows, by augmentation or as padding?",
    ),
    "coupled-examples": (
        "whether gradients of other examples change with one example",
        "An example then contributes through the others, beyond its own clipped gradient.",
        "is the loss or an input computed from the whole batch, as with class weights, a weighted mean, "
        "a contrastive loss or batch normalization, or are examples selected by comparison?",
    ),
    "batch-dependent-noise": (
        "whether the noise changes with one example, although the random numbers are the same",
        "The accounting assumes noise that is independent of the data.",
        "is the noise scaled by the batch size or by norms of its gradients, or is a gradient added with it?",
    ),
    "divisor": (
        "whether the noisy sum is divided by a number that changes with one example",
        "The size of the batch is private under Poisson sampling, and the division has no noise.",
        "is the sum divided by the number of examples in the batch instead of the expected number?",
    ),
    "sensitivity": (
        "how far the sum before the noise moves if one example changes",
        "The noise is scaled for a change of at most the clipping norm.",
        "is a gradient not clipped, clipped in another norm, added to the sum several times, or selected"
        " by comparison with others?",
    ),
    "gradient-after-noise": (
        "whether the gradient of the update changes although the release is the same",
        "What is added after the noise is not protected by it.",
        "is a gradient, such as one of an auxiliary loss, added after the noise?",
    ),
    "hyperparameters": (
        "whether a setting of the optimizer changes although the release is the same",
        "A setting that is computed from the data leaks it without noise.",
        "is a setting such as the learning rate computed from the loss, the gradients or the number of "
        "examples?",
    ),
    "optimizer-state": (
        "whether the state of the optimizer changes although the release is the same",
        "Moments without noise reach the weights in later steps.",
        "are moments computed from gradients without noise?",
    ),
    "buffers": (
        "whether a buffer of the model changes although the release is the same",
        "Buffers are published with the model, without noise.",
        "does the model keep statistics of its inputs, such as running means?",
    ),
    "weights": (
        "whether a weight changes although the release is the same",
        "An update besides the private one has neither clipping nor noise.",
        "are weights updated outside of the private optimizer, such as by a second one?",
    ),
    "other-state": (
        "whether any other state that the step writes changes although the release is the same",
        "What is kept without noise may be published or used in later steps.",
        "does another optimizer, average or counter use the examples or gradients without noise?",
    ),
    "next-release": (
        "whether an example changes the release of the next step as well",
        "An example that contributes to steps in which it was not drawn is not accounted for there.",
        "is a sum, a statistic or a queue of examples carried over to the next batch?",
    ),
    "non-finite-example": (
        "what an example with a non-finite gradient does to the release",
        "A release that is not a number reveals that the example was in the batch.",
        "is a non-finite gradient multiplied by its clipping factor instead of removed?",
    ),
}

# What happens to weights between one release and the next.
UPDATED = {
    "outside-update": (
        "whether weights change between an update and the next release",
        "A change that is computed from data has neither clipping nor noise; decay, averaging or clipping of "
        "weights by hand is correct.",
        "does another optimizer, a hook, the forward pass or your loop change weights?",
        "recorder.replay(train_step)",
    ),
    "update-by-sum": (
        "whether the update of an own optimizer, repeated with the same release, changes with sums and rows",
        "What an update takes from gradients without noise is published with the weights.",
        "does the optimizer mask or scale its update by p.summed_grad or p.grad_sample?",
    ),
}

# Settings of Opacus, read from the prepared training, and of the claim itself.
PREPARED = {
    "claimed-epsilon": (
        "whether the claimed epsilon is at least that of the claimed parameters",
        "The parameters that are claimed lose more privacy than the figure that is claimed.",
        "was epsilon computed for other steps, or another sample rate, delta or noise multiplier?",
    ),
    "rounded-epsilon": (
        "whether the claimed epsilon is that of the claimed parameters, rounded down",
        "A figure that is rounded down promises more than the parameters give.",
        "",
        "an epsilon with two decimals",
    ),
    "noise-multiplier": (
        "whether the optimizer's noise multiplier is the one that is claimed and accounted for",
        "Epsilon is computed for the noise in the accounting, not for the noise in use.",
        "was the noise multiplier changed after the accounting, by a scheduler or by hand?",
    ),
    "clipping-norm": (
        "whether gradients are clipped to the norm for which the noise is scaled",
        "A larger norm than that of the noise makes the noise too small.",
        "was max_grad_norm changed in the optimizer or in the model, but not in both, or between the parts "
        "of a batch?",
    ),
    "loader-rate": (
        "whether the loader draws examples as often as the accountant assumes",
        "Examples that are drawn more often lose more privacy.",
        "was the loader replaced after make_private, or its sampler changed?",
    ),
    "batch-sampler": (
        "whether the loader has a Poisson sampler",
        "Amplification by Poisson sampling does not hold for shuffled epochs.",
        "was make_private called with poisson_sampling=False, or its loader not used?",
    ),
    "repeated-entries": (
        "whether the data set lists an example several times",
        "Each copy is drawn and clipped for itself, so that the example counts more than once.",
        "is a class oversampled by listing its examples several times?",
    ),
    "accountant-steps": (
        "whether the accountant knows all steps",
        "Steps that are not counted cost privacy all the same.",
        "was the accountant's step hook replaced by another hook?",
    ),
    "accountant-noise": (
        "whether the accountant knows the noise multiplier of each step",
        "Steps with less noise than accounted for cost more privacy.",
        "does a scheduler change the noise without the accountant's knowledge?",
    ),
    "mixing-module": (
        "whether a layer mixes the examples of a batch or keeps averages of them",
        "Per-example gradients are then not those of single examples.",
        "should the layer be replaced, as by ModuleValidator.fix, or keep no averages?",
    ),
    "public-parameters": (
        "whether another optimizer updates parameters of the model",
        "Its updates have neither clipping nor noise.",
        "was only a part of the optimizers passed to make_private?",
    ),
    "private-criterion": (
        "whether ghost clipping gets the criterion that make_private returned",
        "Another criterion does not clip.",
        "is the original loss used instead of the one that make_private returned?",
    ),
    "loss-reduction": (
        "whether the loss is reduced as make_private assumes, without weights of the batch",
        "Otherwise the gradient of an example depends on the others before it is clipped.",
        "should the loss be the plain mean, as loss_reduction states?",
    ),
    "noise-seed": (
        "whether the generator of the noise has a fixed or guessable seed",
        "Whoever knows the seed can subtract the noise.",
        "was noise_generator seeded to make experiments reproducible?",
    ),
    "other-private-steps": (
        "whether the claim leaves out private steps on the same parameters, of earlier phases or by another "
        "optimizer",
        "Epsilons of all steps on the same data add up, whichever accountant has them.",
        "is epsilon computed from all accountants and optimizers of this training run together?",
        "get_epsilon() of an accountant with all steps",
    ),
    "data-set-size": (
        "whether the accounting has the number of examples of the data set",
        "The sample rate and a suitable delta follow from it.",
    ),
}
