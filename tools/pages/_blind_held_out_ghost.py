"""Held-out half of the blind benchmark, for measurement only: do not open it while you work on checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from _blind_case import BlindFault, OpacusLoop, dpsgd_claim, ghost_training
from opacus.grad_sample import register_norm_sampler
from opacus.schedulers import ExponentialGradClip
from torch import Tensor, nn

__all__ = ["HIDDEN_GHOST"]


class RowLinear(nn.Module):
    """A linear layer for each position."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / 16)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class RowLinearFast(RowLinear):
    """The same layer, with another norm sampler."""


@register_norm_sampler(RowLinear)
def row_norm(layer: RowLinear, activations: list[Tensor], backprops: Tensor) -> dict[Any, Tensor]:
    inputs = torch.einsum("nik,njk->nij", activations[0], activations[0])
    outputs = torch.einsum("nik,njk->nij", backprops, backprops)
    return {layer.weight: (inputs * outputs).sum(dim=(1, 2)).clamp(min=0).sqrt()}


@register_norm_sampler(RowLinearFast)
def row_norm_fast(layer: RowLinearFast, activations: list[Tensor], backprops: Tensor) -> dict[Any, Tensor]:
    squares = activations[0].square().sum(dim=2) * backprops.square().sum(dim=2)
    return {layer.weight: squares.sum(dim=1).sqrt()}


class MeanOfRows(nn.Module):
    """The mean over positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh().mean(dim=1)


def positions_added_in_squares(seed: int, broken: bool) -> OpacusLoop:
    torch.manual_seed(seed)
    layer = RowLinearFast(8, 16) if broken else RowLinear(8, 16)
    model = nn.Sequential(nn.Unflatten(1, (8, 8)), layer, MeanOfRows(), nn.Linear(16, 10))
    return ghost_training(seed, model=model, max_grad_norm=0.3, lr=1.5)


def norm_scheduled_in_optimizer(seed: int, broken: bool) -> OpacusLoop:
    loop = ghost_training(seed)
    schedule = ExponentialGradClip(loop.optimizer, gamma=0.95)

    def step(batch: Any) -> None:
        loop.usual_step(batch)
        schedule.step()
        if not broken:
            loop.model.max_grad_norm = loop.optimizer.max_grad_norm

    loop.step = step
    loop.replayed = {"published_state": [schedule]}
    return loop


class TwoExits(nn.Module):
    """Logits of the last features and, by the same head or by another, of earlier ones."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 10)
        self.early = None if shared else nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        features = self.first(x).tanh()
        if self.early is None:
            early = nn.functional.linear(features, self.head.weight)
        else:
            early = self.early(features)
        logits: Tensor = self.head(self.second(features).tanh()) + 2.0 * early
        return logits


def head_used_twice(seed: int, broken: bool) -> OpacusLoop:
    torch.manual_seed(seed)
    return ghost_training(seed, model=TwoExits(shared=broken), lr=0.3)


class TwoPhases(OpacusLoop):
    """First the head, then all layers."""

    wrap_again = True

    def audit(self, seed: int) -> Sequence[Any]:
        results = list(super().audit(seed))
        loop = self.second_phase(seed)
        return results + list(OpacusLoop.audit(loop, seed + 1))

    def second_phase(self, seed: int) -> OpacusLoop:
        inner = self.model._module
        if self.wrap_again:
            self.model.remove_hooks()
            inner.requires_grad_(True)
            again = ghost_training(seed + 50, model=inner, max_grad_norm=0.5)
            again.claim, again.epochs = self.claim, self.epochs
            return again
        inner.requires_grad_(True)
        for p in inner[0].parameters():
            p.summed_grad = None
        return self


def layer_unfrozen(seed: int, broken: bool) -> OpacusLoop:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    model[0].requires_grad_(False)
    base = ghost_training(seed, model=model, max_grad_norm=0.5)
    loop = TwoPhases(**{name: getattr(base, name) for name in ("model", "optimizer", "loader", "criterion")})
    loop.wrap_again = not broken
    loop.claim, loop.epochs, loop.can_replay = dpsgd_claim(num_steps=40), 1, False
    return loop


def second_pass_scaled(seed: int, broken: bool) -> OpacusLoop:
    loop = ghost_training(seed, lr=0.1)
    scale = 8.0  # small gradients shall not underflow

    def step(batch: Any) -> None:
        x, y = batch
        loop.optimizer.zero_grad()
        losses = loop.criterion(loop.model(x), y).loss_per_sample
        losses.mean().backward(retain_graph=True)
        loop.optimizer.zero_grad()
        coefficients = loop.model.get_clipping_coef()
        loop.model.disable_hooks()
        (scale * coefficients * losses).sum().backward()
        loop.model.enable_hooks()
        if not broken:
            for p in loop.model.parameters():
                p.grad /= scale
        loop.optimizer.step()

    loop.step = step
    return loop


NORMS = "ghost norms"
CAUSES = (
    r"norm sampler|ghost|norm.*(differ|another|wrong|smaller|true|too (small|short))|register|functional|tied"
)
WORDS = r"norm|clip|ghost|one example"

HIDDEN_GHOST = (
    BlindFault(
        name="positions-added-in-squares",
        group=NORMS,
        library="opacus ghost",
        text="A norm sampler adds the squared norms of positions instead of taking the norm of their sum.",
        why="Positions of similar gradients add up; measured, one example is 42 % longer than allowed. The"
        " twin uses the products of all pairs.",
        expected=CAUSES + r"|position|sequence",
        words=WORDS,
        scenario=positions_added_in_squares,
    ),
    BlindFault(
        name="norm-scheduled-in-optimizer",
        group=NORMS,
        library="opacus ghost",
        text="A scheduler lowers the clipping norm of the optimizer; the module still clips to the first"
        " one.",
        why="Noise follows the optimizer's norm, 13 % of the module's after 40 steps. The twin sets both.",
        expected=r"max_grad_norm|clipping norm|schedul|clipped (at|to)|another norm|module|two norms|"
        r"than the noise",
        words=r"norm|schedul",
        scenario=norm_scheduled_in_optimizer,
    ),
    BlindFault(
        name="head-used-twice",
        group=NORMS,
        library="opacus ghost",
        text="An early exit uses the weight of the head by a function call, which has no hook.",
        why="The norm of the head's gradient lacks that part; a batch of one is longer than the norm. The"
        " twin has two heads.",
        expected=CAUSES + r"|shared|twice|hook",
        words=WORDS,
        scenario=head_used_twice,
    ),
    BlindFault(
        name="layer-unfrozen",
        group=NORMS,
        library="opacus ghost",
        text="A layer is unfrozen after make_private, so its gradient is not part of the norm.",
        why="Hooks and the list of parameters were set up without it: its gradient is scaled by the norm of"
        " the others only. The twin wraps the model again.",
        expected=r"leaves out|left out|frozen|unfroz|freez|after make_private|some parameters|not part",
        words=WORDS + r"|froz|freez",
        scenario=layer_unfrozen,
    ),
    BlindFault(
        name="second-pass-scaled",
        group=NORMS,
        library="opacus ghost",
        text="The second backward pass is scaled by 8 against underflow, and never scaled back.",
        why="The sum of clipped gradients is 8 times as long as allowed. The twin divides by 8 before the"
        " noise.",
        expected=r"scaled|scaling|factor|multipli|loss scale|second (pass|backward)",
        words=WORDS + r"|scal",
        scenario=second_pass_scaled,
    ),
)
