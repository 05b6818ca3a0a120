"""What a model says of the canary."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpaudit.errors import InputError

__all__ = ["log_odds"]


def log_odds(model: Any, example: Any, label: int) -> float:
    """The logarithm of p / (1 - p), with p the probability of the label (Carlini et al. 2022).

    From the logits it is finite even where p is rounded to 1.

    >>> log_odds(lambda batch: [[100.0, 0.0, 0.0]], [0.5], 0)
    99.30685281944005
    """
    logits = _logits(model, example)
    if logits.ndim != 1 or not 0 <= label < len(logits) or len(logits) < 2:
        raise InputError(
            f"Expected a model that gives one logit for each class, got shape {logits.shape} for "
            f"class {label}."
        )
    with np.errstate(invalid="ignore"):  # the score of a model that has diverged is not finite, which is told
        return float(logits[label] - np.logaddexp.reduce(np.delete(logits, label)))


def _logits(model: Any, example: Any) -> NDArray[np.float64]:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        return _array(model(np.asarray(example)[None]))
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            place = next(iter(model.parameters()), torch.empty(0))
            return _array(model(torch.as_tensor(example, device=place.device)[None]).cpu())
    finally:
        model.train(was_training)


def _array(logits: Any) -> NDArray[np.float64]:
    """The logits of the only example of a batch."""
    found = np.asarray(logits, dtype=np.float64)
    return found[0] if found.ndim > 1 and len(found) == 1 else found
