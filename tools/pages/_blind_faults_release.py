"""Development half of the blind benchmark: faults of the noise, of clipping and of the sum."""

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
    TokenClassifier,
    TorchNoise,
    hand_made_training,
    token_data,
)
from _blind_jax import JAX_BATCH, JaxLoop, jax_training
from opacus.optimizers import DPOptimizer, DPPerLayerOptimizer
from opacus.optimizers.optimizer import _mark_as_processed
from torch import Tensor, nn

__all__ = ["RELEASE"]


class SeededNoise(DPOptimizer):
    """Noise from a secret and the number of the step, so that a crashed run can be repeated."""

    per_parameter = False
    secret = 0
    num_steps = 0

    def add_noise(self) -> None:
        self.num_steps += 1
        generator = torch.Generator().manual_seed(self.secret + self.num_steps)
        for p in self.params:
            if self.per_parameter:
                generator.manual_seed(self.secret + self.num_steps)
            noise = torch.randn(p.shape, generator=generator) * self.noise_multiplier * self.max_grad_norm
            p.grad = p.summed_grad + noise
            _mark_as_processed(p.summed_grad)


def noise_seeded_per_parameter(seed: int, broken: bool) -> OpacusLoop:
    model = nn.Sequential(
        nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 10)
    )
    loop = hand_made_training(seed, SeededNoise, model=model)
    loop.optimizer.per_parameter = broken
    loop.optimizer.secret = int(torch.randint(2**40, ()))
    return loop


class HalfPrecision(DPOptimizer):
    """Saves memory: the release, or only its noise, is in bfloat16."""

    only_noise = False

    def add_noise(self) -> None:
        if not self.only_noise:
            super().add_noise()
            return
        for p in self.params:
            noise = torch.randn(p.shape, dtype=torch.bfloat16) * self.noise_multiplier * self.max_grad_norm
            p.grad = p.summed_grad + noise
            _mark_as_processed(p.summed_grad)

    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        if not self.pre_step():
            return None
        if not self.only_noise:
            for p in self.params:
                p.grad = p.grad.bfloat16().float()  # what the cast of a mixed-precision optimizer does
        return self.original_optimizer.step()


def noise_in_bfloat16(seed: int, broken: bool) -> OpacusLoop:
    loop = hand_made_training(seed, HalfPrecision)
    loop.optimizer.only_noise = broken
    return loop


class LayerNoise(DPPerLayerOptimizer):
    """Noise that follows the clipping norm of each parameter."""

    factor = 1.0

    def add_noise(self) -> None:
        for p, norm in zip(self.params, self.max_grad_norms, strict=True):
            std = self.factor * self.noise_multiplier * norm
            p.grad = p.summed_grad + std * torch.randn_like(p.summed_grad)
            _mark_as_processed(p.summed_grad)


def noise_of_each_layer(seed: int, broken: bool) -> OpacusLoop:
    loop = hand_made_training(seed, LayerNoise, max_grad_norm=[0.5, 0.5, 0.5, 0.5])
    loop.optimizer.factor = 1.0 if broken else 2.0  # the square root of the number of parameters
    return loop


class SparseEmbedding(DPOptimizer):
    """Keeps the gradient of embeddings sparse, or only that of the padding token."""

    by_gradient = False

    def add_noise(self) -> None:
        super().add_noise()
        for p in self.params:
            if p.shape == (60, 8) and self.by_gradient:
                used = p.summed_grad.abs().sum(dim=1, keepdim=True) > 0
                p.grad *= used

    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        if not self.pre_step():
            return None
        for p in self.params:
            if p.shape == (60, 8) and not self.by_gradient:
                p.grad[0] = 0.0  # the embedding of padding stays as it is
        return self.original_optimizer.step()


def noise_only_on_used_tokens(seed: int, broken: bool) -> OpacusLoop:
    torch.manual_seed(seed)
    loop = hand_made_training(seed, SparseEmbedding, model=TokenClassifier(), data=token_data(seed))
    loop.optimizer.by_gradient = broken
    return loop


