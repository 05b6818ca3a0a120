"""Pieces of short trainings with JAX Privacy."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy import batch_selection, clipped_grad, clipping, noise_addition

from dpaudit.observers.jax_privacy import observe

jax.config.update("jax_disable_most_optimizations", True)  # compiling takes longer than running here

DELTA, RATE, NUM_EXAMPLES, MOST = 1e-5, 0.05, 200, 32
POISSON = batch_selection.CyclicPoissonSampling(sampling_prob=RATE, iterations=300)

_RNG = np.random.default_rng(0)
INPUTS = _RNG.standard_normal((NUM_EXAMPLES, 12)).astype(np.float32)
TARGETS = (INPUTS[:, 0] > 0).astype(np.int32)


def start(seed=0):
    rng = np.random.default_rng(seed)
    return {"weight": jnp.asarray(rng.standard_normal((12, 10)), jnp.float32) / 3, "bias": jnp.zeros(10)}


def loss(params, batch):
    inputs, targets = batch
    logits = inputs @ params["weight"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def batches(num_steps, seed=0, sampling_prob=RATE):
    """Poisson batches, filled up to one size, so that the step is compiled once."""
    strategy = batch_selection.CyclicPoissonSampling(sampling_prob=sampling_prob, iterations=num_steps)
    for chosen in strategy.batch_iterator(NUM_EXAMPLES, rng=seed):
        places = np.concatenate([chosen, np.full(MOST - len(chosen), -1, chosen.dtype)])
        yield (INPUTS[places], TARGETS[places]), places < 0


def private(*, noise_multiplier=0.5, l2_clip_norm=1.0, normalize_by=10.0, seed=0, fun=loss, **options):
    grad_fn = clipped_grad(fun, l2_clip_norm=l2_clip_norm, normalize_by=normalize_by, **options)
    stddev = noise_multiplier * grad_fn.sensitivity()
    return grad_fn, noise_addition.gaussian_privatizer(stddev=stddev, prng_key=seed)


def loop(grad_fn, privatizer, *, optimizer=None, between=lambda gradient: gradient, compiled=True, fed=()):
    """The step that people write, and a run of it; ``between`` is what they do before the noise."""
    optimizer = optax.sgd(0.5) if optimizer is None else optimizer

    def step(params, noise_state, state, batch, is_padding):
        result = grad_fn(params, batch, *fed, is_padding_example=is_padding)
        gradient = between(result[0] if grad_fn.has_aux else result)
        noisy, noise_state = privatizer.update(gradient, noise_state)
        updates, state = optimizer.update(noisy, state)
        return optax.apply_updates(params, updates), noise_state, state

    step = jax.jit(step) if compiled else step

    def run(num_steps, seed=0, sampling_prob=RATE):
        params = start(seed)
        noise_state, state = privatizer.init(params), optimizer.init(params)
        for batch, is_padding in batches(num_steps, seed, sampling_prob):
            params, noise_state, state = step(params, noise_state, state, batch, is_padding)
        return params

    return run


def whole(grad_fn, privatizer, num_steps=300):
    """Trainings that are compiled from the first step to the last, which takes half the time."""

    def step(carried, fed):
        params, state = carried
        noisy, state = privatizer.update(grad_fn(params, fed[0], is_padding_example=fed[1]), state)
        return (optax.apply_updates(params, optax.tree.scale(-0.5, noisy)), state), None

    @jax.jit
    def run(params, state, fed):
        return jax.lax.scan(step, (params, state), fed)[0][0]

    def run_seed(seed):
        fed = jax.tree.map(lambda *rows: np.stack(rows), *batches(num_steps, seed))
        return run(start(seed), (jax.random.key(seed), ()), fed)

    return run_seed


def train(num_steps=60, *, observed=True, observer=None, step=None, sampling_prob=RATE, **options):
    """One training, with or without an observer; its weights and its recorder."""
    made, recorder = private(**options), None
    if observed:
        usual = {"sample_rate": RATE, "num_steps": num_steps, "delta": DELTA, "seed": 0}
        *made, recorder = observe(*made, **(usual | (observer or {})))
    params = loop(*made, **(step or {}))(num_steps, sampling_prob=sampling_prob)
    return SimpleNamespace(params=params, recorder=recorder)


def without_clipping(monkeypatch):
    def identity(pytree, *_, **__):
        return pytree, optax.global_norm(pytree)

    monkeypatch.setattr(clipping, "clip_pytree", identity)


def with_noise_times(monkeypatch, factor):
    original = noise_addition._iid_normal_noise
    monkeypatch.setattr(
        noise_addition, "_iid_normal_noise", lambda *args: optax.tree.scale(factor, original(*args))
    )


FAULTS = {
    "no clipping": without_clipping,
    "no noise": lambda monkeypatch: with_noise_times(monkeypatch, 0.0),
    "noise times 0.8": lambda monkeypatch: with_noise_times(monkeypatch, 0.8),
}
