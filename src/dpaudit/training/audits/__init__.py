"""Audits of a training by gradients or examples that join its steps: three ways to score them."""

from dpaudit.training.audits._hooks import EndToEnd, OneRun, TwoBatches

__all__ = ["EndToEnd", "OneRun", "TwoBatches"]
