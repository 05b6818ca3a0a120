"""Audit training with TF Privacy: only an import and the `with` line are added to the training code."""

import tensorflow as tf
from sklearn.datasets import load_digits
from tensorflow_privacy import VectorizedDPKerasSGDOptimizer

import dpaudit
from dpaudit.observers.tensorflow import observe

tf.keras.utils.set_random_seed(1)
images, labels = load_digits(return_X_y=True)
images = images[:1500].astype("float32") / 8 - 1
optimizer = VectorizedDPKerasSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=0.9, learning_rate=0.5)
model = tf.keras.Sequential([tf.keras.layers.Dense(32, "relu", input_shape=(64,)), tf.keras.layers.Dense(10)])
loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
model.compile(optimizer=optimizer, loss=loss)

with observe(optimizer, canary=dpaudit.Dirac(), num_canaries=512, seed=1) as recorder:
    model.fit(images, labels[:1500], batch_size=75, epochs=15, verbose=0)

result = recorder.audit(sample_rate=75 / 1500, delta=1e-5)
print(result)
result.raise_for_violation()
