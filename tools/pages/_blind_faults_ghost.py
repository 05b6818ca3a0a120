"""Development half of the blind benchmark: faults of ghost clipping."""

from __future__ import annotations

from typing import Any

import torch
from _blind_case import BlindFault, OpacusLoop, ghost_training, token_data
from opacus.grad_sample import register_norm_sampler
from torch import Tensor, nn

__all__ = ["GHOST"]


def parameter_hook(seed: int, broken: bool) -> OpacusLoop:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    loop = ghost_training(seed, model=model, lr=0.1)
    head = list(model[2].parameters())
    if broken:
        for parameter in head:
            parameter.register_hook(lambda gradient: 5 * gradient)
    else:
        sgd = loop.optimizer.original_optimizer
        sgd.param_groups[0]["params"] = list(model[0].parameters())
        sgd.add_param_group({"params": head, "lr": 0.5})
    return loop


def auxiliary_loss(seed: int, broken: bool) -> OpacusLoop:
    class WithPenalty(nn.Module):
        """Cross-entropy and a penalty on large logits."""

        reduction = "mean"

        def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
            penalty = 0.0 if broken else 0.1 * logits.logsumexp(dim=1).square()
            loss = nn.functional.cross_entropy(logits, targets, reduction="none") + penalty
            return loss if self.reduction == "none" else loss.mean()

    loop = ghost_training(seed, criterion=WithPenalty())

    def step(batch: Any) -> None:
        x, y = batch
        loop.optimizer.zero_grad()
        logits = loop.model(x)
        loop.criterion(logits, y).backward()
        if broken:
            (0.1 * loop.model(x).logsumexp(dim=1).square().mean()).backward()
        loop.optimizer.step()

    loop.step = step
    return loop


class Scaled(nn.Module):
    """A linear layer with a fixed multiplier of its output, as in muP."""

    forgets_multiplier = False

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / (4 * inputs**0.5))
        self.multiplier = 4.0

    def forward(self, x: Tensor) -> Tensor:
        return self.multiplier * nn.functional.linear(x, self.weight)


class ScaledForgetful(Scaled):
    """The same layer, with another norm sampler."""


@register_norm_sampler(Scaled)
def scaled_norm(layer: Scaled, activations: list[Tensor], backprops: Tensor) -> dict[Any, Tensor]:
    return {layer.weight: layer.multiplier * activations[0].norm(dim=1) * backprops.norm(dim=1)}


@register_norm_sampler(ScaledForgetful)
def scaled_norm_forgetful(
    layer: ScaledForgetful, activations: list[Tensor], backprops: Tensor
) -> dict[Any, Tensor]:
    return {layer.weight: activations[0].norm(dim=1) * backprops.norm(dim=1)}


def sampler_without_multiplier(seed: int, broken: bool) -> OpacusLoop:
    torch.manual_seed(seed)
    layer = ScaledForgetful if broken else Scaled
    return ghost_training(seed, model=nn.Sequential(layer(64, 16), nn.ReLU(), nn.Linear(16, 10)), lr=0.2)


def smallest_coefficient(seed: int, broken: bool) -> OpacusLoop:
    loop = ghost_training(seed, max_grad_norm=0.05, lr=4.0)

    def coefficient() -> Tensor:
        norms = loop.model.get_norm_sample()
        lowest = 0.1 if broken else 0.0  # an example shall never vanish
        return (loop.model.max_grad_norm / (norms + 1e-6)).clamp(min=lowest, max=1.0)

    loop.model.get_clipping_coef = coefficient
    return loop


class TokenSum(nn.Module):
    """The sum of the embeddings of a text."""

    def __init__(self, num_tokens: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_tokens, width) / 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.weight).sum(dim=1)


class TokenSumOnce(TokenSum):
    """The same layer, with another norm sampler."""


@register_norm_sampler(TokenSum)
def token_sum_norm(layer: TokenSum, activations: list[Tensor], backprops: Tensor) -> dict[Any, Tensor]:
    counts = nn.functional.one_hot(activations[0], len(layer.weight)).sum(dim=1)
    return {layer.weight: counts.float().norm(dim=1) * backprops.norm(dim=1)}


@register_norm_sampler(TokenSumOnce)
def token_sum_norm_once(
    layer: TokenSumOnce, activations: list[Tensor], backprops: Tensor
) -> dict[Any, Tensor]:
    length = activations[0].shape[1]
    return {layer.weight: length**0.5 * backprops.norm(dim=1)}


def repeated_tokens(seed: int, broken: bool) -> OpacusLoop:
    torch.manual_seed(seed)
    layer = TokenSumOnce(60, 8) if broken else TokenSum(60, 8)
    data = token_data(seed, length=24)
    return ghost_training(seed, model=nn.Sequential(layer, nn.Linear(8, 4)), data=data, max_grad_norm=0.2)


NORMS = "ghost norms"

GHOST = (
    BlindFault(
        name="ghost-parameter-hook",
        group=NORMS,
        library="opacus ghost",
        text="A hook on the parameters of the head multiplies their gradient by 5, as a learning rate"
        " factor.",
        why="Opacus computes norms from activations, before the hook, and clips with them: measured, a batch"
        " of one example has a sum of up to 5 norms. The twin has a group with five times the learning rate.",
        expected=r"hook|multiplier|learning rate|gradient.*(scaled|changed) after",
        words=r"norm|clip|ghost|one example",
        scenario=parameter_hook,
    ),
    BlindFault(
        name="ghost-auxiliary-loss",
        group=NORMS,
        library="opacus ghost",
        text="A penalty on the logits is a loss of its own, with its own backward() beside the private"
        " criterion.",
        why="Its gradient is added to p.grad without clipping. The twin's criterion contains the penalty,"
        " per example.",
        expected=r"loss|criterion|backward|unclipped|not clipped|bypass|beside|added to the sum after",
        words=r"loss|criterion|norm|clip|one example",
        scenario=auxiliary_loss,
    ),
    BlindFault(
        name="ghost-sampler-without-multiplier",
        group=NORMS,
        library="opacus ghost",
        text="The norm sampler of a layer forgets the factor 4 by which the layer multiplies its output.",
        why="The norm of that weight is 4 times too small, so an example contributes up to 4 norms. The"
        " twin's sampler has the factor.",
        expected=r"norm sampler|ghost|norm.*(differ|another|wrong|smaller|true|too (small|short))|register",
        words=r"norm|clip|ghost|one example",
        scenario=sampler_without_multiplier,
    ),
    BlindFault(
        name="ghost-smallest-coefficient",
        group=NORMS,
        library="opacus ghost",
        text="The clipping coefficient is at least 0.1, so that hard examples still count.",
        why="Gradients here have norms of 1 to 5, up to 100 times the norm of 0.05: a tenth of them is"
        " longer than allowed. The twin has no lower limit.",
        expected=r"coefficient|clamp|clipp|norm.*(differ|another|wrong|smaller|true)|lower limit|longer|"
        r"scaled",
        words=r"norm|clip|ghost|one example",
        scenario=smallest_coefficient,
    ),
    BlindFault(
        name="ghost-repeated-tokens",
        group=NORMS,
        library="opacus ghost",
        text="The norm sampler of an embedding sum treats a repeated token as several different ones.",
        why="A text of 24 equal tokens has a norm of 24, not of the square root of 24; measured, one example"
        " is 26 % longer than allowed. The twin counts tokens.",
        expected=r"norm sampler|ghost|norm.*(differ|another|wrong|smaller|true|too (small|short))|register|"
        r"repeat",
        words=r"norm|clip|ghost|one example",
        scenario=repeated_tokens,
    ),
)
