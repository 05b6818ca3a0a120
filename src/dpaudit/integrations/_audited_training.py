"""An audit that begins when a trainer has its private optimizer, whatever the trainer."""

from __future__ import annotations

import inspect
from typing import Any

from dpaudit.errors import InputError
from dpaudit.observers import AuditSession
from dpaudit.observers._session import NUMBERS, claimed_numbers
from dpaudit.opacus import observe
from dpaudit.recording import LiveBound, Recorder
from dpaudit.stats import Result


class AuditedTraining:
    """The audit of one training run that a trainer begins and ends.

    The claim is checked at once, and the rest as soon as there is an optimizer. The live bound is computed
    if the claim has a number of steps, which it cannot change, or if a violation ends the run.
    """

    def __init__(self, name: str, *, stop_on_violation: bool, options: dict[str, Any]) -> None:
        inspect.signature(observe).bind(None, **options)  # raises a TypeError on unknown options
        claim, numbers = claimed_numbers(
            options.get("claim"), **{number: options.get(number) for number in NUMBERS}
        )
        self._name, self._options = name, options
        self._stops = stop_on_violation
        has_length = numbers.num_steps is not None or claim is not None
        self._callbacks = [self._note] if stop_on_violation or has_length else []
        self._session: AuditSession | None = None
        self._recorder: Recorder | None = None
        self.latest: LiveBound | None = None
        """The live bound, once there is one."""

    @property
    def recorder(self) -> Recorder:
        """The recorder of the steps."""
        if self._recorder is None:
            raise InputError(
                f"{self._name} has recorded no step; train first, with the optimizer of make_private."
            )
        return self._recorder

    @property
    def should_stop(self) -> bool:
        """Whether a violation was seen that ends the training run."""
        return self._stops and self.latest is not None and self.latest.is_violation

    @property
    def metrics(self) -> dict[str, float]:
        """What trainers log: the lower bound on epsilon, and the claim; nothing before the first bound."""
        if self.latest is None:
            return {}
        return {"audited_epsilon": self.latest.epsilon, "claimed_epsilon": self.latest.claimed_epsilon}

    def audit(self, **options: Any) -> Result:
        """Return the verdict; options are those of :meth:`dpaudit.recording.Recorder.audit`."""
        return self.recorder.audit(**options)

    def start(self, optimizer: Any, **parts: Any) -> None:
        """Observe the optimizer from now on, unless it is observed already; options win over ``parts``."""
        if self._session is not None:
            return
        callbacks = [*self._options.get("callbacks", ()), *self._callbacks]
        session = observe(optimizer, **(parts | self._options | {"callbacks": callbacks}))
        self._recorder = session.start()
        self._session = session

    def stop(self, error: BaseException | None = None) -> None:
        """Restore the optimizer; the recorder can be audited."""
        if self._session is not None:
            self._session.stop(error)

    def _note(self, live: LiveBound) -> None:
        self.latest = live
