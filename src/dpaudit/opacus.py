"""Audits of training with Opacus: a short path to ``dpaudit.observers.opacus``."""
# ruff: noqa: F403  # the same names

from dpaudit.observers.opacus import *
from dpaudit.observers.opacus import __all__  # noqa: F401
