"""Short audited training runs in every observer, correct or with a fault, for tools/pages/detection.py.

All train the same model (20-16-16-3, 659 parameters) on 300 examples with sample rate 0.1 and clipping
norm 2. One class is more frequent, and six examples have much longer gradients than the others. A correct
run uses only the code of its library.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, Sampler, TensorDataset

import dpaudit
from dpaudit.observers.opacus import observe
from dpaudit.observers.step import observe_loss_step, observe_step
from dpaudit.zoo.faults import BatchFacts, Fault, Injection, split_leaves

__all__ = ["LEAVES", "RUNS", "Run"]

NUM_EXAMPLES, RATE, NORM, DELTA = 300, 0.1, 2.0, 1e-5
EXPECTED, FILLED, MOST = NUM_EXAMPLES * RATE, 48, 96  # batch sizes: expected, filled up, of a compiled step
LEAVES = {
    "fc1.weight": (16, 20),
    "fc1.bias": (16,),
    "fc2.weight": (16, 16),
    "fc2.bias": (16,),
    "out.weight": (3, 16),
    "out.bias": (3,),
}
SIZES = {name: int(np.prod(shape)) for name, shape in LEAVES.items()}


class Run(Injection):
    """One training run: the fault, its size, and the random numbers of everything but the audit."""

    def __init__(self, fault: Fault, size: Any, *, sigma: float, num_steps: int, seed: int) -> None:
        super().__init__(
            fault,
            size,
            std=sigma * NORM,
            num_steps=num_steps,
            rng=np.random.default_rng([seed, num_steps]),
            leaves=list(LEAVES.values()),
        )
        self.sigma, self.seed = sigma, seed
        self.raw_sum: Any = 0.0  # the sum of gradients before clipping

    def release(self, leaves: list[np.ndarray]) -> np.ndarray:
        """Return the release of the step of a developer, on 16 examples and half of 64 canaries."""
        return self.step(leaves, max_grad_norm=NORM, expected_batch=16 + 32)

    def batches(self) -> list[np.ndarray]:
        """Return the examples of each step."""
        if self.fault.batches is not None:
            return self.fault.batches(self.rng, NUM_EXAMPLES, RATE, self.num_steps)
        drawn = self.rng.random((2 * self.num_steps, NUM_EXAMPLES)) < RATE
        return [np.flatnonzero(row) for row in drawn]


def examples(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, 1])
    inputs = rng.standard_normal((NUM_EXAMPLES, 20)).astype(np.float32) / 4
    targets = (inputs @ rng.standard_normal((20, 3)) + [1.5, 0.0, 0.0]).argmax(1)
    inputs[: NUM_EXAMPLES // 50] *= 40
    return inputs, targets


# --- functions of gradients


def _split(rows: Any) -> list[Any]:
    return split_leaves(rows, list(LEAVES.values()))


def _flat(leaves: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


def run_step(run: Run) -> Any:
    return observe_step(
        lambda rows: run.release(_split(rows)),
        np.zeros((16, sum(SIZES.values()))),
        claim=dpaudit.Claim.gaussian(noise_multiplier=run.sigma, delta=DELTA),
        max_grad_norm=NORM,
        num_steps=run.num_steps,
        leaves=SIZES,
        seed=run.seed,
    )


def run_func(run: Run) -> Any:
    model = plain_model(run.seed)
    params = {name: value.detach() for name, value in model.named_parameters()}

    def loss(params: Any, example: Any) -> Any:
        x, y = example
        return nn.functional.cross_entropy(functional_call(model, params, (x,)), y)

    def private_gradient(loss: Any, params: Any, batch: Any) -> Any:
        rows = vmap(grad(loss), in_dims=(None, 0))(params, batch)
        released = _split(run.release([rows[name].numpy() for name in LEAVES]))
        return {name: torch.as_tensor(leaf) for name, leaf in zip(LEAVES, released, strict=True)}

    inputs, targets = map(torch.as_tensor, examples(run.seed))
    return observe_loss_step(
        private_gradient,
        loss,
        params,
        (inputs[:16], targets[:16]),
        claim=dpaudit.Claim.gaussian(noise_multiplier=run.sigma, delta=DELTA),
        max_grad_norm=NORM,
        num_steps=run.num_steps,
        seed=run.seed,
    )


# --- Opacus


def plain_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential()
    for name, *shape in (("fc1", 20, 16), ("fc2", 16, 16), ("out", 16, 3)):
        model.add_module(name, nn.Linear(*shape))
        if name != "out":
            model.add_module(f"{name}_tanh", nn.Tanh())
    return model


class DeveloperSampler(Sampler):  # type: ignore[type-arg]
    """A developer's sampler, with the attributes of the one that Opacus uses."""

    def __init__(self, batches: list[np.ndarray]) -> None:
        self.num_samples, self.sample_rate, self.batches = NUM_EXAMPLES, RATE, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter([batch.tolist() for batch in self.batches])


