"""Audits of training with TF Privacy; neither the loop nor ``fit`` changes."""

from dpaudit.errors import MissingExtraError

try:
    import tensorflow_privacy as _tensorflow_privacy  # noqa: F401  # fail here, with the line that installs it
except ImportError as _error:
    raise MissingExtraError("Observing TF Privacy", "'tensorflow<2.16' tensorflow-privacy") from _error

from dpaudit.observers.tensorflow._observe import observe

__all__ = ["observe"]
