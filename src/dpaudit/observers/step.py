"""Audits of any step: a function from gradients, or from a loss and a batch, to a privatised gradient."""

from dpaudit.observers._loss_step import observe_loss_step
from dpaudit.observers._replay import Sensitivity, replay_step
from dpaudit.observers._step import observe_step

__all__ = ["Sensitivity", "observe_loss_step", "observe_step", "replay_step"]
