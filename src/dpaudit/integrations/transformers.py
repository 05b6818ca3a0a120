"""Audits of training with the Trainer of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl

from dpaudit.integrations._audited_training import AuditedTraining

__all__ = ["observe_trainer"]


@contextmanager
def observe_trainer(
    trainer: Trainer, *, stop_on_violation: bool = False, **options: Any
) -> Iterator[AuditedTraining]:
    """Audit ``trainer.train()`` inside the ``with`` block.

    The optimizer, the model and the loader of batches are those that the trainer has when its training
    begins. If the claim has a number of steps, the live bound is part of what the trainer logs, as
    ``audited_epsilon`` beside ``claimed_epsilon``, in ``log_history`` and for every reporter.

    Args:
        trainer: A trainer whose optimizer is the one that ``PrivacyEngine.make_private`` returned.
        stop_on_violation: Whether the training run ends at the first violation.
        options: Those of :func:`dpaudit.opacus.observe`, above all ``claim``.

    Returns:
        A ``with`` block around ``trainer.train()``. Call ``audit()`` of what it yields afterwards.

    Raises:
        InputError: The claim is invalid. Inside the block, the trainer's optimizer is not private.

    """
    training = AuditedTraining("observe_trainer", stop_on_violation=stop_on_violation, options=options)
    callback, log = _AuditCallback(training), trainer.log

    def log_with_bound(logs: dict[str, float], *args: Any, **keywords: Any) -> None:
        logs.update(training.metrics)
        log(logs, *args, **keywords)

    trainer.callback_handler.callbacks.insert(0, callback)  # the wrapped optimizer is known before others run
    try:
        trainer.log = log_with_bound
        yield training
    except BaseException as error:
        training.stop(error)
        raise
    else:
        training.stop()
    finally:
        del trainer.log
        trainer.callback_handler.callbacks.remove(callback)


class _AuditCallback(TrainerCallback):  # type: ignore[misc]
    """The audit begins when the trainer has its optimizer, and may end the training run."""

    def __init__(self, training: AuditedTraining) -> None:
        self._training = training

    def on_train_begin(self, args: Any, state: Any, control: TrainerControl, **parts: Any) -> None:  # noqa: ARG002
        self._training.start(parts["optimizer"], loader=parts["train_dataloader"], module=parts["model"])

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **parts: Any) -> None:  # noqa: ARG002
        control.should_training_stop = control.should_training_stop or self._training.should_stop
