"""What the three ways to audit have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from dpaudit import _validate
from dpaudit._torch import HeldOutData
from dpaudit._torch.crafting import Tell, nobody
from dpaudit.accounting import Claim
from dpaudit.canaries import Crafted, Dirac, GradientCanary, InputCanary, fresh_seed
from dpaudit.errors import InputError
from dpaudit.recording import LiveBound, Recorder, WholeRunRecorder
from dpaudit.training._hook import Hook
from dpaudit.training._training import Training
from dpaudit.training.audits._inserted import Inserted
from dpaudit.training.audits._inserted_gradients import InsertedGradients
from dpaudit.training.audits._inserted_inputs import InsertedInputs

__all__ = ["CanaryAudit"]


class CanaryAudit(Hook):
    """A hook that inserts canaries and records how visible they are.

    ``canary`` is a gradient such as ``Dirac()``, or an input such as ``Crafted()``, which is made from the
    examples that :func:`dpaudit.training.data.hold_out` split off: ``held_out``. ``tell`` hears how many
    of all steps of making them are done.

    The claim is that of the training's settings, at ``delta``. Chance comes from ``seed``, or from the
    operating system. ``callbacks`` get the live bound while the training runs; they may raise to end it,
    unless ``may_stop`` is False.
    """

    recorder: Recorder | WholeRunRecorder
    usual_num_canaries: ClassVar[int]
    usual_num_inputs: ClassVar[int]

    def __init__(
        self,
        *,
        delta: float,
        canary: GradientCanary | InputCanary | None = None,
        held_out: HeldOutData | None = None,
        num_canaries: int | None = None,
        confidence: float = 0.95,
        seed: int | None = None,
        callbacks: Sequence[Callable[[LiveBound], None]] = (),
        may_stop: bool | None = None,
        tell: Tell = nobody,
    ) -> None:
        usual = Dirac() if held_out is None else Crafted()
        self.canary = usual if canary is None else canary
        _require_data(self.canary, held_out)
        if num_canaries is not None:
            _validate.whole("num_canaries", num_canaries)
        self.seed = fresh_seed(seed)
        self.delta = _validate.delta(delta)
        self.confidence = _validate.confidence(confidence)
        self._held_out = held_out
        self._num_canaries = num_canaries
        self._callbacks = callbacks
        self._may_stop = may_stop
        self._tell = tell
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
        if any(isinstance(hook, CanaryAudit) and hook is not self for hook in training.hooks):
            raise InputError(
                "Expected one audit a training, got two: each would take the other's canaries for a leak."
            )
        self._training = training
        self._inserted = self._insert(training)

    def _insert(self, training: Training) -> Inserted:
        count = self._num_canaries
        if isinstance(self.canary, InputCanary):
            assert self._held_out is not None  # without it there is no audit
            count = self.usual_num_inputs if count is None else count
            return InsertedInputs(
                training, self.canary, count, self.seed, data=self._held_out, tell=self._tell
            )
        if count is None:
            count = min(self.usual_num_canaries, training.num_parameters)
        return InsertedGradients(training, self.canary, count, self.seed)

    def _claim(self, training: Training) -> Claim:
        settings = training.settings
        return Claim.dpsgd(
            noise_multiplier=settings.noise_multiplier,
            sample_rate=settings.sample_rate,
            num_steps=settings.num_steps,
            delta=self.delta,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "canaries": self._inserted.state_dict(), **self.recorder.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["seed"] != self.seed:  # one from the operating system: the canaries are those of the other
            self.seed = state["seed"]
            assert self._training is not None  # it is the training that loads
            self.attach(self._training)
        self._inserted.load_state_dict(state["canaries"])
        self.recorder.load_state_dict(state)


def _require_data(canary: object, held_out: object) -> None:
    """Input canaries are made from held-out data, gradients are not."""
    if not isinstance(canary, GradientCanary | InputCanary):
        raise InputError(f"Expected canary to be such as Dirac(), got {canary!r}.")
    if isinstance(canary, GradientCanary) and held_out is not None:
        raise InputError(f"Expected no held_out with {canary!r}, which is made from no example.")
    if isinstance(canary, InputCanary) and not isinstance(held_out, HeldOutData):
        raise InputError(
            f"Expected held_out, the examples that hold_out() splits off, for {canary!r} to be made from, "
            f"got {held_out if held_out is None else type(held_out).__name__}."
        )
