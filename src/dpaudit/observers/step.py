"""Audits of any step: a function from per-example gradients to a privatised gradient."""

from dpaudit.observers._replay import Sensitivity, replay_step
from dpaudit.observers._step import observe_step

__all__ = ["Sensitivity", "observe_step", "replay_step"]
