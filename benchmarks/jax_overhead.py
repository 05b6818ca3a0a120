"""Check that a step of JAX Privacy takes at most 1.10 times as long with 4,096 canaries.

Times are CPU times of one thread. All kinds of steps take turns, and the ratio is the median over turns, so
that temporary load on the machine affects all of them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import warnings
from collections.abc import Callable

import numpy as np
from _cases import cpu_seconds, ratio
from _measure import Table, finish, milliseconds, restart_in_environment

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp
import optax
from jax_privacy import clipped_grad
from jax_privacy.noise_addition import gaussian_privatizer

from dpaudit.observers.jax_privacy import observe

LIMIT, WIDTHS, BATCH, DEFAULT = 1.10, (600, 256, 128, 100), 256, "default"


def loss(params: list[tuple[jax.Array, jax.Array]], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Return the loss of a multilayer perceptron."""
    values, targets = batch
    for number, (weight, bias) in enumerate(params):
        values = values @ weight + bias
        values = jnp.tanh(values) if number < len(params) - 1 else values
    return optax.softmax_cross_entropy_with_integer_labels(values, targets).mean()


def stepper(num_canaries: int | str | None) -> Callable[[], None]:
    """Return a compiled step on a fixed batch; None is a step without an observer."""
    rng = np.random.default_rng(0)
    batch = rng.standard_normal((BATCH, WIDTHS[0]), np.float32), rng.integers(0, WIDTHS[-1], BATCH)
    params = [
        (jnp.asarray(rng.standard_normal(pair, np.float32)) / 20, jnp.zeros(pair[1]))
        for pair in itertools.pairwise(WIDTHS)
    ]
    grad_fn = clipped_grad(loss, l2_clip_norm=1.0, normalize_by=float(BATCH))
    privatizer = gaussian_privatizer(stddev=grad_fn.sensitivity(), prng_key=0)
    if num_canaries is not None:
        given = {} if num_canaries == DEFAULT else {"num_canaries": num_canaries}
        grad_fn, privatizer, _ = observe(grad_fn, privatizer, seed=0, **given)
    state = privatizer.init(params)

    @jax.jit
    def update(params: object, state: object) -> tuple[object, object]:
        noisy, state = privatizer.update(grad_fn(params, batch), state)
        return optax.apply_updates(params, optax.tree.scale(-0.1, noisy)), state

    def step() -> None:
        nonlocal params, state
        params, state = update(params, state)
        jax.block_until_ready(params)

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--canaries", type=int, nargs="*", default=[64, 4096])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    numbers = [None, *options.canaries, DEFAULT]
    steps = {number: stepper(number) for number in numbers}
    times: dict[object, list[float]] = {number: [] for number in numbers}
    for turn in range(3 + options.repetitions):
        for number in numbers[turn % len(numbers) :] + numbers[: turn % len(numbers)]:
            seconds = cpu_seconds(steps[number])
            if turn >= 3:
                times[number].append(seconds)
    table = Table(
        "One JAX Privacy step, MLP 600-256-128-100", ("canaries", "batch", "time", "ratio", "limit")
    )
    table.add("none", str(BATCH), milliseconds(statistics.median(times[None])), "", "")
    for number in numbers[1:]:
        slower = ratio(times[number], times[None])
        cells = str(number), str(BATCH), milliseconds(statistics.median(times[number])), f"{slower:.2f}x"
        table.add(*cells, f"{LIMIT:g}x", met=slower <= LIMIT)
    return finish(table)


if __name__ == "__main__":
    restart_in_environment()
    sys.exit(main())
