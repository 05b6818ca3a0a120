"""Audits as hooks of a training: three ways to score its canaries, and tests of its noise and batches.

``OneRun`` and ``TwoBatches`` score single steps, which a recorder composes to the whole training;
``EndToEnd`` gets one observation of the whole training from each canary. ``Diagnose`` needs no canaries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch

from dpaudit import _validate
from dpaudit._torch import HeldOutData
from dpaudit._torch._crafting import ProgressCallback
from dpaudit.accounting import Claim, SubsampledGaussian
from dpaudit.canaries import (
    Crafted,
    Dirac,
    GradientCanary,
    InputCanary,
    fresh_seed,
    refuse_held_out,
    require_held_out,
)
from dpaudit.diagnostics import Diagnosis, Diagnostics
from dpaudit.errors import InputError
from dpaudit.recording import LiveBound, Recorder, WholeRunRecorder
from dpaudit.training._seeds import Seeds, generator, generators
from dpaudit.training._training import Hook, Step, Training
from dpaudit.training.audits._canaries import (
    DROPPING,
    SECOND_BATCH,
    CanaryInserter,
    GradientInserter,
    InputInserter,
)
from dpaudit.training.gradients import Rows, trainable

AuditRecorder = TypeVar("AuditRecorder", Recorder, WholeRunRecorder)


class CanaryAudit(Hook, Generic[AuditRecorder]):
    """A hook that inserts canaries and records how visible they are.

    ``canary`` is a gradient such as ``Dirac()``, or an input such as ``Crafted()``, which is made from the
    examples that :func:`dpaudit.training.data.hold_out` split off: ``held_out``. ``notify`` is called in
    each step of crafting them, with the number of steps that are done and the number of all steps.

    The claim is that of the training's settings, at ``delta``. All randomness comes from ``seed``, or from
    the operating system. ``callbacks`` get the live bound while the training runs; they may raise to end it,
    unless ``may_stop`` is False.
    """

    default_num_gradients: ClassVar[int]
    default_num_inputs: ClassVar[int] = 1

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
        notify: ProgressCallback | None = None,
    ) -> None:
        default = Dirac() if held_out is None else Crafted()
        self.canary = default if canary is None else canary
        if isinstance(self.canary, GradientCanary):
            refuse_held_out(self.canary, held_out)
        elif isinstance(self.canary, InputCanary):
            require_held_out(self.canary, held_out, HeldOutData)
        else:
            raise InputError(f"Expected canary to be such as Dirac(), got {canary!r}.")
        if num_canaries is not None:
            _validate.whole("num_canaries", num_canaries)
        self.seed = fresh_seed(seed)
        self.delta = _validate.delta(delta)
        self.confidence = _validate.confidence(confidence)
        self._held_out, self._num_canaries = held_out, num_canaries
        self._callbacks, self._may_stop, self._on_step = callbacks, may_stop, notify
        self._training: Training | None = None
        self._recorder: AuditRecorder | None = None

    @property
    def recorder(self) -> AuditRecorder:
        """The recorder of the scores, once the audit has its training."""
        if self._recorder is None:
            raise InputError(
                "Expected the audit to be a hook of a Training before its recorder is asked for."
            )
        return self._recorder

    @property
    def num_canaries(self) -> int:
        """The number of canaries, once the audit has its training."""
        return self._inserter.draws.num_canaries

    def attach(self, training: Training) -> None:
        if self._training is not None and self._training is not training:
            raise InputError("Expected an audit of its own for each training, got one that has a training.")
        if any(isinstance(hook, CanaryAudit) and hook is not self for hook in training.hooks):
            raise InputError(
                "Expected one audit a training, got two: each would take the other's canaries for a leak."
            )
        self._training = training
        self._inserter = self._make_inserter(training)

    def _make_inserter(self, training: Training) -> CanaryInserter:
        count = self._num_canaries
        if isinstance(self.canary, InputCanary):
            assert self._held_out is not None  # required for input canaries
            count = self.default_num_inputs if count is None else count
            return InputInserter(
                training, self.canary, count, self.seed, data=self._held_out, on_step=self._on_step
            )
        if count is None:
            count = min(self.default_num_gradients, training.num_parameters)
        return GradientInserter(training, self.canary, count, self.seed)

    def _step_recorder(self, training: Training, first_steps: int | None, **options: Any) -> Recorder:
        """Return a recorder of all steps, or of the first ones; the claim is that of the whole training."""
        settings = training.settings
        if first_steps is not None and first_steps > settings.num_steps:
            raise InputError(
                f"Expected first_steps={first_steps} to be at most {settings.num_steps}, the number of the "
                "training's steps."
            )
        claim = Claim.dpsgd(
            noise_multiplier=settings.noise_multiplier,
            sample_rate=settings.sample_rate,
            num_steps=settings.num_steps,
            delta=self.delta,
        )
        return Recorder(
            claim=claim,
            num_steps=settings.num_steps if first_steps is None else first_steps,
            confidence=self.confidence,
            callbacks=self._callbacks,
            **options,
        )

    def _is_audited(self, index: int) -> bool:
        return index < self.recorder.num_steps

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "canaries": self._inserter.state_dict(), **self.recorder.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["seed"] != self.seed:  # one from the operating system: the canaries are those of the other
            self.seed = state["seed"]
            assert self._training is not None  # it is the training that loads
            self.attach(self._training)
        self._inserter.load_state_dict(state["canaries"])
        self.recorder.load_state_dict(state)


class OneRun(CanaryAudit[Recorder]):
    """Audits every step of a training, which stays what it was: the weights are those without audit.

    ``num_canaries`` a step is by default 512, or the number of the model's parameters if that is less. Of
    input canaries there are 16: each costs as much as one or two examples of the batch. With ``first_steps``
    scores come from these steps only, where input canaries leak most; the claim is still that of the whole
    training.
    """

    default_num_gradients: ClassVar[int] = 512
    default_num_inputs: ClassVar[int] = 16

    def __init__(self, *, first_steps: int | None = None, **common: Any) -> None:
        super().__init__(**common)
        self._first_steps = None if first_steps is None else _validate.whole("first_steps", first_steps)

    def attach(self, training: Training) -> None:
        super().attach(training)
        self._recorder = self._step_recorder(
            training, self._first_steps, shares_noise=self._inserter.shares_noise
        )

    def joining(self, index: int, entries: Sequence[int]) -> Iterable[Rows]:  # noqa: ARG002
        if not self._is_audited(index):
            return ()
        return self._inserter.rows(index, np.flatnonzero(self._inserter.draws.coins(index)))

    def observe(self, step: Step) -> None:
        if self._is_audited(step.index):
            present = self._inserter.draws.coins(step.index)
            self.recorder.record(self._inserter.scores(step), present, notify=False)

    def after(self, step: Step) -> None:
        if self._is_audited(step.index):
            self.recorder.notify()


class TwoBatches(CanaryAudit[Recorder]):
    """The paper's Algorithm 2: one score a step from the training's own batch, one from a second batch.

    The canary is in the second batch with probability ``canary_rate``; the model is updated by the first.
    Scores are plain dot products, unless ``residual`` subtracts the batch's own sum. Unlike the paper's
    listing, which adds the canary after the noise, it goes through the training's own clipping and sum.
    ``first_steps`` is that of :class:`OneRun`.
    """

    default_num_gradients: ClassVar[int] = 1

    def __init__(
        self,
        *,
        canary_rate: float = 1.0,
        residual: bool = False,
        num_canaries: int | None = None,
        first_steps: int | None = None,
        **common: Any,
    ) -> None:
        super().__init__(num_canaries=num_canaries, **common)
        self._first_steps = None if first_steps is None else _validate.whole("first_steps", first_steps)
        if num_canaries not in (None, 1):
            raise InputError(f"Expected num_canaries=1 where two batches are compared, got {num_canaries}.")
        self._rate = _validate.sample_rate(canary_rate)
        self._residual = residual

    def attach(self, training: Training) -> None:
        super().attach(training)
        # Generators of the audit's own: the training's stay as they are, and differ also if both have the
        # same seed. The same noise in both batches would separate them without error.
        own = int(self._inserter.draws.rng(0, SECOND_BATCH).integers(2**63))
        self._generators = generators(Seeds.of(own), training.device)
        self._recorder = self._step_recorder(
            training,
            self._first_steps,
            tradeoff=None if self._rate == 1 else SubsampledGaussian(self._rate, 1),
            paired=True,
            may_stop=self._may_stop,
        )

    def observe(self, step: Step) -> None:
        if not self._is_audited(step.index):
            return
        is_in = self._inserter.draws.rng(step.index).random() < self._rate
        rows = self._inserter.rows(step.index, [0] if is_in else [])
        second = self._second_batch(step.index, rows)
        scores = [self._inserter.scores(one, residual=self._residual)[0] for one in (step, second)]
        self.recorder.record(scores, [False, True], notify=False)

    def _second_batch(self, index: int, rows: Sequence[Rows]) -> Step:
        """Draw the second batch, with another RNG also where a model uses torch's, for dropout say."""
        assert self._training is not None  # it is the training that is observed
        own = generator(int(self._inserter.draws.rng(index, DROPPING).integers(2**63)))
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(own.get_state())
            return self._training.draw(rows, self._generators)

    def after(self, step: Step) -> None:
        if self._is_audited(step.index):
            self.recorder.notify()

    def state_dict(self) -> dict[str, Any]:
        states = {name: made.get_state() for name, made in self._generators.items()}
        return {**super().state_dict(), "generators": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for name, made in self._generators.items():
            made.set_state(state["generators"][name])


class EndToEnd(CanaryAudit[WholeRunRecorder]):
    """Audits sampling, clipping and noise together, against the curve of the whole training.

    Each canary is in the data set or not, by a fair coin before the first step. Those that are in it are
    drawn by the training's own sampling, like any example. They are kept out of the update, but they consume
    random numbers of the sampling, so that the batches differ from those without audit. ``num_canaries`` is
    by default 8,192, or the number of the model's parameters if that is less.
    """

    default_num_gradients: ClassVar[int] = 8192

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        if isinstance(self.canary, InputCanary):
            raise InputError(f"Expected a gradient canary such as Dirac() end to end, got {self.canary!r}.")
        if self._callbacks:
            raise InputError("Expected no callbacks end to end: there is no bound before the last step.")

    def attach(self, training: Training) -> None:
        super().attach(training)
        settings = training.settings
        present = self._inserter.draws.entries()
        self._entries = np.flatnonzero(present)
        self._recorder = WholeRunRecorder(
            present,
            noise_multiplier=settings.noise_multiplier,
            sample_rate=settings.sample_rate,
            num_steps=settings.num_steps,
            delta=self.delta,
            confidence=self.confidence,
        )

    @property
    def num_entries(self) -> int:
        return len(self._entries)

    def joining(self, index: int, entries: Sequence[int]) -> Iterable[Rows]:
        return self._inserter.rows(index, self._entries[list(entries)])

    def observe(self, step: Step) -> None:
        self.recorder.record(self._inserter.scores(step))


class Diagnose(Hook):
    """A hook that collects the noise and the batches of every step; ``diagnose()`` tests them.

    The noise is what a step released minus what went into it, examples and canaries: so it may be used
    beside an audit. It is compared with what the training's settings say. Attach it to one training after
    another to see whether two runs have the same noise.
    """

    def __init__(self) -> None:
        self.record = Diagnostics()
        self._claimed: tuple[float, float] | None = None  # the noise, and the sample rate

    def attach(self, training: Training) -> None:
        settings = training.settings
        noise = _validate.positive("noise_multiplier", settings.noise_multiplier) * settings.max_grad_norm
        claimed = noise, settings.sample_rate
        if self._claimed not in (None, claimed):
            raise InputError("Expected trainings of equal noise and sample rate to be diagnosed together.")
        self._claimed = claimed
        self.record.sample_rate = settings.sample_rate
        self._num_examples = len(training.data)
        self._leaves = {name: value.numel() for name, value in trainable(training.model).items()}

    def observe(self, step: Step) -> None:
        assert self._claimed is not None  # it is attached to the training that is observed
        noise = step.noise / self._claimed[0]
        self.record.observe_noise(noise.cpu().numpy(), self._leaves)
        self.record.observe_batch(step.indices.cpu().numpy(), self._num_examples)

    def diagnose(self, confidence: float = 0.95) -> Diagnosis:
        """Test the steps so far; the false alarm rate is that of a single diagnosis."""
        return self.record.diagnose(confidence)

    def state_dict(self) -> dict[str, Any]:
        return self.record.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.record.load_state_dict(state)
