"""Audits of a training by gradients or examples that join its steps: three ways to look."""

from dpaudit.training.audits._end_to_end import EndToEnd
from dpaudit.training.audits._one_run import OneRun
from dpaudit.training.audits._two_batches import TwoBatches

__all__ = ["EndToEnd", "OneRun", "TwoBatches"]
