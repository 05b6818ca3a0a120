"""Audits of training with JAX Privacy and Keras: a short path to ``dpaudit.observers.jax_privacy``."""
# ruff: noqa: F403  # the same names

from dpaudit.observers.jax_privacy import *
from dpaudit.observers.jax_privacy import __all__  # noqa: F401
