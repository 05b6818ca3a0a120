"""The zoo's fault `microbatch` in TF Privacy itself: what it clips is the mean of a microbatch."""

import numpy as np
import pytest
import tensorflow as tf
from runs import NORM, losses, private

from dpaudit.observers.step import replay

BATCH = 8


def sensitivity(name, num_microbatches):
    """How far one example moves the release of a batch in which it outweighs its neighbour."""
    model, optimizer = private(name, num_microbatches=num_microbatches)
    for weight in model.trainable_variables:
        weight.assign(tf.zeros_like(weight))
    inputs = np.random.default_rng(3).standard_normal((BATCH, 40)).astype(np.float32)
    inputs[1] = -100 * inputs[0]
    targets = np.zeros(BATCH, np.int32)
    present, absent = np.ones(BATCH, np.float32), np.ones(BATCH, np.float32)
    absent[1] = 0.0  # no gradient: the example is not there

    def release(weights):
        with tf.GradientTape() as tape:
            loss = weights * losses()(targets, model(inputs))
        pairs = optimizer._compute_gradients(loss, model.trainable_variables, tape=tape)
        return np.concatenate([gradient.numpy().reshape(-1) for gradient, _ in pairs])

    return replay(
        release,
        present,
        [absent],
        reseed=lambda: tf.random.set_seed(0),
        max_grad_norm=NORM,
        batch_size=num_microbatches,  # the mean that is released is over microbatches
    )


@pytest.mark.parametrize("name", ["sgd", "vectorized sgd"])
def test_a_microbatch_of_two_lets_one_example_count_twice(name):
    found = sensitivity(name, BATCH // 2)
    assert found.is_violation
    assert found.largest == pytest.approx(2.0, abs=0.05)


@pytest.mark.parametrize("name", ["sgd", "vectorized sgd"])
def test_a_microbatch_of_one_example_is_clipped_as_one(name):
    found = sensitivity(name, BATCH)
    assert not found.is_violation
    assert found.largest == pytest.approx(1.0, abs=0.01)
