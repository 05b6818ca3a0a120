"""Audit training with JAX Privacy: only an import and the `observe` line are added to the training code."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy import batch_selection, clipped_grad, noise_addition

from dpaudit.observers.jax_privacy import observe
from dpaudit.training.data import digits

train, _ = digits().split(1500)
images, labels = np.asarray(train.inputs).reshape(-1, 64), np.asarray(train.targets)


def loss(params, images, labels):
    logits = images @ params["weight"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


grad_fn = clipped_grad(loss, l2_clip_norm=1.0, normalize_by=75, batch_argnums=(1, 2))
privatizer = noise_addition.gaussian_privatizer(stddev=0.9 * grad_fn.sensitivity(), prng_key=1)
sampling = batch_selection.CyclicPoissonSampling(sampling_prob=0.05, iterations=300)
grad_fn, privatizer, recorder = observe(grad_fn, privatizer, sampling=sampling, num_canaries=512, seed=1)


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
print(recorder.audit(delta=1e-5))
