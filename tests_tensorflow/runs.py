"""Pieces of short trainings with TF Privacy."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import tensorflow as tf
import tensorflow_privacy as tfp
from tensorflow_privacy.privacy.optimizers import dp_optimizer_keras_vectorized

from dpaudit.observers.tensorflow import observe

DELTA, RATE, STEPS = 1e-5, 0.05, 300
NOISE = 0.8563605  # what gives epsilon = 8 for these
NORM = 0.5
OPTIMIZERS = {
    "sgd": (tfp.DPKerasSGDOptimizer, 0.5),
    "adam": (tfp.DPKerasAdamOptimizer, 0.01),
    "vectorized sgd": (tfp.VectorizedDPKerasSGDOptimizer, 0.5),
    "vectorized adam": (tfp.VectorizedDPKerasAdamOptimizer, 0.01),
}
EXAMPLES, BATCH = 200, 10
INPUTS = np.random.default_rng(0).standard_normal((EXAMPLES, 40)).astype(np.float32)
TARGETS = (INPUTS[:, 0] > 0).astype(np.int32)


def private(name="vectorized sgd", *, noise=NOISE, seed=0, build=None, **options):
    """A compiled logistic regression of 82 parameters, and its optimizer."""
    tf.keras.utils.set_random_seed(seed)
    kind, rate = OPTIMIZERS[name]
    optimizer = kind(l2_norm_clip=NORM, noise_multiplier=noise, learning_rate=rate, **options)
    model = (build or (lambda: tf.keras.Sequential([tf.keras.layers.Dense(2, input_shape=(40,))])))()
    return model, optimizer


def losses():
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


def fit(model, optimizer, num_steps, *, num_examples=EXAMPLES, loss=None, **options):
    """What people call; a step each of the first examples, again and again."""
    model.compile(optimizer=optimizer, loss=losses() if loss is None else loss, **options)
    go_on(model, num_steps, num_examples)


def go_on(model, num_steps, num_examples=EXAMPLES):
    """Fit once more, without anything new to trace."""
    data = tf.data.Dataset.from_tensor_slices((INPUTS[:num_examples], TARGETS[:num_examples]))
    model.fit(data.batch(BATCH).repeat(), steps_per_epoch=num_steps, verbose=0)


def loop(model, optimizer, num_steps):
    """What people write: a step of their own."""
    loss_of = losses()

    @tf.function
    def step(inputs, targets):
        with tf.GradientTape() as tape:
            loss = loss_of(targets, model(inputs))
        pairs = optimizer._compute_gradients(loss, model.trainable_variables, tape=tape)
        optimizer.apply_gradients(pairs)

    for index in range(num_steps):
        where = slice(BATCH * (index % 20), BATCH * (index % 20 + 1))
        step(tf.constant(INPUTS[where]), tf.constant(TARGETS[where]))


def minimize(model, optimizer, num_steps):
    """The other thing that people write: a loss that is a function, eagerly."""
    loss_of = losses()
    for index in range(num_steps):
        where = slice(BATCH * index, BATCH * (index + 1))
        loss = lambda where=where: loss_of(TARGETS[where], model(INPUTS[where]))  # noqa: E731
        optimizer.minimize(loss, model.trainable_variables)


def train(
    name="vectorized sgd", *, num_steps=60, observed=True, how=fit, observer=None, how_options=None, **options
):
    """A training with or without an observer; its recorder and its weights."""
    model, optimizer = private(name, **options)
    usual = {"num_steps": num_steps, "sample_rate": RATE, "delta": DELTA, "seed": 0}
    context = observe(optimizer, **(usual | (observer or {}))) if observed else nullcontext()
    with context as recorder:
        how(model, optimizer, num_steps, **(how_options or {}))
    weights = np.concatenate([value.reshape(-1) for value in model.get_weights()])
    return SimpleNamespace(recorder=recorder, weights=weights, model=model, optimizer=optimizer)


def _with_less_noise(self, sample_state, global_state, original=tfp.GaussianSumQuery.get_noised_result):
    quiet = global_state._replace(stddev=0.8 * global_state.stddev)
    result, _, event = original(self, sample_state, quiet)
    return result, global_state, event


def _times(share, original=tf.random.normal):
    def normal(shape, mean=0.0, stddev=1.0, **options):
        return original(shape, mean, share * stddev, **options)

    return normal


def _without_noise(self, sample_state, global_state):  # noqa: ARG001
    return sample_state, global_state, None


def _record_as_it_is(self, params, record):  # noqa: ARG001
    return record


def _gradients_as_they_are(gradients, norm):  # noqa: ARG001
    return gradients


FAULTS = {
    ("sgd", "noise times 0.8"): (tfp.GaussianSumQuery, "get_noised_result", _with_less_noise),
    ("sgd", "no noise"): (tfp.GaussianSumQuery, "get_noised_result", _without_noise),
    ("sgd", "no clipping"): (tfp.GaussianSumQuery, "preprocess_record", _record_as_it_is),
    ("vectorized sgd", "noise times 0.8"): (tf.random, "normal", _times(0.8)),
    ("vectorized sgd", "no noise"): (tf.random, "normal", _times(0.0)),
    ("vectorized sgd", "no clipping"): (
        dp_optimizer_keras_vectorized,
        "clip_gradients_vmap",
        _gradients_as_they_are,
    ),
}
