"""What the three ways to audit have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from dpaudit import _validate
from dpaudit.accounting import Claim
from dpaudit.canaries import Dirac, GradientCanary, fresh_seed
from dpaudit.errors import InputError
from dpaudit.recording import LiveBound, Recorder, WholeRunRecorder
from dpaudit.training._hook import Hook
from dpaudit.training._training import Training
from dpaudit.training.audits._inserted import Inserted

__all__ = ["GradientAudit"]


class GradientAudit(Hook):
    """A hook that inserts gradient canaries and records how visible they are.

    The claim is that of the training's settings, at ``delta``. Chance comes from ``seed``, or from the
    operating system. ``callbacks`` get the live bound while the training runs; they may raise to end it,
    unless ``may_stop`` is False.
    """

    recorder: Recorder | WholeRunRecorder
    usual_num_canaries: ClassVar[int]

    def __init__(
        self,
        *,
        delta: float,
        canary: GradientCanary | None = None,
        num_canaries: int | None = None,
        confidence: float = 0.95,
        seed: int | None = None,
        callbacks: Sequence[Callable[[LiveBound], None]] = (),
        may_stop: bool | None = None,
    ) -> None:
        self.canary = Dirac() if canary is None else canary
        if not isinstance(self.canary, GradientCanary):
            raise InputError(f"Expected canary to be such as Dirac(), got {canary!r}.")
        if num_canaries is not None:
            _validate.whole("num_canaries", num_canaries)
        self.seed = fresh_seed(seed)
        self.delta = _validate.delta(delta)
        self.confidence = _validate.confidence(confidence)
        self._num_canaries = num_canaries
        self._callbacks = callbacks
        self._may_stop = may_stop
        self._training: Training | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "recorder":
            raise InputError(
                "Expected the audit to be a hook of a Training before its recorder is asked for."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def num_canaries(self) -> int:
        """How many there are, once the audit has its training."""
        return self._inserted.num_canaries

    def attach(self, training: Training) -> None:
        if self._training is not None and self._training is not training:
            raise InputError("Expected an audit of its own for each training, got one that has a training.")
        if any(isinstance(hook, GradientAudit) and hook is not self for hook in training.hooks):
            raise InputError(
                "Expected one audit a training, got two: each would take the other's canaries for a leak."
            )
        self._training = training
        count = self._num_canaries
        if count is None:
            count = min(self.usual_num_canaries, training.num_parameters)
        self._inserted = Inserted(training, self.canary, count, self.seed)

    def _claim(self, training: Training) -> Claim:
        settings = training.settings
        return Claim.dpsgd(
            noise_multiplier=settings.noise_multiplier,
            sample_rate=settings.sample_rate,
            num_steps=settings.num_steps,
            delta=self.delta,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, **self.recorder.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["seed"] != self.seed:  # one from the operating system: the canaries are those of the other
            self.seed = state["seed"]
            assert self._training is not None  # it is the training that loads
            self.attach(self._training)
        self.recorder.load_state_dict(state)
