"""Audit the Keras API of JAX Privacy: wrap `fit` in `observe_model` and print the verdict."""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import keras
import numpy as np
from jax_privacy import keras_api

import dpaudit
from dpaudit.jax_privacy import observe_model
from dpaudit.training.data import digits

# What the model card says. Write the numbers down: read from the code, they would repeat its mistakes.
CLAIM = dpaudit.Claim.dpsgd(noise_multiplier=0.9, sample_rate=0.05, num_steps=60, delta=1e-5)


def train(*, has_poisson_batches: bool) -> dpaudit.Result:
    keras.utils.set_random_seed(1)
    data, _ = digits().split(1500)
    images, labels = np.asarray(data.inputs).reshape(-1, 64), np.asarray(data.targets)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    config = keras_api.DPKerasConfig(
        epsilon=8.0,
        delta=1e-5,
        clipping_norm=1.0,
        batch_size=75,
        gradient_accumulation_steps=1,
        train_steps=60,
        train_size=1500,
        noise_multiplier=0.9,
        poisson_sampling_in_fit=has_poisson_batches,
        seed=1,
    )
    model = keras_api.make_private(model, config)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with observe_model(model, claim=CLAIM, seed=1) as recorder:
        model.fit(images, labels, batch_size=75, epochs=3, verbose=0)
    return recorder.audit()


if __name__ == "__main__":
    print(train(has_poisson_batches=True))
    print(train(has_poisson_batches=False))  # of a fixed size, for which the claim was not computed
