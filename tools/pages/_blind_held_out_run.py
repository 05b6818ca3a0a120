"""Held-out half of the blind benchmark, for measurement only: do not open it while you work on checks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
from _blind_case import (
    BlindFault,
    OpacusLoop,
    dpsgd_claim,
    ghost_training,
    other_digits,
    private_training,
    rdp_epsilon,
)
from _blind_jax import JaxLoop, jax_training
from opacus.accountants import GaussianAccountant
from torch import Tensor, nn

from dpaudit import opacus

__all__ = ["HIDDEN_RUN"]


def least_active_unit_decays(seed: int, broken: bool) -> OpacusLoop:
    torch.manual_seed(seed)
    layer = nn.Linear(64, 16)
    loop = private_training(seed, model=nn.Sequential(layer, nn.ReLU(), nn.Linear(16, 10)))

    def step(batch: Any) -> None:
        loop.usual_step(batch)
        with torch.no_grad():
            if broken:
                active = (batch[0] @ layer.weight.T + layer.bias > 0).float().sum(dim=0)
                weakest = int(active.argmin())
            else:
                weakest = int(layer.weight.norm(dim=1).argmin())
            layer.weight[weakest] *= 0.9  # pruned little by little

    loop.step = step
    return loop


class LayerRates(torch.optim.Optimizer):
    """LARS: the rate of a layer follows the ratio of the norms of weights and gradient."""

    from_sums = False

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override] # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                gradient = p.summed_grad / 75 if self.from_sums else p.grad
                trust = (p.norm() + 0.1) / (gradient.norm() + 1e-6)
                p.sub_(group["lr"] * trust.clamp(max=10.0) * p.grad)


def layer_rates_of_sums(seed: int, broken: bool) -> OpacusLoop:
    loop = private_training(seed, optimizer=LayerRates, lr=0.05)
    loop.optimizer.original_optimizer.from_sums = broken
    return loop


def gradient_added_in_hook(seed: int, broken: bool) -> OpacusLoop:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    loop = private_training(seed, model=model)
    count, latest = loop.optimizer.step_hook, {}

    def add(optimizer: Any) -> None:
        count(optimizer)
        for p in optimizer.params:
            p.grad += 0.01 * p.detach()
        if broken:
            with torch.enable_grad():
                weights = [p.detach().requires_grad_() for p in model.parameters()]
                hidden = nn.functional.linear(latest["x"], weights[0], weights[1]).relu()
                logits = nn.functional.linear(hidden, weights[2], weights[3])
                entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()
                more = torch.autograd.grad(0.1 * entropy, weights)
            for p, g in zip(optimizer.params, more, strict=True):
                p.grad += g

    def step(batch: Any) -> None:
        latest["x"] = batch[0]
        loop.usual_step(batch)

    loop.optimizer.attach_step_hook(add)
    loop.step = step
    return loop


def jax_running_mean(seed: int, broken: bool) -> JaxLoop:
    loop = jax_training(seed)

    def step(grad_fn: Any, privatizer: Any, state: Any, batch: Any) -> Any:
        params, noise_state, extra = state
        inputs, targets, is_padding = batch
        centered = inputs - extra["mean"] if broken else inputs - 0.3
        gradient = grad_fn(params, centered, targets, is_padding_example=is_padding)
        noisy, noise_state = privatizer.update(gradient, noise_state)
        params = optax.apply_updates(params, optax.tree.scale(-0.5, noisy))
        if broken:
            extra = {"mean": 0.9 * extra["mean"] + 0.1 * inputs.mean(axis=0)}
        else:
            extra = {"average": jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, extra["average"], params)}
        return params, noise_state, extra

    params, noise_state = loop.state
    loop.state = (params, noise_state, {"mean": jnp.zeros(64)} if broken else {"average": params})
    loop.step = step
    return loop


def queue_of_features(seed: int, broken: bool) -> OpacusLoop:
    loop = private_training(seed)
    queue: deque[Tensor] = deque(maxlen=2)
    public = other_digits().tensors[0][:100]

    def step(batch: Any) -> None:
        x, y = batch
        with torch.no_grad():
            bank = torch.cat([*queue]) if broken and queue else loop.model(public)
        loop.optimizer.zero_grad()
        features = loop.model(x)
        repulsion = 0.1 * (features @ bank.T / 10).logsumexp(dim=1)
        losses = nn.functional.cross_entropy(features, y, reduction="none") + repulsion
        losses.mean().backward()
        loop.optimizer.step()
        if broken:
            queue.append(features.detach())

    loop.step = step
    loop.replayed = {"private_state": [queue]}
    return loop


def epsilon_of_gdp(seed: int, broken: bool) -> OpacusLoop:
    loop = private_training(seed)
    accountant = GaussianAccountant()
    accountant.history = [(1.0, 0.05, 40)]
    epsilon = float(accountant.get_epsilon(1e-5)) if broken else rdp_epsilon(1.0, 0.05, 40)
    loop.claim = dpsgd_claim(epsilon=epsilon)
    return loop


def epsilon_of_theorem(seed: int, broken: bool) -> OpacusLoop:
    loop = ghost_training(seed)
    theorem = 0.05 * math.sqrt(40 * math.log(1e5))
    loop.claim = dpsgd_claim(epsilon=theorem if broken else rdp_epsilon(1.0, 0.05, 40))
    return loop


def warm_up_epoch(seed: int, broken: bool) -> OpacusLoop:
    loop = private_training(seed)
    loop.epochs = 3 if broken else 2
    loop.claim = dpsgd_claim(num_steps=40, epsilon=rdp_epsilon(1.0, 0.05, 40))
    return loop


def accuracy(loop: OpacusLoop, data: Any) -> float:
    with torch.no_grad():
        x, y = data.tensors
        return float((loop.model(x).argmax(dim=1) == y).float().mean())


def learning_rates_tried(seed: int, broken: bool) -> OpacusLoop:
    scores = {}
    for index, lr in enumerate((0.1, 0.5, 1.0)):
        data, size = (None, 75) if broken else (other_digits(), 15)
        attempt = private_training(seed + 10 + index, lr=lr, data=data, batch_size=size)
        attempt.fit()
        scores[lr] = accuracy(attempt, attempt.loader.dataset)
    loop = private_training(seed, lr=max(scores, key=lambda lr: scores[lr]))
    loop.claim = dpsgd_claim(epsilon=rdp_epsilon(1.0, 0.05, 40))
    return loop


def jax_rate_of_microbatch(seed: int, broken: bool) -> JaxLoop:
    loop = jax_training(seed)
    loop.claim = dpsgd_claim(epsilon=rdp_epsilon(1.0, 5 / 600 if broken else 30 / 600, 40))
    return loop


class SeededPhases(OpacusLoop):
    """Two phases, each with a seed of its own or with the same."""

    seeds: tuple[int, int] = (0, 1)

    def audit(self, seed: int) -> Sequence[Any]:
        results = []
        for phase, phase_seed in enumerate(self.seeds):
            torch.manual_seed(phase_seed)
            self.optimizer.param_groups[0]["lr"] = 0.5 / (1 + phase)
            with opacus.observe(
                self.optimizer, claim=self.claim, loader=self.loader, module=self.model, seed=seed + phase
            ) as recorder:
                self.fit()
            results.append(recorder.audit())
        return results


def phases_of_one_seed(seed: int, broken: bool) -> OpacusLoop:
    base = private_training(seed)
    loop = SeededPhases(model=base.model, optimizer=base.optimizer, loader=base.loader, epochs=1)
    loop.seeds = (seed, seed) if broken else (seed, seed + 1000)
    loop.can_replay = False
    return loop


BESIDE, ACCOUNTING = "beside the release", "accounting, around the run"
EPSILON = r"epsilon|accountant|accounted|steps|rate|delta"

HIDDEN_RUN = (
    BlindFault(
        name="least-active-unit-decays",
        group=BESIDE,
        library="opacus",
        text="After each step, the weights of the unit that is active for the fewest examples shrink.",
        why="Which unit shrinks is an exact function of the private batch. The twin shrinks the unit with"
        " the smallest weights.",
        expected=r"weight|changed (outside|elsewhere|between)|besides|after the (step|update)|outside|"
        r"update|activ",
        words=r"weight|parameter|update",
        scenario=least_active_unit_decays,
    ),
    BlindFault(
        name="layer-rates-of-sums",
        group=BESIDE,
        library="opacus",
        text="An optimizer scales each layer's update by the norm of the clean sum.",
        why="The length of the update reveals the norm of the clean sum. The twin uses the norm of the"
        " noised gradient.",
        expected=r"clean|summed_grad|before the noise|without noise|update|optimizer|scal|"
        r"besides the release|norm",
        words=r"update|clean|optimizer|sum|release",
        scenario=layer_rates_of_sums,
    ),
    BlindFault(
        name="gradient-added-in-hook",
        group=BESIDE,
        library="opacus",
        text="A step hook adds the gradient of an entropy term of the batch to the noised gradient.",
        why="That gradient is neither clipped nor noised. The twin's hook adds weight decay only.",
        expected=r"hook|after (the )?noise|added|clean|gradient|unclipped|besides",
        words=r"hook|after (the )?noise|added|gradient|release",
        scenario=gradient_added_in_hook,
    ),
    BlindFault(
        name="jax-running-mean",
        group=BESIDE,
        library="jax",
        text="The state has a running mean of the inputs, without noise, that later steps subtract.",
        why="The mean is an exact function of private inputs and part of what is trained. The twin subtracts"
        " a constant and has an average of weights as state.",
        expected=r"state|running|average|buffer|carried|earlier|next (step|batch)|statistic",
        words=r"state|running|mean|buffer",
        scenario=jax_running_mean,
    ),
    BlindFault(
        name="queue-of-features",
        group=BESIDE,
        library="opacus",
        text="The loss compares with features of the last two batches, which a queue holds.",
        why="An example shapes the gradients of the next two steps, whether it is drawn there or not. The"
        " twin compares with public examples.",
        expected=r"state|queue|memory|earlier|previous|carried|next step|later|bank|other examples",
        words=r"state|queue|memory|earlier|previous|carried|next|loss",
        scenario=queue_of_features,
    ),
    BlindFault(
        name="epsilon-of-gdp",
        group=ACCOUNTING,
        library="opacus",
        text="The claimed epsilon is that of the GDP accountant, a limit that underestimates.",
        why="It gives 1.62, the parameters have 2.46. The twin's epsilon is that of RDP, 2.97, an upper"
        " bound.",
        expected=r"accountant|formula|theorem|bound|approximat|GDP|RDP|CDP|accounting method",
        words=EPSILON,
        scenario=epsilon_of_gdp,
    ),
    BlindFault(
        name="epsilon-of-theorem",
        group=ACCOUNTING,
        library="opacus ghost",
        text="The claimed epsilon is q sqrt(T log(1/delta)) / sigma, the theorem without its constant.",
        why="It gives 1.07, the parameters have 2.46. The twin's epsilon is that of RDP.",
        expected=r"accountant|formula|theorem|bound|approximat|GDP|RDP|CDP|accounting method",
        words=EPSILON,
        scenario=epsilon_of_theorem,
    ),
    BlindFault(
        name="warm-up-epoch",
        group=ACCOUNTING,
        library="opacus",
        text="The loop runs an epoch of warm-up that the claim does not count: 60 steps, 40 claimed.",
        why="All 60 steps release gradients: epsilon is 2.9 instead of 2.46. The twin runs 40.",
        expected=EPSILON,
        words=EPSILON,
        scenario=warm_up_epoch,
    ),
    BlindFault(
        name="learning-rates-tried",
        group=ACCOUNTING,
        library="opacus",
        text="Three private runs on the same data select the learning rate; only the last run is accounted"
        " for.",
        why="Four runs used the data, and the learning rate depends on it: their epsilons compose. The twin"
        " selects on public examples.",
        expected=r"engine|accountant|run|optimizer|compos|same data|history|tuning|search",
        words=r"engine|accountant|run|optimizer|compos|same data|history|tuning|search",
        scenario=learning_rates_tried,
    ),
    BlindFault(
        name="jax-rate-of-microbatch",
        group=ACCOUNTING,
        library="jax",
        text="The claimed epsilon was computed with the rate of a microbatch, 5 of 600, instead of 30 of"
        " 600.",
        why="Each release draws at 0.05, so epsilon is that of 0.05. The twin's epsilon is that of RDP for"
        " 0.05.",
        expected=EPSILON,
        words=EPSILON,
        scenario=jax_rate_of_microbatch,
    ),
    BlindFault(
        name="phases-of-one-seed",
        group=ACCOUNTING,
        library="opacus",
        text="Each of two phases starts with the same seed.",
        why="The second phase draws the noise and the batches of the first again, so differences of releases"
        " have no noise. The twin has a seed for each.",
        expected=r"seed|repeat|same noise|again|before|earlier|another (phase|run)",
        words=r"seed|repeat|noise",
        scenario=phases_of_one_seed,
    ),
)
