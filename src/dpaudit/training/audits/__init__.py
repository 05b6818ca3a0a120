"""Audits with gradients or examples inserted into the steps of a training run, scored in three ways."""

from dpaudit.training.audits._hooks import EndToEnd, OneRun, TwoBatches

__all__ = ["EndToEnd", "OneRun", "TwoBatches"]
