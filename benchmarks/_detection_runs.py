"""Short audited training runs in every observer, correct or with a fault, for benchmarks/detection.py.

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
from _faults import LEAVES, Batch, Draw, Fault, flat_norms
from opacus import PrivacyEngine
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, Sampler, TensorDataset

import dpaudit
from dpaudit.observers.opacus import observe
from dpaudit.observers.step import observe_loss_step, observe_step

__all__ = ["RUNS", "Run"]

NUM_EXAMPLES, RATE, NORM, DELTA = 300, 0.1, 2.0, 1e-5
EXPECTED, FILLED, MOST = NUM_EXAMPLES * RATE, 48, 96  # batch sizes: expected, filled up, of a compiled step
SIZES = {name: int(np.prod(shape)) for name, shape in LEAVES.items()}


class Run:
    """One training run: the fault, its size, and the random numbers of everything but the audit."""

    def __init__(self, fault: Fault, size: Any, *, sigma: float, num_steps: int, seed: int) -> None:
        self.fault, self.size, self.sigma, self.num_steps, self.seed = fault, size, sigma, num_steps, seed
        self.rng = np.random.default_rng([seed, num_steps])
        self.std = sigma * NORM
        self.last: Any = 0.0  # the sum of the previous step
        self.raw: Any = 0.0  # the sum of gradients before clipping
        self.index = 0

    @property
    def has_own_noise(self) -> bool:
        return any((self.fault.noise, self.fault.std, self.fault.after, self.fault.rounded))

    @property
    def has_own_clipping(self) -> bool:
        return any((self.fault.factor, self.fault.clip))

    def draw_noise(self) -> np.ndarray:
        """Return the noise of all steps: steps x parameters."""
        draw = Draw(self.rng, self.num_steps, self.std)
        noise = draw.normal() if self.fault.noise is None else self.fault.noise(draw, self.size)
        return noise.astype(np.float32)

    def noise_factor(self, batch: Batch) -> Any:
        return 1.0 if self.fault.std is None else self.fault.std(batch, self.size)

    def added(self, last: Any, raw: Any) -> Any:
        return 0.0 if self.fault.after is None else self.fault.after(last, raw, self.size)

    def rounded(self, release: Any) -> Any:
        return release if self.fault.rounded is None else self.fault.rounded(release)

    def factor(self, norms: Any, limit: Any, xp: Any = np) -> Any:
        """Return clipping factors from the norms of leaves x rows."""
        if self.fault.factor is None:
            return xp.minimum(1.0, limit / (flat_norms(norms, xp) + 1e-6))
        return self.fault.factor(norms, limit, self.size, xp)

    def clipped(self, leaves: list[Any], limit: Any, xp: Any = np) -> list[Any]:
        """Return clipped rows, one array per leaf."""
        if self.fault.clip is not None:
            return self.fault.clip(leaves, limit, self.size, xp)
        norms = xp.stack([xp.sqrt((leaf * leaf).reshape(len(leaf), -1).sum(1)) for leaf in leaves])
        factors = self.factor(norms, limit, xp)
        return [leaf * factors.reshape(-1, *[1] * (leaf.ndim - 1)) for leaf in leaves]

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


def own_step(run: Run) -> Callable[[list[np.ndarray]], np.ndarray]:
    """Return the step of a developer: clip, sum, add noise. It takes one array per leaf."""
    noise, loop, sums = run.draw_noise(), run.fault.loop, list[np.ndarray]()

    def step(leaves: list[np.ndarray]) -> np.ndarray:
        if loop == "two rows":
            leaves = [np.concatenate([leaf, leaf]) for leaf in leaves]
        rows = _flat(leaves)
        total = _flat(run.clipped(leaves, NORM)).sum(axis=0)
        if loop == "doubled":
            total = total + total
        longest = float(np.linalg.norm(rows, axis=1).max(initial=0.0)) / NORM
        own = noise[run.index] * run.noise_factor(Batch(len(rows), 16 + 32, longest))
        released = total + own + run.added(run.last, rows.sum(axis=0))
        if loop == "lag three" and run.index >= 3:
            released = released + 0.5 * sums[run.index - 3]
        sums.append(total)
        run.index, run.last = run.index + 1, total
        return run.rounded(released)

    return step


def _flat(leaves: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


def _split(rows: np.ndarray) -> list[np.ndarray]:
    parts = np.split(rows, np.cumsum(list(SIZES.values()))[:-1], axis=-1)
    return [
        part.reshape(*rows.shape[:-1], *shape) for part, shape in zip(parts, LEAVES.values(), strict=True)
    ]


def run_step(run: Run) -> Any:
    step = own_step(run)
    return observe_step(
        lambda rows: step(_split(rows)),
        np.zeros((16, sum(SIZES.values()))),
        claim=dpaudit.Claim.gaussian(noise_multiplier=run.sigma, delta=DELTA),
        max_grad_norm=NORM,
        num_steps=run.num_steps,
        leaves=SIZES,
        seed=run.seed,
    )


def run_func(run: Run) -> Any:
    step, model = own_step(run), plain_model(run.seed)
    params = {name: value.detach() for name, value in model.named_parameters()}

    def loss(params: Any, example: Any) -> Any:
        x, y = example
        return nn.functional.cross_entropy(functional_call(model, params, (x,)), y)

    def private_gradient(loss: Any, params: Any, batch: Any) -> Any:
        rows = vmap(grad(loss), in_dims=(None, 0))(params, batch)
        released = _split(step([rows[name].numpy() for name in LEAVES]))
        return {name: torch.as_tensor(part) for name, part in zip(LEAVES, released, strict=True)}

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


class OwnSampler(Sampler):  # type: ignore[type-arg]
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
    module, optimizer, *own, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.005),
        data_loader=DataLoader(data, batch_size=round(EXPECTED)),
        noise_multiplier=run.sigma,
        max_grad_norm=limits if kind == "layer" else NORM,
        clipping="per_layer" if kind == "layer" else "flat",
        **options,
    )
    private = own[0] if own and run.fault.loop != "bypass" else criterion
    if run.fault.batches is not None:
        loader = DataLoader(data, batch_sampler=OwnSampler(run.batches()))
    share_weights(plain, model)
    if run.has_own_clipping:
        replace_clipping(run, module, optimizer, limits if kind == "layer" else None)
    if run.has_own_noise:
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
            parts = torch.autograd.grad(loss, list(plain.parameters()))
            run.raw = np.concatenate([part.numpy().reshape(-1) for part in parts])
        backward(x, y)
        optimizer.step()


def share_weights(plain: nn.Module, model: nn.Module) -> None:
    """Give a model without hooks the parameters of another."""
    for name, layer in model.named_children():
        if isinstance(layer, nn.Linear):
            own = plain.get_submodule(name)
            own.weight, own.bias = layer.weight, layer.bias


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
            for part in p.grad_sample if isinstance(p.grad_sample, list) else [p.grad_sample]:
                part._processed = True

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

    def batch(self: Any) -> Batch:
        if hasattr(module, "get_clipping_coef"):
            norms = module.per_sample_gradient_norms.detach().numpy()
        else:
            norms = np.linalg.norm(_flat([p.grad_sample.numpy() for p in self.params]), axis=1)
        return Batch(len(norms), EXPECTED, float(norms.max(initial=0.0)) / NORM)

    def add_noise(self: Any) -> None:
        total = np.concatenate([p.summed_grad.numpy().reshape(-1) for p in self.params])
        own = noise[run.index] * (run.noise_factor(batch(self)) if run.fault.std else 1.0)
        parts = _split((own + run.added(run.last, run.raw)).astype(np.float32))
        for p, part in zip(self.params, parts, strict=True):
            p.grad = torch.as_tensor(run.rounded(p.summed_grad.numpy() + part))
            p.summed_grad._processed = True
        run.index, run.last = run.index + 1, total

    optimizer.add_noise = MethodType(add_noise, optimizer)


# --- JAX Privacy


def run_jax(run: Run) -> Any:
    import jax  # noqa: PLC0415  # not needed by processes that run other observers
    import jax.numpy as jnp  # noqa: PLC0415
    from jax_privacy import clipped_grad, noise_addition  # noqa: PLC0415

    from dpaudit.observers import jax_privacy  # noqa: PLC0415

    jax.config.update("jax_disable_most_optimizations", True)  # compiling takes longer than running here
    with clipping_of(run, jnp) if run.has_own_clipping else nullcontext():
        grad_fn = clipped_grad(jax_loss, l2_clip_norm=NORM, batch_argnums=(1, 2))
        if run.has_own_noise:
            privatizer = own_privatizer(run, run.draw_noise())
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


def own_privatizer(run: Run, noise: np.ndarray) -> Any:
    """Return a privatizer of a developer; its state is the number of the step and the last sum."""
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415
    import optax  # noqa: PLC0415

    def init(params: Any) -> Any:
        return jnp.array(0), jax.tree.map(jnp.zeros_like, params)

    def update(total: Any, state: Any, info: Any = None) -> Any:
        index, last = state
        batch, raw = info
        own = dict(zip(LEAVES, _split(jnp.asarray(noise)[index] * run.noise_factor(batch)), strict=True))
        noisy = {
            name: run.rounded(total[name] + own[name] + run.added(last[name], raw[name])) for name in LEAVES
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
        info = _info(jax, jax_loss, params, batch) if run.has_own_noise else None
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
    kept = {
        name: jnp.where(is_padding.reshape(-1, *[1] * (leaf.ndim - 1)), 0.0, leaf)
        for name, leaf in rows.items()
    }
    norms = jnp.sqrt(sum((leaf * leaf).reshape(len(leaf), -1).sum(1) for leaf in kept.values()))
    known = Batch((~is_padding).sum(), EXPECTED, norms.max() / NORM)
    return known, {name: leaf.sum(0) for name, leaf in kept.items()}


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
