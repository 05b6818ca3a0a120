"""How strongly a model's outputs say that it was trained with an example."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Score", "log_odds", "negative_loss"]

Score = Callable[[Tensor, int], Tensor]
"""From logits (models x classes) and a class to one number for each model; larger means "present"."""


def log_odds(logits: Tensor, target: int) -> Tensor:
    """log(p / (1 - p)) of the class: its logit less the logsumexp of the others.

    Carlini et al. 2022 (arXiv:2112.03570) found it near normal. It is never computed by way of p, which
    rounds to 1 where a model is sure.

    >>> log_odds(torch.tensor([[100.0, 0.0], [0.0, 0.0]]), target=0)
    tensor([100.,   0.], dtype=torch.float64)
    """
    others = logits.double()
    own = others[:, target].clone()
    rest = torch.cat([others[:, :target], others[:, target + 1 :]], dim=1)
    return own - rest.logsumexp(dim=1)


def negative_loss(logits: Tensor, target: int) -> Tensor:
    """Minus the cross-entropy: the logarithm of the class's probability."""
    return logits.double().log_softmax(dim=1)[:, target]
