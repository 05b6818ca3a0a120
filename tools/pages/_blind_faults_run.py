"""Development half of the blind benchmark: beside the release, accounting, and around the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from _blind_case import (
    BlindFault,
    NumpyNoise,
    OpacusLoop,
    OwnStep,
    digits_data,
    dpsgd_claim,
    hand_made_training,
    other_digits,
    private_training,
    rdp_epsilon,
)
from _blind_jax import JaxLoop, jax_training
from opacus import PrivacyEngine
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils.data import DataLoader

__all__ = ["RUN"]


class Centered(nn.Module):
    """Subtracts what features were on average in earlier batches; or a constant, faded in."""

    def __init__(self, width: int, *, from_batches: bool) -> None:
        super().__init__()
        self.mean = torch.zeros(width)
        self.num_calls = 0
        self.from_batches = from_batches

    def forward(self, x: Tensor) -> Tensor:
        mean = self.mean
        if self.training and self.from_batches:
            self.mean = 0.9 * mean + 0.1 * x.detach().mean(dim=0)
        elif self.training:
            self.num_calls += 1
            self.mean = torch.full_like(mean, 0.3 * min(1.0, self.num_calls / 20))
        return x - mean


def running_mean_of_features(seed: int, broken: bool) -> OpacusLoop:
    torch.manual_seed(seed)
    layer = Centered(64, from_batches=broken)
    return private_training(seed, model=nn.Sequential(layer, nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)))


class SecondMoments(torch.optim.Optimizer):
    """Divides the gradient by the root of a running mean of its squares."""

    from_sums = False

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override] # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                seen = p.summed_grad / 75 if self.from_sums else p.grad
                moment = self.state[p].setdefault("moment", torch.full_like(p, 1e-3))
                moment.mul_(0.9).addcmul_(seen, seen, value=0.1)
                p.sub_(group["lr"] * p.grad / (moment.sqrt() + 1e-3))


def second_moments_of_sums(seed: int, broken: bool) -> OpacusLoop:
    loop = private_training(seed, optimizer=SecondMoments, lr=0.01)
    loop.optimizer.original_optimizer.from_sums = broken
    return loop


def jax_update_where_signs_agree(seed: int, broken: bool) -> JaxLoop:
    loop = jax_training(seed)

    def step(grad_fn: Any, privatizer: Any, state: Any, batch: Any) -> Any:
        params, noise_state, momentum = state
        inputs, targets, is_padding = batch
        gradient = grad_fn(params, inputs, targets, is_padding_example=is_padding)
        noisy, noise_state = privatizer.update(gradient, noise_state)
        guide = gradient if broken else momentum
        update = jax.tree.map(lambda n, g: jnp.where(n * g >= 0, n, 0.0), noisy, guide)
        momentum = jax.tree.map(lambda m, n: 0.9 * m + 0.1 * n, momentum, noisy)
        return optax.apply_updates(params, optax.tree.scale(-0.5, update)), noise_state, momentum

    params, noise_state = loop.state
    loop.state = (params, noise_state, jax.tree.map(jnp.zeros_like, params))
    loop.step = step
    return loop


def temperature_of_second_optimizer(seed: int, broken: bool) -> OpacusLoop:
    loop = private_training(seed)
    log_temperature = nn.Parameter(torch.zeros(()))
    calibration = torch.optim.SGD([log_temperature], lr=0.1)
    public = other_digits().tensors

    def step(batch: Any) -> None:
        x, y = batch
        loop.optimizer.zero_grad()
        calibration.zero_grad()
        scale = log_temperature.exp() if broken else log_temperature.exp().detach()
        nn.functional.cross_entropy(loop.model(x) * scale, y).backward()
        if not broken:
            with torch.no_grad():
                logits = loop.model(public[0])
            nn.functional.cross_entropy(logits * log_temperature.exp(), public[1]).backward()
        loop.optimizer.step()
        calibration.step()

    loop.step = step
    loop.replayed = {"other_optimizers": [calibration]}
    return loop


class FollowingNorm(DPOptimizer):
    """A clipping norm that changes from step to step."""

    from_norms = False

    def clip_and_accumulate(self) -> None:
        if self.from_norms and len(self.grad_samples[0]):
            norms = torch.cat([g.flatten(1) for g in self.grad_samples], dim=1).norm(dim=1)
            self.max_grad_norm = float(0.9 * self.max_grad_norm + 0.1 * norms.median())
        else:
            self.max_grad_norm *= 0.99
        super().clip_and_accumulate()


def norm_follows_median(seed: int, broken: bool) -> OpacusLoop:
    loop = hand_made_training(seed, FollowingNorm)
    loop.optimizer.from_norms = broken
    return loop


def own_error_feedback(seed: int, broken: bool) -> OwnStep:
    noise = NumpyNoise(seed)
    carry: dict[str, Any] = {"rest": 0.0}

    def step(rows: np.ndarray) -> np.ndarray:
        clipped = rows / np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True))
        total = clipped.sum(axis=0)
        if broken:  # what clipping took away is not lost
            total = total + 0.5 * carry["rest"]
            carry["rest"] = (rows - clipped).sum(axis=0)
            return total + noise.rng.standard_normal(rows.shape[1])
        release = total + noise.rng.standard_normal(rows.shape[1]) + carry["rest"]
        rounded = np.round(release, 2)
        carry["rest"] = release - rounded
        return rounded

    def reseed() -> None:
        noise.reseed()
        carry["rest"] = 0.0

    case = noise.own_step(step)
    case.reseed = reseed
    return case


def more_epochs_than_planned(seed: int, broken: bool) -> OpacusLoop:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    epochs = 4 if broken else 2
    private, optimizer, loader = PrivacyEngine().make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(digits_data(), batch_size=75),
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=2,
        max_grad_norm=1.0,
    )
    claim = dpsgd_claim(noise_multiplier=optimizer.noise_multiplier, num_steps=20 * epochs, epsilon=3.0)
    return OpacusLoop(model=private, optimizer=optimizer, loader=loader, claim=claim, epochs=epochs)


def second_phase_only(seed: int, broken: bool) -> OpacusLoop:
    first = private_training(seed, data=None if broken else other_digits(), batch_size=75 if broken else 15)
    for _ in range(2):
        for batch in first.loader:
            first.train_step(batch)
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    model.load_state_dict(first.model._module.state_dict())
    loop = private_training(seed + 100, model=model)
    loop.claim = dpsgd_claim(epsilon=rdp_epsilon(1.0, 0.05, 40))
    return loop


def jax_epsilon_of_epochs(seed: int, broken: bool) -> JaxLoop:
    loop = jax_training(seed)
    num_steps = 2 if broken else 40
    loop.claim = dpsgd_claim(epsilon=rdp_epsilon(1.0, 0.05, num_steps))
    return loop


def rate_of_all_data(seed: int, broken: bool) -> OpacusLoop:
    loop = private_training(seed)
    rate = 75 / 1797 if broken else 75 / 1500
    loop.claim = dpsgd_claim(sample_rate=rate, epsilon=rdp_epsilon(1.0, rate, 40))
    return loop


class Standardized(nn.Module):
    """Standardizes inputs."""

    def __init__(self, mean: Tensor, deviation: Tensor) -> None:
        super().__init__()
        self.mean, self.deviation = mean, deviation

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.deviation


def standardized_by_private_data(seed: int, broken: bool) -> OpacusLoop:
    torch.manual_seed(seed)
    inputs = (digits_data() if broken else other_digits()).tensors[0]
    layer = Standardized(inputs.mean(dim=0), inputs.std(dim=0) + 0.1)
    return private_training(seed, model=nn.Sequential(layer, nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)))


def own_epsilon_of_amplified_zcdp(seed: int, broken: bool) -> OwnStep:
    noise = NumpyNoise(seed)

    def step(rows: np.ndarray) -> np.ndarray:
        clipped = rows / np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True))
        return clipped.sum(axis=0) + 0.8 * noise.rng.standard_normal(rows.shape[1])

    rho = 1000 * 0.01**2 / (2 * 0.8**2)  # as if sampling multiplied the rho of zCDP by the squared rate
    epsilon = rho + 2 * math.sqrt(rho * math.log(1e5)) if broken else rdp_epsilon(0.8, 0.01, 1000)
    claim = dpsgd_claim(noise_multiplier=0.8, sample_rate=0.01, num_steps=1000, epsilon=epsilon)
    return noise.own_step(step, claim=claim)


BESIDE, ACCOUNTING = "beside the release", "accounting, around the run"
EPSILON = r"epsilon|accountant|accounted|steps|rate|delta"

RUN = (
    BlindFault(
        name="running-mean-of-features",
        group=BESIDE,
        library="opacus",
        text="A layer subtracts a running mean of the inputs of earlier batches, updated in forward().",
        why="The mean is computed from private inputs without noise, is part of the model and shapes later"
        " steps. The twin fades in a constant.",
        expected=r"buffer|running|state|attribute|mean|forward|carried|earlier batch|kept",
        words=r"buffer|state|forward|attribute|other examples|changes",
        scenario=running_mean_of_features,
    ),
    BlindFault(
        name="second-moments-of-sums",
        group=BESIDE,
        library="opacus",
        text="An adaptive optimizer estimates second moments from the clean sums.",
        why="The update is the release divided by a function of the clean sums: a small moment shows that"
        " the sum is small. The twin uses the noised gradient.",
        expected=r"clean|summed_grad|before the noise|without noise|update|moment|optimizer|"
        r"besides the release",
        words=r"update|clean|optimizer|sum|release",
        scenario=second_moments_of_sums,
    ),
    BlindFault(
        name="jax-update-where-signs-agree",
        group=BESIDE,
        library="jax",
        text="The update keeps only coordinates whose noisy sign agrees with that of the clean gradient.",
        why="A coordinate that stays as it was reveals the sign of the clean sum. The twin compares with a"
        " momentum of noisy gradients.",
        expected=r"mask|sign|update (is|are)? ?(scaled|computed|selected)|compared|clean (gradient|sum)",
        words=r"update|clean|mask|weights|release",
        scenario=jax_update_where_signs_agree,
    ),
    BlindFault(
        name="temperature-of-second-optimizer",
        group=BESIDE,
        library="opacus",
        text="A second optimizer trains a temperature on the private loss, without noise.",
        why="The temperature follows exact gradients of private batches. The twin trains it on public"
        " examples.",
        expected=r"optimizer|without noise|gradient|outside|parameter.*(not|other)|temperature|second|loss",
        words=r"optimizer|parameter|weights|other",
        scenario=temperature_of_second_optimizer,
    ),
    BlindFault(
        name="norm-follows-median",
        group=BESIDE,
        library="opacus",
        text="The clipping norm follows the median norm of the batch, without noise.",
        why="The noise level and the norm reveal the median exactly. The twin decays the norm by a constant"
        " factor.",
        expected=r"max_grad_norm|median|computed from|depend|adaptive|norm (changes|follows)|data",
        words=r"clipping norm|max_grad_norm|norm",
        scenario=norm_follows_median,
    ),
    BlindFault(
        name="own-error-feedback",
        group=BESIDE,
        library="own step",
        text="What clipping removed from the rows is added to the sum of the next step.",
        why="The rest of a row may be arbitrarily long and enters the next sum unclipped. The twin feeds"
        " back what rounding removed from the release.",
        expected=r"state|earlier|previous|left.?over|another step|step before|carried|kept|next step|memory|"
        r"later",
        words=r"state|step|carried|earlier|previous",
        scenario=own_error_feedback,
    ),
    BlindFault(
        name="more-epochs-than-planned",
        group=ACCOUNTING,
        library="opacus",
        text="make_private_with_epsilon plans 2 epochs, the loop runs 4, and the target epsilon of 3 is"
        " claimed.",
        why="The noise is that of 40 steps, but 80 are run: epsilon is 3.8. The twin runs 2 epochs.",
        expected=EPSILON,
        words=EPSILON,
        scenario=more_epochs_than_planned,
    ),
    BlindFault(
        name="second-phase-only",
        group=ACCOUNTING,
        library="opacus",
        text="A second phase on the same data has an engine of its own; only its epsilon is claimed.",
        why="The released model depends on 80 steps on these data, 40 are claimed. In the twin the first"
        " phase used other examples, so that each example is in one phase.",
        expected=r"engine|accountant|phase|optimizer|compos|other training|same data|history",
        words=r"engine|accountant|phase|optimizer|compos|other training|same data|history",
        scenario=second_phase_only,
    ),
    BlindFault(
        name="jax-epsilon-of-epochs",
        group=ACCOUNTING,
        library="jax",
        text="The claimed epsilon was computed for 2 epochs as if they were 2 steps.",
        why="It is that of 2 steps, the run has 40. The twin's epsilon is that of RDP for 40 steps, an upper"
        " bound.",
        expected=EPSILON,
        words=EPSILON,
        scenario=jax_epsilon_of_epochs,
    ),
    BlindFault(
        name="rate-of-all-data",
        group=ACCOUNTING,
        library="opacus",
        text="The claimed rate is 75 / 1,797, for all data, but only 1,500 examples are trained on.",
        why="Each example is drawn at 0.05, 20 % more often than claimed. The twin divides by 1,500.",
        expected=r"rate",
        words=r"rate",
        scenario=rate_of_all_data,
    ),
    BlindFault(
        name="standardized-by-private-data",
        group=ACCOUNTING,
        library="opacus",
        text="A layer standardizes inputs with the exact mean and deviation of the private data.",
        why="Mean and deviation are published with the model, without noise. The twin computes them from"
        " public examples.",
        expected=r"mean|standardi[sz]|normali[sz]|before (the )?training|statistic|buffer|"
        r"computed from the data",
        words=r"mean|standardi[sz]|normali[sz]|before (the )?training|statistic|computed from the data",
        scenario=standardized_by_private_data,
    ),
    BlindFault(
        name="own-epsilon-of-amplified-zcdp",
        group=ACCOUNTING,
        library="own step",
        text="The claimed epsilon multiplies the rho of zCDP by the squared sampling rate.",
        why="zCDP is not amplified like that: the formula gives 1.97, the parameters have 3.14. The twin's"
        " epsilon is that of RDP.",
        expected=r"accountant|formula|theorem|bound|approximat|GDP|RDP|CDP|accounting method",
        words=EPSILON,
        scenario=own_epsilon_of_amplified_zcdp,
    ),
)
