"""Audits of training with JAX Privacy: loops with ``clipped_grad`` and a privatizer, and its Keras API."""

from dpaudit.errors import MissingExtraError

try:
    import jax_privacy as _jax_privacy  # noqa: F401  # fail here, with the line that installs it
except ImportError as _error:
    raise MissingExtraError("Observing JAX Privacy", "jax-privacy optax") from _error

from dpaudit.observers._replay_result import ReplayResult
from dpaudit.observers.jax_privacy._input_observer import Given, hold_out
from dpaudit.observers.jax_privacy._keras import observe_model
from dpaudit.observers.jax_privacy._observe import Observed, observe
from dpaudit.observers.jax_privacy._replay import replay

__all__ = ["Given", "Observed", "ReplayResult", "hold_out", "observe", "observe_model", "replay"]
