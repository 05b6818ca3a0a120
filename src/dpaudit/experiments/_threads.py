"""How torch uses the machine."""

from __future__ import annotations

import torch

__all__ = ["use_one_thread"]


def use_one_thread() -> None:
    """Two threads of torch that share a core with anything else wait for each other most of the time."""
    torch.set_num_threads(1)
