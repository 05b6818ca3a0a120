"""Audit TF Privacy training: wrap `fit` in `observe` and print the verdict."""

import tensorflow as tf
from sklearn.datasets import load_digits
from tensorflow_privacy import VectorizedDPKerasSGDOptimizer

import dpaudit
from dpaudit.tensorflow import observe

# What the model card says. Write the numbers down: read from the code, they would repeat its mistakes.
CLAIM = dpaudit.Claim.dpsgd(noise_multiplier=0.9, sample_rate=0.05, num_steps=300, delta=1e-5)


def train(noise_multiplier: float) -> dpaudit.Result:
    tf.keras.utils.set_random_seed(1)
    images, labels = load_digits(return_X_y=True)
    images, labels = images[:1500].astype("float32") / 8 - 1, labels[:1500]
    optimizer = VectorizedDPKerasSGDOptimizer(
        l2_norm_clip=1.0, noise_multiplier=noise_multiplier, learning_rate=0.5
    )
    layers = [tf.keras.layers.Dense(32, "relu", input_shape=(64,)), tf.keras.layers.Dense(10)]
    model = tf.keras.Sequential(layers)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    model.compile(optimizer=optimizer, loss=loss)
    with observe(optimizer, claim=CLAIM, seed=1) as recorder:
        model.fit(images, labels, batch_size=75, epochs=15, verbose=0)
    return recorder.audit()


if __name__ == "__main__":
    print(train(noise_multiplier=0.9))
    print(train(noise_multiplier=0.7))  # less than claimed
