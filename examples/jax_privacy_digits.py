"""Audit JAX Privacy training: pass both functions through `observe`, then train with what it returns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy import batch_selection, clipped_grad, noise_addition

import dpaudit
from dpaudit.jax_privacy import observe
from dpaudit.training.data import digits

# What the model card says. Write the numbers down: read from the code, they would repeat its mistakes.
CLAIM = dpaudit.Claim.dpsgd(noise_multiplier=0.9, sample_rate=0.05, num_steps=100, delta=1e-5)


def loss(params, images, labels):
    logits = images @ params["weight"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train(noise_multiplier: float) -> dpaudit.Result:
    data, _ = digits().split(1500)
    images, labels = np.asarray(data.inputs).reshape(-1, 64), np.asarray(data.targets)
    grad_fn = clipped_grad(loss, l2_clip_norm=1.0, normalize_by=75, batch_argnums=(1, 2))
    stddev = noise_multiplier * grad_fn.sensitivity()
    privatizer = noise_addition.gaussian_privatizer(stddev=stddev, prng_key=1)
    sampling = batch_selection.CyclicPoissonSampling(sampling_prob=0.05, iterations=100)
    grad_fn, privatizer, recorder = observe(
        grad_fn, privatizer, claim=CLAIM, sampling=sampling, num_examples=1500, seed=1
    )

    @jax.jit
    def step(params, state, images, labels, is_padding):
        gradient = grad_fn(params, images, labels, is_padding_example=is_padding)
        noisy, state = privatizer.update(gradient, state)
        return optax.apply_updates(params, optax.tree.scale(-0.5, noisy)), state

    params = {"weight": jnp.zeros((64, 10)), "bias": jnp.zeros(10)}
    state = privatizer.init(params)
    for chosen in sampling.batch_iterator(1500, rng=1):
        rows = np.pad(chosen, (0, 128 - len(chosen)), constant_values=-1)  # fixed shape: compiled once
        params, state = step(params, state, images[rows], labels[rows], rows < 0)
    return recorder.audit()


if __name__ == "__main__":
    print(train(noise_multiplier=0.9))
    print(train(noise_multiplier=0.7))  # less than claimed
