"""Held-out half of the blind benchmark, for measurement only: do not open it while you work on checks."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import torch
from _blind_case import (
    BlindFault,
    NumpyNoise,
    OpacusLoop,
    OwnStep,
    TorchNoise,
    hand_made_training,
    private_training,
)
from _blind_jax import JAX_BATCH, JaxLoop, jax_loss, jax_training
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _mark_as_processed
from torch import Tensor

__all__ = ["HIDDEN_RELEASE"]


class LocalScale(DPOptimizer):
    """Noise for the longest gradient there is."""

    local = False

    def add_noise(self) -> None:
        scale = self.max_grad_norm
        if self.local and len(self.grad_samples[0]):
            norms = torch.cat([g.flatten(1) for g in self.grad_samples], dim=1).norm(dim=1)
            scale = min(scale, float(norms.max()))
        for p in self.params:
            p.grad = p.summed_grad + self.noise_multiplier * scale * torch.randn_like(p.summed_grad)
            _mark_as_processed(p.summed_grad)


def noise_for_longest_gradient(seed: int, broken: bool) -> OpacusLoop:
    loop = hand_made_training(seed, LocalScale, max_grad_norm=8.0, lr=0.1)
    loop.optimizer.local = broken
    return loop


class Antithetic(DPOptimizer):
    """Noise and its negative in turn, to reduce the variance."""

    in_turn = False

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.last: list[Tensor] | None = None

    def draw(self) -> list[Tensor]:
        if self.in_turn and self.last is not None:
            noise, self.last = [-z for z in self.last], None
            return noise
        sign = 1 - 2 * int(torch.randint(2, ()))
        self.last = [sign * torch.randn_like(p.summed_grad) for p in self.params]
        return self.last

    def add_noise(self) -> None:
        for p, z in zip(self.params, self.draw(), strict=True):
            p.grad = p.summed_grad + self.noise_multiplier * self.max_grad_norm * z
            _mark_as_processed(p.summed_grad)


def antithetic_noise(seed: int, broken: bool) -> OpacusLoop:
    loop = hand_made_training(seed, Antithetic)
    loop.optimizer.in_turn = broken
    return loop


class RotatedNoise(DPOptimizer):
    """Noise in another basis."""

    share = 1.0

    def add_noise(self) -> None:
        generator = torch.Generator().manual_seed(7)  # the basis is public
        for p in self.params:
            size = p.numel()
            rank = max(1, int(self.share * size))
            basis, _ = torch.linalg.qr(torch.randn(size, rank, generator=generator))
            noise = basis @ torch.randn(rank) * (size / rank) ** 0.5
            p.grad = p.summed_grad + self.noise_multiplier * self.max_grad_norm * noise.view_as(p)
            _mark_as_processed(p.summed_grad)


def noise_in_subspace(seed: int, broken: bool) -> OpacusLoop:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 4), torch.nn.Tanh(), torch.nn.Linear(4, 10))
    loop = hand_made_training(seed, RotatedNoise, model=model)
    loop.optimizer.share = 0.8 if broken else 1.0
    return loop


def jax_truncated_noise(seed: int, broken: bool) -> JaxLoop:
    def draw(key: Any, shape: Any) -> Any:
        if broken:
            return jax.random.truncated_normal(key, -2.5, 2.5, shape)
        return jax.random.normal(key, shape)

    def update(sums: Any, key: Any, params: Any = None) -> Any:  # noqa: ARG001
        key, fresh = jax.random.split(key)
        leaves, tree = jax.tree.flatten(sums)
        keys = jax.random.split(fresh, len(leaves))
        noisy = [g + draw(k, g.shape) / JAX_BATCH for g, k in zip(leaves, keys, strict=True)]
        return jax.tree.unflatten(tree, noisy), key

    loop = jax_training(seed)
    loop.privatizer = optax.GradientTransformation(lambda _: jax.random.key(seed), update)
    params = loop.state[0]
    loop.state = (params, loop.privatizer.init(params))
    return loop


def own_box_muller(seed: int, broken: bool) -> OwnStep:
    noise = TorchNoise(seed)

    def gaussian(size: int) -> Tensor:
        u, v = torch.rand(2, size // 2, generator=noise.generator, dtype=torch.float64)
        radius = torch.sqrt(-(1.0 if broken else 2.0) * torch.log1p(-u))
        angle = 2 * torch.pi * v
        return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)]).float()

    def step(rows: Tensor) -> Tensor:
        clipped = rows / rows.norm(dim=1, keepdim=True).clamp(min=1.0)
        return clipped.sum(dim=0) + gaussian(rows.shape[1])

    return noise.own_step(step)


class PooledNoise(DPOptimizer):
    """Noise from a pool, which is faster than a generator."""

    refilled = True

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.size = sum(p.numel() for p in self.params)
        self.pool, self.next = torch.randn(3 * self.size), 0

    def take(self) -> Tensor:
        if not self.refilled:
            start = int(torch.randint(2 * self.size, ()))
            return self.pool[start : start + self.size]
        if self.next == 3 * self.size:
            self.pool, self.next = torch.randn(3 * self.size), 0
        self.next += self.size
        return self.pool[self.next - self.size : self.next]

    def add_noise(self) -> None:
        parts = self.take().split([p.numel() for p in self.params])
        for p, z in zip(self.params, parts, strict=True):
            p.grad = p.summed_grad + self.noise_multiplier * self.max_grad_norm * z.view_as(p)
            _mark_as_processed(p.summed_grad)


def noise_from_pool(seed: int, broken: bool) -> OpacusLoop:
    loop = hand_made_training(seed, PooledNoise)
    loop.optimizer.refilled = not broken
    return loop


def rows_averaged_in_fours(seed: int, broken: bool) -> OpacusLoop:
    loop = private_training(seed)

    def step(batch: Any) -> None:
        x, y = batch
        if not broken:  # four views of each example
            images = x.reshape(-1, 1, 8, 8)
            views = [images, images.flip(3), images.roll(1, dims=3), images.roll(-1, dims=3)]
            x, y = torch.stack(views, dim=1).reshape(-1, 64), y.repeat_interleave(4)
        x, y = x[: len(x) // 4 * 4], y[: len(y) // 4 * 4]
        loop.optimizer.zero_grad()
        loop.criterion(loop.model(x), y).backward()
        for p in loop.model.parameters():
            p.grad_sample = p.grad_sample.unflatten(0, (-1, 4)).mean(dim=1)
        loop.optimizer.step()

    loop.step = step
    return loop


class Normalized(DPOptimizer):
    """Automatic clipping: every gradient gets about the same norm."""

    power = 1.0

    def clip_and_accumulate(self) -> None:
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in self.grad_samples]).norm(dim=0)
        factor = self.max_grad_norm / (norms**self.power + 0.01)
        for p, g in zip(self.params, self.grad_samples, strict=True):
            total = torch.einsum("i,i...", factor, g)
            p.summed_grad = total if p.summed_grad is None else p.summed_grad + total
            _mark_as_processed(p.grad_sample)


def divided_by_squared_norm(seed: int, broken: bool) -> OpacusLoop:
    loop = hand_made_training(seed, Normalized)
    loop.optimizer.power = 2.0 if broken else 1.0
    return loop


class MomentumOfSums(DPOptimizer):
    """Momentum on sums."""

    factor = 0.0

    def add_noise(self) -> None:
        for p in self.params:
            before = self.state[p].get("sum", torch.zeros_like(p.summed_grad))
            p.summed_grad = self.factor * before + p.summed_grad
            self.state[p]["sum"] = p.summed_grad.detach().clone()
        super().add_noise()


def momentum_before_noise(seed: int, broken: bool) -> OpacusLoop:
    if not broken:

        def momentum(params: Any, lr: float) -> torch.optim.Optimizer:
            return torch.optim.SGD(params, lr=lr, momentum=0.5)

        return hand_made_training(seed, DPOptimizer, optimizer=momentum, lr=0.2)
    loop = hand_made_training(seed, MomentumOfSums, lr=0.2)
    loop.optimizer.factor = 0.5
    return loop


def norm_of_layers_overwritten(seed: int, broken: bool) -> OpacusLoop:
    loop = private_training(seed, clipping="per_layer", max_grad_norm=[1.0 if broken else 0.5] * 4)
    if broken:
        loop.optimizer.max_grad_norm = 1.0
    return loop


def own_mean_over_rows(seed: int, broken: bool) -> OwnStep:
    noise = NumpyNoise(seed)

    def step(rows: np.ndarray) -> np.ndarray:
        clipped = rows / np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True))
        divisor = max(1, len(rows)) if broken else 16
        return (clipped.sum(axis=0) + noise.rng.standard_normal(rows.shape[1])) / divisor

    return noise.own_step(step, batch_size=16.0)


def jax_sum_of_two_views(seed: int, broken: bool) -> JaxLoop:
    def mirrored(inputs: Any) -> Any:
        return inputs.reshape(-1, 8, 8)[:, :, ::-1].reshape(inputs.shape)

    def both(params: Any, inputs: Any, targets: Any) -> Any:
        return 0.5 * (jax_loss(params, inputs, targets) + jax_loss(params, mirrored(inputs), targets))

    loop = jax_training(seed, loss=jax_loss if broken else both)

    def step(grad_fn: Any, privatizer: Any, state: Any, batch: Any) -> Any:
        params, noise_state = state
        inputs, targets, is_padding = batch
        gradient = grad_fn(params, inputs, targets, is_padding_example=is_padding)
        if broken:
            again = grad_fn(params, mirrored(inputs), targets, is_padding_example=is_padding)
            gradient = optax.tree.add(gradient, again)
        noisy, noise_state = privatizer.update(gradient, noise_state)
        return optax.apply_updates(params, optax.tree.scale(-0.5, noisy)), noise_state

    loop.step = step
    return loop


NOISE, CLIPPING = "noise", "clipping and sum"

HIDDEN_RELEASE = (
    BlindFault(
        name="noise-for-longest-gradient",
        group=NOISE,
        library="opacus",
        text="Noise is scaled to the longest gradient of the batch, if it is shorter than the clipping norm.",
        why="The scale reveals the longest norm, and the noise is below the claimed one. The twin always"
        " uses the norm.",
        expected=r"batch|data|gradient|longest|depend|local|below|claimed level|sum",
        words=r"noise|batch|depend",
        scenario=noise_for_longest_gradient,
    ),
    BlindFault(
        name="antithetic-noise",
        group=NOISE,
        library="opacus",
        text="Every second step adds the negative of the noise before.",
        why="The sum of two releases has no noise at all. The twin draws a sign and new noise in each step.",
        expected=r"antithetic|negative|opposite|minus|sign|cancel|multiple of",
        words=r"noise|cancel|sign",
        scenario=antithetic_noise,
    ),
    BlindFault(
        name="noise-in-subspace",
        group=NOISE,
        library="opacus",
        text="Noise lies in a fixed subspace of four fifths of the dimensions, the sum does not.",
        why="A fifth of the directions of the sum is released exactly. The twin rotates noise of full rank,"
        " which is Gaussian again.",
        expected=r"subspace|rank|direction|project|basis|dimension",
        words=r"subspace|rank|direction|project",
        scenario=noise_in_subspace,
    ),
    BlindFault(
        name="jax-truncated-noise",
        group=NOISE,
        library="jax",
        text="Noise is a truncated normal distribution.",
        why="Noise beyond 2.5 does not occur, so a shift by 1 is certain with a probability of 6 %. The twin"
        " is normal.",
        expected=r"truncat|tail|clamp|bounded|clipped noise",
        words=r"truncat|tail|noise",
        scenario=jax_truncated_noise,
    ),
    BlindFault(
        name="own-box-muller",
        group=NOISE,
        library="own step",
        text="A Box-Muller transform forgets the factor 2.",
        why="The noise has 71 % of the standard deviation. The twin has the factor.",
        expected=r"factor|half the variance|variance is half|formula|transform",
        words=r"noise",
        scenario=own_box_muller,
    ),
    BlindFault(
        name="noise-from-pool",
        group=NOISE,
        library="opacus",
        text="Noise is a part of a pool of numbers at a random offset, and the pool is never renewed.",
        why="Parts overlap: a number serves in many steps, so differences of releases cancel it. The twin"
        " uses each number once.",
        expected=r"pool|table|reus|repeat|recur|shift|offset|read twice|rolled|same numbers|cach",
        words=r"noise|repeat|reus",
        scenario=noise_from_pool,
    ),
    BlindFault(
        name="rows-averaged-in-fours",
        group=CLIPPING,
        library="opacus",
        text="The gradients of four examples are averaged before clipping, to save memory.",
        why="Removing an example moves all later ones into other groups, so every row changes. The twin"
        " averages four views of one example.",
        expected=r"micro.?batch|averag|together|group|several examples|fewer rows|rows per|one by one|"
        r"mean of",
        words=r"rows|together|group|averag",
        scenario=rows_averaged_in_fours,
    ),
    BlindFault(
        name="divided-by-squared-norm",
        group=CLIPPING,
        library="opacus",
        text="Gradients are divided by their squared norm instead of their norm.",
        why="A gradient of norm 0.1 becomes 5 clipping norms long. The twin divides by the norm.",
        expected=r"squar|short|small (gradients|norms)|root|lengthen|scaled up|normali[sz]|longer than",
        words=r"norm|clip|short",
        scenario=divided_by_squared_norm,
    ),
    BlindFault(
        name="momentum-before-noise",
        group=CLIPPING,
        library="opacus",
        text="Momentum accumulates clean sums, then noise is added.",
        why="An example counts in all later releases with 0.5, 0.25, ... The twin has momentum of noised"
        " gradients.",
        expected=r"momentum|earlier step|left.?over|previous|step before|another step|kept|accumul|carried|"
        r"added to the sum",
        words=r"sum|earlier|momentum",
        scenario=momentum_before_noise,
    ),
    BlindFault(
        name="norm-of-layers-overwritten",
        group=CLIPPING,
        library="opacus",
        text="Four parameters are clipped to 1 each, and max_grad_norm is set back to 1 for the noise.",
        why="An example contributes up to 2 with noise for 1. The twin clips to 0.5 each.",
        expected=r"layer|each (parameter|leaf|tensor)|per.parameter|max_grad_norm|norms?|sensitivity|"
        r"separately",
        words=r"layer|norm|clip",
        scenario=norm_of_layers_overwritten,
    ),
    BlindFault(
        name="own-mean-over-rows",
        group=CLIPPING,
        library="own step",
        text="Sum and noise are divided by the number of rows.",
        why="The scale of the noise in 400 coordinates reveals the number of rows, 16 or 15. The twin"
        " divides by 16.",
        expected=r"divi|number of (rows|examples)|a mean|batch size",
        words=r"divi|number of (rows|examples)|batch size",
        scenario=own_mean_over_rows,
    ),
    BlindFault(
        name="jax-sum-of-two-views",
        group=CLIPPING,
        library="jax",
        text="The clipped gradients of an image and of its mirror image are added.",
        why="An example contributes two clipped gradients, 2 norms. The twin averages the losses of both,"
        " before clipping.",
        expected=r"twice|two (rows|gradients)|double|several (rows|gradients)|augmentation|views",
        words=r"twice|two|norm|scal",
        scenario=jax_sum_of_two_views,
    ),
)