def keyed_privatizer(seed: int, *, split: bool) -> optax.GradientTransformation:
    """Return a privatizer written by hand."""

    def update(sums: Any, key: Any, params: Any = None) -> Any:  # noqa: ARG001
        key, fresh = jax.random.split(key)
        leaves, tree = jax.tree.flatten(sums)
        keys = jax.random.split(fresh, len(leaves)) if split else [fresh] * len(leaves)
        noisy = [g + jax.random.normal(k, g.shape) / JAX_BATCH for g, k in zip(leaves, keys, strict=True)]
        return jax.tree.unflatten(tree, noisy), key

    return optax.GradientTransformation(lambda _: jax.random.key(seed), update)


def jax_key_shared_by_leaves(seed: int, broken: bool) -> JaxLoop:
    loop = jax_training(seed)
    loop.privatizer = keyed_privatizer(seed, split=not broken)
    params = loop.state[0]
    loop.state = (params, loop.privatizer.init(params))
    return loop


def own_noise_of_uniforms(seed: int, broken: bool) -> OwnStep:
    noise = NumpyNoise(seed)

    def gaussian(size: int) -> np.ndarray:
        if broken:
            return 2 * (noise.rng.random((3, size)).sum(axis=0) - 1.5)  # the central limit theorem
        return noise.rng.standard_normal((3, size)).sum(axis=0) / np.sqrt(3)

    def step(rows: np.ndarray) -> np.ndarray:
        clipped = rows / np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True))
        return clipped.sum(axis=0) + gaussian(rows.shape[1])

    return noise.own_step(step)


class ClassWeights(DPOptimizer):
    """Rare classes count more."""

    weights: Tensor | None = None

    def clip_and_accumulate(self) -> None:
        if self.weights is None:
            super().clip_and_accumulate()
            return
        rows = [g.flatten(1) for g in self.grad_samples]
        norms = torch.cat(rows, dim=1).norm(dim=1)
        factor = (self.max_grad_norm / (norms + 1e-6)).clamp(max=1.0) * self.weights
        for p, g in zip(self.params, self.grad_samples, strict=True):
            total = torch.einsum("i,i...", factor, g)
            p.summed_grad = total if p.summed_grad is None else p.summed_grad + total
            _mark_as_processed(p.grad_sample)


def weights_after_clipping(seed: int, broken: bool) -> OpacusLoop:
    loop = hand_made_training(seed, ClassWeights)
    class_weight = torch.tensor([1.0, 1, 1, 1, 1, 1, 1, 1, 3, 3])

    def step(batch: Any) -> None:
        x, y = batch
        weights = class_weight[y]
        loop.optimizer.zero_grad()
        losses = nn.functional.cross_entropy(loop.model(x), y, reduction="none")
        if broken:
            loop.optimizer.weights = weights
            losses.mean().backward()
        else:
            (weights * losses).mean().backward()
        loop.optimizer.step()

    loop.step = step
    return loop


class LargestLayer(DPOptimizer):
    """Clips with the norm of an example over all parameters."""

    order = 2.0

    def clip_and_accumulate(self) -> None:
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in self.grad_samples])
        norms = torch.linalg.vector_norm(norms, ord=self.order, dim=0)
        factor = (self.max_grad_norm / (norms + 1e-6)).clamp(max=1.0)
        for p, g in zip(self.params, self.grad_samples, strict=True):
            total = torch.tensordot(factor, g, dims=1)
            p.summed_grad = total if p.summed_grad is None else p.summed_grad + total
            _mark_as_processed(p.grad_sample)


def norm_of_largest_layer(seed: int, broken: bool) -> OpacusLoop:
    loop = hand_made_training(seed, LargestLayer)
    loop.optimizer.order = torch.inf if broken else 2.0
    return loop


