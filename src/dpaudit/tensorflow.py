"""Audits of training with TF Privacy: a short path to ``dpaudit.observers.tensorflow``."""
# ruff: noqa: F403  # the same names

from dpaudit.observers.tensorflow import *
from dpaudit.observers.tensorflow import __all__  # noqa: F401
