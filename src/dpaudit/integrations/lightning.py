"""Audits of training with Lightning, under either of its names."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from opacus.grad_sample.gsm_base import AbstractGradSampleModule

from dpaudit.errors import InputError, MissingExtraError
from dpaudit.integrations._audited_training import AuditedTraining
from dpaudit.observers.opacus._prepared import private_inside

__all__ = ["AuditCallback"]

_NAMES = ("lightning.pytorch", "pytorch_lightning")


def _callback_classes() -> tuple[type, ...]:
    """Return the class of callbacks of the package in use, of both if both are."""
    names = [name for name in _NAMES if name in sys.modules]
    for name in [] if names else _NAMES:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        names = [name]
        break
    if not names:
        raise MissingExtraError("Observing Lightning", "lightning")
    return tuple(dict.fromkeys(sys.modules[name].Callback for name in names))


class AuditCallback(*_callback_classes()):  # type: ignore[misc]
    """An audit of the training run of a Lightning trainer.

    The optimizer is the private one of the trainer. If the claim has a number of steps, the live bound is
    logged as ``audited_epsilon`` beside ``claimed_epsilon``. Call :meth:`audit` after ``trainer.fit()``.

    Args:
        stop_on_violation: Whether the training run ends at the first violation.
        options: Those of :func:`dpaudit.opacus.observe`, above all ``claim`` and ``loader``. Pass ``module``
            if the Lightning module does not hold what ``make_private`` returned.

    Raises:
        InputError: The claim is invalid. When training starts, no optimizer is private, or several are.

    """

    def __init__(self, *, stop_on_violation: bool = False, **options: Any) -> None:
        super().__init__()
        self.training = AuditedTraining("AuditCallback", stop_on_violation=stop_on_violation, options=options)
        """The audit, with its recorder."""

    def audit(self, **options: Any) -> Any:
        """Return the verdict; options are those of :meth:`dpaudit.recording.Recorder.audit`."""
        return self.training.audit(**options)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Observe the private optimizer, before the first batch is drawn."""
        private = [optimizer for optimizer in trainer.optimizers if private_inside(optimizer) is not None]
        if len(private) != 1:
            raise InputError(
                f"One optimizer of the trainer must be private, got {len(private)}; return the optimizer of "
                "make_private from configure_optimizers."
            )
        modules = (module for module in pl_module.modules() if isinstance(module, AbstractGradSampleModule))
        self.training.start(private[0], module=next(modules, None))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Log the live bound, and end the training run if a violation does."""
        if metrics := self.training.metrics:
            self.log_dict(metrics)
        trainer.should_stop = trainer.should_stop or self.training.should_stop

    def on_train_end(self, *_: Any) -> None:
        """Restore the optimizer."""
        self.training.stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Restore the optimizer; the steps before can be audited."""
        self.training.stop(exception)