class TopCoordinates(DPOptimizer):
    """Sends only the largest quarter of the coordinates, as gradient compression does."""

    before_noise = False

    @staticmethod
    def largest(values: Tensor) -> Tensor:
        count = max(1, values.numel() // 4)
        return values * (values.abs() >= values.abs().flatten().topk(count).values[-1])

    def add_noise(self) -> None:
        if self.before_noise:
            for p in self.params:
                p.summed_grad = self.largest(p.summed_grad)
        super().add_noise()

    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        if not self.pre_step():
            return None
        if not self.before_noise:
            for p in self.params:
                p.grad = self.largest(p.grad)
        return self.original_optimizer.step()


def top_coordinates_of_sum(seed: int, broken: bool) -> OpacusLoop:
    loop = hand_made_training(seed, TopCoordinates)
    loop.optimizer.before_noise = broken
    return loop


def jax_layer_rates_before_noise(seed: int, broken: bool) -> JaxLoop:
    loop = jax_training(seed)

    def scaled(gradient: Any) -> Any:
        return {"first": gradient["first"], "second": 3.0 * gradient["second"]}

    def step(grad_fn: Any, privatizer: Any, state: Any, batch: Any) -> Any:
        params, noise_state = state
        inputs, targets, is_padding = batch
        gradient = grad_fn(params, inputs, targets, is_padding_example=is_padding)
        if broken:
            gradient, noise_state = privatizer.update(scaled(gradient), noise_state)
        else:
            gradient, noise_state = privatizer.update(gradient, noise_state)
            gradient = scaled(gradient)
        return optax.apply_updates(params, optax.tree.scale(-0.3, gradient)), noise_state

    loop.step = step
    return loop


def own_norm_over_wrong_axis(seed: int, broken: bool) -> OwnStep:
    noise = TorchNoise(seed)

    def step(rows: Tensor) -> Tensor:
        norms = rows.norm(dim=0 if broken else 1, keepdim=True)
        clipped = rows / norms.clamp(min=1.0)
        return clipped.sum(dim=0) + torch.randn(rows.shape[1], generator=noise.generator)

    return noise.own_step(step)


def own_clipping_of_coordinates(seed: int, broken: bool) -> OwnStep:
    noise = NumpyNoise(seed)

    def step(rows: np.ndarray) -> np.ndarray:
        clipped = np.clip(rows, -1.0, 1.0)
        if not broken:
            clipped /= np.maximum(1.0, np.linalg.norm(clipped, axis=1, keepdims=True))
        return clipped.sum(axis=0) + noise.rng.standard_normal(rows.shape[1])

    return noise.own_step(step)


NOISE, CLIPPING = "noise", "clipping and sum"

RELEASE = (
    BlindFault(
        name="noise-seeded-per-parameter",
        group=NOISE,
        library="opacus",
        text="The noise generator is seeded again for each parameter, with the same number.",
        why="Two layers of one shape get equal noise: their difference is released without any. The twin"
        " seeds one stream per step from a secret that is not published.",
        expected=r"same (prng )?key|same seed|same (random )?(noise|numbers)|one stream|share",
        words=r"noise|seed",
        scenario=noise_seeded_per_parameter,
    ),
    BlindFault(
        name="noise-in-bfloat16",
        group=NOISE,
        library="opacus",
        text="Noise is drawn in bfloat16 and added to a float32 sum.",
        why="The noise has 8 significant bits, so the low bits of the release are those of the sum. The twin"
        " rounds the noised sum, which is post-processing.",
        expected=r"bfloat16|half|precision|grid|round|resolution|coarse|few(er)? (different )?(values|bits)|"
        r"discrete",
        words=r"precision|grid|round|dtype|bits",
        scenario=noise_in_bfloat16,
    ),
    BlindFault(
        name="noise-of-each-layer",
        group=NOISE,
        library="opacus",
        text="With per-layer clipping, each parameter gets noise for its own norm only.",
        why="Four norms, each with noise multiplier 1, compose to mu = 2 instead of 1. The twin's factor of"
        " 2, the square root of 4, gives noise for the norm of all together.",
        expected=r"layer|per.parameter|own norm|each (parameter|leaf|tensor)|some (parameters|leaves|"
        r"tensors)|leaf",
        words=r"layer|norm|noise",
        scenario=noise_of_each_layer,
    ),
    BlindFault(
        name="noise-on-used-tokens",
        group=NOISE,
        library="opacus",
        text="Embeddings of tokens that no example of the batch contains get no noise.",
        why="A row that is exactly zero says that the token is in no text of the batch. The twin zeroes a"
        " fixed row, whatever the batch.",
        expected=r"zero|without noise|no noise|depend.* (gradient|sum|batch|data)|mask|sparse|"
        r"some coordinates",
        words=r"zero|noise|mask",
        scenario=noise_only_on_used_tokens,
    ),
    BlindFault(
        name="jax-key-shared-by-leaves",
        group=NOISE,
        library="jax",
        text="jax.tree.map uses one key for all parameters.",
        why="JAX's counter-based generator returns the same prefix for both shapes, so the noise of the"
        " second leaf is part of that of the first. The twin splits the key per leaf.",
        expected=r"same (prng )?key|same seed|share|same (random )?(noise|numbers)",
        words=r"noise|key",
        scenario=jax_key_shared_by_leaves,
    ),
    BlindFault(
        name="own-noise-of-uniforms",
        group=NOISE,
        library="own step",
        text="Gaussian noise is approximated by the sum of three uniform numbers.",
        why="The noise never exceeds 3: a shift by 1 leaves its range with probability 2 %, above delta. The"
        " twin adds three Gaussians, which is Gaussian.",
        expected=r"not (a )?gaussian|not normal|distribution|uniform|tails?|bounded|truncat|clipped noise",
        words=r"gaussian|normal|tail|distribution",
        scenario=own_noise_of_uniforms,
    ),
    BlindFault(
        name="weights-after-clipping",
        group=CLIPPING,
        library="opacus",
        text="Class weights of 3 multiply the clipped gradients of rare classes.",
        why="An example of class 8 or 9 contributes up to 3 clipping norms. The twin weights the loss,"
        " before clipping.",
        expected=r"weight|scaled|multipl|after clipping|more than|longer",
        words=r"weight|norm|sum|long",
        scenario=weights_after_clipping,
    ),
    BlindFault(
        name="norm-of-largest-layer",
        group=CLIPPING,
        library="opacus",
        text="The norm of an example is the largest norm of its parameters instead of that of all together.",
        why="With four parameters, a clipped gradient is up to twice as long as the norm. The twin takes the"
        " 2-norm of the norms, which is the norm of the whole.",
        expected=r"max|largest|per.(layer|parameter)|each (layer|parameter|leaf|tensor)|leaves out|"
        r"several parameters|separately",
        words=r"norm|clip",
        scenario=norm_of_largest_layer,
    ),
    BlindFault(
        name="top-coordinates-of-sum",
        group=CLIPPING,
        library="opacus",
        text="Only the largest quarter of the clean sum is kept, then noise is added.",
        why="One example changes which coordinates are kept, each by the size of the threshold: measured,"
        " the sum moves by several clipping norms. The twin selects after the noise.",
        expected=r"top|largest|select|spars|zeroe?d|threshold|small (coordinates|values)|not linear|"
        r"set to zero",
        words=r"sum|select|spars|zero",
        scenario=top_coordinates_of_sum,
    ),
    BlindFault(
        name="jax-layer-rates-before-noise",
        group=CLIPPING,
        library="jax",
        text="A learning rate factor of 3 for one layer multiplies the sum before the noise.",
        why="The contribution of an example to that layer is up to 3 clipping norms. The twin multiplies"
        " after the noise.",
        expected=r"scaled|scaling|factor|multiplied|multiplier|learning rate",
        words=r"scal|factor|multipl|norm",
        scenario=jax_layer_rates_before_noise,
    ),
    BlindFault(
        name="own-norm-over-wrong-axis",
        group=CLIPPING,
        library="own step",
        text="Norms are computed over the examples (dim=0) instead of over the parameters.",
        why="A row of large entries keeps a value of about 1 in each of 400 coordinates, a norm of 20. The"
        " twin uses dim=1.",
        expected=r"axis|dim=|over the examples|column|other (examples|rows)|together",
        words=r"clip|norm|axis",
        scenario=own_norm_over_wrong_axis,
    ),
    BlindFault(
        name="own-clipping-of-coordinates",
        group=CLIPPING,
        library="own step",
        text="Each coordinate is clipped to the norm, instead of each row.",
        why="A row may be 20 norms long in 400 coordinates. The twin clips the norm after the coordinates.",
        expected=r"coordinate|element|entr(y|ies)|each (number|value)|infinity|max(imum)? norm|shape|"
        r"direction",
        words=r"clip|norm|coordinate",
        scenario=own_clipping_of_coordinates,
    ),
)
