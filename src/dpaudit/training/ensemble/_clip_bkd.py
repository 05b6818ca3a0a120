"""The canary that clipping hurts least (Jagielski et al. 2020, arXiv:2006.07709)."""

from __future__ import annotations

import torch
from torch import nn

from dpaudit.training.data import Dataset
from dpaudit.training.ensemble._example import Example

__all__ = ["clip_bkd"]


def clip_bkd(data: Dataset, model: nn.Module) -> Example:
    """An example where the data vary least, with the class that ``model`` finds least likely there.

    Its input is the right singular vector of the data with the smallest singular value, as long as the
    shortest example that is not zero. Nothing else in the data speaks for or against its class, so that what
    a model says about it comes from the canary. It may leave the range of the data's inputs.
    """
    inputs, _ = data.at(torch.arange(len(data)))
    rows = inputs.flatten(1)
    _, vectors = torch.linalg.eigh(rows.T.double() @ rows.double())  # by increasing singular value
    norms = rows.norm(dim=1)
    length = norms[norms > 0].min() if bool((norms > 0).any()) else torch.tensor(1.0)
    found = (vectors[:, 0].to(rows.dtype) * length).view(data.shape)
    model.eval()
    with torch.inference_mode():
        target = int(model(found[None])[0].argmin())
    return Example(found, target)
