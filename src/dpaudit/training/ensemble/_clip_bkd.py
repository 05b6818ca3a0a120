"""The canary that clipping hurts least (Jagielski et al. 2020, arXiv:2006.07709)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpaudit.training.data import Dataset
from dpaudit.training.ensemble._example import Example

__all__ = ["clip_bkd"]

_ROUNDING = 1e-9  # of the largest squared singular value: what differs by less is equal
# a shorter part is mostly rounding; below a million features, one of the unit vectors has a longer one
_FAINT = 1e-3


def clip_bkd(data: Dataset, model: nn.Module) -> Example:
    """An example where the data vary least, with the class that ``model`` finds least likely there.

    Its input is the right singular vector of the data with the smallest singular value, as long as the
    shortest example that is not zero. Where several directions vary as little, as all do that fewer examples
    than features leave out, it is the one nearest to the vector of ones. Nothing else in the data speaks for
    or against its class, so that what a model says about it comes from the canary. It may leave the range of
    the data's inputs.
    """
    inputs, _ = data.at(torch.arange(len(data)))
    rows = inputs.flatten(1)
    squares, vectors = torch.linalg.eigh(rows.T.double() @ rows.double())  # by increasing singular value
    direction = _chosen(vectors[:, squares <= squares[0] + _ROUNDING * squares[-1]])
    norms = rows.norm(dim=1)
    length = norms[norms > 0].min() if bool((norms > 0).any()) else torch.tensor(1.0)
    found = (direction.to(rows.dtype) * length).view(data.shape)
    model.eval()
    with torch.inference_mode():
        target = int(model(found[None])[0].argmin())
    return Example(found, target)


def _chosen(space: Tensor) -> Tensor:
    """One direction of a space, whatever basis it is given by: that of a fixed vector's part in it."""
    fixed = torch.ones(len(space), dtype=space.dtype)
    parts = (space @ (space.T @ one) for one in (fixed, *torch.eye(len(space), dtype=space.dtype)))
    return nn.functional.normalize(next(part for part in parts if part.norm() > _FAINT), dim=0)