def run_opacus(run: Run, kind: str) -> Any:
    warnings.simplefilter("ignore")  # Opacus warns about its hooks in every run
    model, plain = plain_model(run.seed), plain_model(run.seed)
    data = TensorDataset(*map(torch.as_tensor, examples(run.seed)))
    criterion: Any = nn.CrossEntropyLoss()
    limits = [NORM / len(LEAVES) ** 0.5] * len(LEAVES)
    options = {"grad_sample_mode": "ghost", "criterion": criterion} if kind == "ghost" else {}
    module, optimizer, *criteria, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.005),
        data_loader=DataLoader(data, batch_size=round(EXPECTED)),
        noise_multiplier=run.sigma,
        max_grad_norm=limits if kind == "layer" else NORM,
        clipping="per_layer" if kind == "layer" else "flat",
        **options,
    )
    private = criteria[0] if criteria and run.fault.loop != "bypass" else criterion
    if run.fault.batches is not None:
        loader = DataLoader(data, batch_sampler=DeveloperSampler(run.batches()))
    share_weights(plain, model)
    if run.replaces_clipping:
        replace_clipping(run, module, optimizer, limits if kind == "layer" else None)
    if run.replaces_noise:
        replace_noise(run, module, optimizer)

    def backward(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        private(module(x), y).backward()

    with observe(
        optimizer,
        noise_multiplier=run.sigma,
        loader=loader,
        module=module,
        num_steps=run.num_steps,
        delta=DELTA,
        seed=run.seed,
    ) as recorder:
        train(run, backward, optimizer, loader, plain)
    return recorder


def train(
    run: Run, backward: Callable[[Any, Any], None], optimizer: Any, loader: Any, plain: nn.Module
) -> None:
    """Run the training loop, which some faults change."""
    loop = run.fault.loop
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    for _ in range(run.num_steps):
        x, y = next(epochs)
        if loop in ("doubled", "two batches"):
            optimizer.signal_skip_step(do_skip=True)
            backward(x, y)
            optimizer.step()
            optimizer.signal_skip_step(do_skip=False)
            x, y = (x, y) if loop == "doubled" else next(epochs)
        elif loop in ("two rows", "three rows"):
            count = 2 if loop == "two rows" else 3
            x, y = x.repeat(count, 1), y.repeat(count)
            x = x + 0.01 * torch.randn(x.shape)
        elif loop == "padding":
            more = torch.zeros(max(FILLED - len(x), 0), dtype=torch.long)
            x, y = torch.cat([x, x[more]]), torch.cat([y, y[more]])
        if run.fault.after is not None:
            loss = nn.functional.cross_entropy(plain(x), y, reduction="sum")
            leaves = torch.autograd.grad(loss, list(plain.parameters()))
            run.raw_sum = np.concatenate([leaf.numpy().reshape(-1) for leaf in leaves])
        backward(x, y)
        optimizer.step()


def share_weights(plain: nn.Module, model: nn.Module) -> None:
    """Give a model without hooks the parameters of another."""
    for name, layer in model.named_children():
        if isinstance(layer, nn.Linear):
            copy = plain.get_submodule(name)
            copy.weight, copy.bias = layer.weight, layer.bias


def replace_clipping(run: Run, module: Any, optimizer: Any, limits: list[float] | None) -> None:
    """Replace the clipping of Opacus by that of the run."""

    def clip_and_accumulate(self: Any) -> None:
        leaves = [self._get_flat_grad_sample(p).numpy() for p in self.params]
        if limits is None:
            clipped = run.clipped(leaves, NORM)
        else:  # each layer alone; a forgotten layer keeps its length
            forgets = run.fault.name == "forgotten-bias"
            clipped = [run.clipped([leaf], limit)[0] for leaf, limit in zip(leaves, limits, strict=True)]
            clipped = [*clipped[:-1], leaves[-1]] if forgets else clipped
        for p, rows in zip(self.params, clipped, strict=True):
            total = torch.as_tensor(rows.sum(axis=0))
            p.summed_grad = total if p.summed_grad is None else p.summed_grad + total
            for chunk in p.grad_sample if isinstance(p.grad_sample, list) else [p.grad_sample]:
                chunk._processed = True

    def get_clipping_coef(self: Any) -> torch.Tensor:
        self.get_norm_sample()
        norms = np.stack([p._norm_sample.detach().numpy() for p in self.trainable_parameters])
        return torch.as_tensor(run.factor(norms, NORM)).float()

    if hasattr(module, "get_clipping_coef"):
        module.get_clipping_coef = MethodType(get_clipping_coef, module)
    else:
        optimizer.clip_and_accumulate = MethodType(clip_and_accumulate, optimizer)


def replace_noise(run: Run, module: Any, optimizer: Any) -> None:
    """Replace the noise of Opacus by that of the run."""
    noise = run.draw_noise()

    def batch(self: Any) -> BatchFacts:
        if hasattr(module, "get_clipping_coef"):
            norms = module.per_sample_gradient_norms.detach().numpy()
        else:
            norms = np.linalg.norm(_flat([p.grad_sample.numpy() for p in self.params]), axis=1)
        return BatchFacts(len(norms), EXPECTED, float(norms.max(initial=0.0)) / NORM)

    def add_noise(self: Any) -> None:
        total = np.concatenate([p.summed_grad.numpy().reshape(-1) for p in self.params])
        scaled = noise[run.index] * (run.noise_factor(batch(self)) if run.fault.std else 1.0)
        leaves = _split((scaled + run.added(run.last_sum, run.raw_sum)).astype(np.float32))
        for p, leaf in zip(self.params, leaves, strict=True):
            p.grad = torch.as_tensor(run.rounded(p.summed_grad.numpy() + leaf))
            p.summed_grad._processed = True
        run.index, run.last_sum = run.index + 1, total

    optimizer.add_noise = MethodType(add_noise, optimizer)


# --- JAX Privacy


def run_jax(run: Run) -> Any:
    import jax  # noqa: PLC0415  # not needed by processes that run other observers
    import jax.numpy as jnp  # noqa: PLC0415
    from jax_privacy import clipped_grad, noise_addition  # noqa: PLC0415

    from dpaudit.observers import jax_privacy  # noqa: PLC0415

    jax.config.update("jax_disable_most_optimizations", True)  # compiling takes longer than running here
    with clipping_of(run, jnp) if run.replaces_clipping else nullcontext():
        grad_fn = clipped_grad(jax_loss, l2_clip_norm=NORM, batch_argnums=(1, 2))
        if run.replaces_noise:
            privatizer = developer_privatizer(run, run.draw_noise())
        else:
            std = run.std * grad_fn.sensitivity()
            privatizer = noise_addition.gaussian_privatizer(stddev=std, prng_key=run.seed)
        grad_fn, privatizer, recorder = jax_privacy.observe(
            grad_fn,
            privatizer,
            noise_multiplier=run.sigma,
            sample_rate=RATE,
            num_steps=run.num_steps,
            delta=DELTA,
            num_examples=NUM_EXAMPLES,
            seed=run.seed,
        )
        train_jax(run, jax_step(run, grad_fn, privatizer), privatizer)
    return recorder


def jax_loss(params: Any, x: Any, y: Any) -> Any:
    import jax.numpy as jnp  # noqa: PLC0415
    import optax  # noqa: PLC0415

    hidden = jnp.tanh(x @ params["fc1.weight"].T + params["fc1.bias"])
    hidden = jnp.tanh(hidden @ params["fc2.weight"].T + params["fc2.bias"])
    logits = hidden @ params["out.weight"].T + params["out.bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def developer_privatizer(run: Run, noise: np.ndarray) -> Any:
    """Return a privatizer of a developer; its state is the number of the step and the last sum."""
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415
    import optax  # noqa: PLC0415

    def init(params: Any) -> Any:
        return jnp.array(0), jax.tree.map(jnp.zeros_like, params)

    def update(total: Any, state: Any, info: Any = None) -> Any:
        index, last = state
        batch, raw = info
        leaves = _split(jnp.asarray(noise)[index] * run.noise_factor(batch))
        added = dict(zip(LEAVES, leaves, strict=True))
        noisy = {
            name: run.rounded(total[name] + added[name] + run.added(last[name], raw[name])) for name in LEAVES
        }
        return noisy, (index + 1, total)

    return optax.GradientTransformation(init, update)


def jax_step(run: Run, grad_fn: Any, privatizer: Any) -> Callable[..., Any]:
    """Return a compiled step on one batch, or on two whose gradients are added."""
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415

    @jax.jit
    def step(params: Any, state: Any, batch: Any, more: Any) -> Any:
        x, y, is_padding = batch
        gradient = grad_fn(params, x, y, is_padding_example=is_padding)
        if more is not None:
            second = grad_fn(params, *more[:2], is_padding_example=more[2])
            gradient = jax.tree.map(jnp.add, gradient, second)
        info = _info(jax, jax_loss, params, batch) if run.replaces_noise else None
        noisy, state = privatizer.update(gradient, state, info)
        return jax.tree.map(lambda p, g: p - 0.005 / EXPECTED * g, params, noisy), state

    return step


def train_jax(run: Run, step: Callable[..., Any], privatizer: Any) -> None:
    """Run the training loop, in which some faults use a batch twice or two batches per step."""
    import jax.numpy as jnp  # noqa: PLC0415

    named = plain_model(run.seed).named_parameters()
    params = {name: jnp.asarray(value.detach().numpy()) for name, value in named}
    state, (inputs, targets) = privatizer.init(params), examples(run.seed)
    batches = iter(run.batches())
    for _ in range(run.num_steps):
        drawn, more = next(batches), None
        rows, is_padding = _filled(run, drawn)
        if run.fault.loop in ("doubled", "two batches"):
            second = drawn if run.fault.loop == "doubled" else next(batches)
            other, is_other_padding = _filled(run, second)
            more = inputs[other], targets[other], is_other_padding
        params, state = step(params, state, (inputs[rows], targets[rows], is_padding), more)


def _filled(run: Run, batch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a batch of the size of a compiled step, and which of its rows are padding."""
    if run.fault.loop == "two rows":
        batch = np.concatenate([batch, batch])
    if run.fault.loop == "padding":  # padding that is not marked as such
        batch = np.concatenate([batch, np.repeat(batch[:1], max(FILLED - len(batch), 0))])
    most = 2 * MOST if run.fault.loop == "two rows" else MOST
    rows = np.pad(batch, (0, most - len(batch)), constant_values=-1)
    return rows, rows < 0


def _info(jax: Any, loss: Any, params: Any, batch: Any) -> Any:
    """Return what the step knows of its batch, and the sum of the raw gradients."""
    jnp, (x, y, is_padding) = jax.numpy, batch
    rows = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(params, x, y)
    examples_only = {
        name: jnp.where(is_padding.reshape(-1, *[1] * (leaf.ndim - 1)), 0.0, leaf)
        for name, leaf in rows.items()
    }
    norms = jnp.sqrt(sum((leaf * leaf).reshape(len(leaf), -1).sum(1) for leaf in examples_only.values()))
    info = BatchFacts((~is_padding).sum(), EXPECTED, norms.max() / NORM)
    return info, {name: leaf.sum(0) for name, leaf in examples_only.items()}


@contextmanager
def clipping_of(run: Run, jnp: Any) -> Iterator[None]:
    """Replace the clipping of JAX Privacy by that of the run."""
    from jax_privacy import clipping  # noqa: PLC0415

    def clip_pytree(
        pytree: Any,
        clip_norm: Any,
        return_zero: Any = False,
        **_: Any,
    ) -> Any:
        leaves = run.clipped([pytree[name][None] for name in LEAVES], clip_norm, jnp)
        clipped = {
            name: jnp.where(return_zero, 0.0, leaf[0]) for name, leaf in zip(LEAVES, leaves, strict=True)
        }
        return clipped, jnp.float32(0.0)

    original, clipping.clip_pytree = clipping.clip_pytree, clip_pytree
    try:
        yield
    finally:
        clipping.clip_pytree = original


RUNS: dict[str, Callable[[Run], Any]] = {
    "step": run_step,
    "func": run_func,
    "hooks": partial(run_opacus, kind="hooks"),
    "ghost": partial(run_opacus, kind="ghost"),
    "layer": partial(run_opacus, kind="layer"),
    "jax": run_jax,
}
