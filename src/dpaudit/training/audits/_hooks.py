"""What the three ways to audit have in common.

Audits of single steps, which a recorder composes to the whole training. Many canaries a step, each present by
a fair coin, in the one training that is run anyway. Algorithm 2 of Nasr et al. 2023: a second batch with the
canary beside the one that trains. Canaries that are entries of the data set: one observation of the whole
training from each. Tests of a training's noise and batches, while it trains.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from dpaudit import _validate
from dpaudit._torch import HeldOutData
from dpaudit._torch._crafting import Tell, nobody
from dpaudit.accounting import Claim, SubsampledGaussian
from dpaudit.canaries import Crafted, Dirac, GradientCanary, InputCanary, fresh_seed
from dpaudit.diagnostics import Diagnosis, Diagnostics
from dpaudit.errors import InputError
from dpaudit.recording import LiveBound, Recorder, WholeRunRecorder
from dpaudit.training._seeds import Seeds, generator, generators
from dpaudit.training._training import Hook, Step, Training
from dpaudit.training.audits._canaries import (
    DROPPING,
    SECOND_BATCH,
    Inserted,
    InsertedGradients,
    InsertedInputs,
)
from dpaudit.training.gradients import Rows, trainable


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


class AuditOfSteps(CanaryAudit):
    """Scores from every step, or from the ``first_steps`` only, where input canaries leak most.

    The claim is that of the whole training all the same.
    """

    recorder: Recorder

    def __init__(self, *, first_steps: int | None = None, **common: Any) -> None:
        super().__init__(**common)
        self._first_steps = None if first_steps is None else _validate.whole("first_steps", first_steps)

    def _record(self, training: Training, **more: Any) -> Recorder:
        """A recorder of the steps that are looked at."""
        return Recorder(
            claim=self._claim(training),
            num_steps=self._num_audited(training),
            confidence=self.confidence,
            callbacks=self._callbacks,
            **more,
        )

    def _num_audited(self, training: Training) -> int:
        planned, first = training.settings.num_steps, self._first_steps
        if first is not None and first > planned:
            raise InputError(
                f"Expected first_steps={first} to be at most {planned}, the number of the training's steps."
            )
        return planned if first is None else first

    def _is_over(self, index: int) -> bool:
        return index >= self.recorder.num_steps

    def joining(self, index: int, entries: Sequence[int]) -> Iterable[Rows]:  # noqa: ARG002
        return () if self._is_over(index) else self._join(index)

    def observe(self, step: Step) -> None:
        if not self._is_over(step.index):
            self._look(step)

    def after(self, step: Step) -> None:
        if not self._is_over(step.index):
            self.recorder.tell()

    def _join(self, index: int) -> Iterable[Rows]:  # noqa: ARG002
        """Gradients that join the training's own batch."""
        return ()

    @abstractmethod
    def _look(self, step: Step) -> None:
        """Record the scores of a step."""


class OneRun(AuditOfSteps):
    """Audits every step of a training, which stays what it was: the weights are those without audit.

    ``num_canaries`` a step is by default 512, or the number of the model's parameters if that is less. Of
    input canaries there are 16: each costs as much as one or two examples of the batch.
    """

    usual_num_canaries: ClassVar[int] = 512
    usual_num_inputs: ClassVar[int] = 16

    def attach(self, training: Training) -> None:
        super().attach(training)
        self.recorder = self._record(training, shares_noise=self._inserted.shares_noise)

    def _join(self, index: int) -> Iterable[Rows]:
        return self._inserted.rows(index, np.flatnonzero(self._inserted.coins(index)))

    def _look(self, step: Step) -> None:
        self.recorder.record(self._inserted.scores(step), self._inserted.coins(step.index), tell=False)


class TwoBatches(AuditOfSteps):
    """The paper's audit: one score a step from the training's own batch, one from a second batch.

    The canary is in the second batch with probability ``canary_rate``; the model is updated by the first.
    Scores are plain dot products, unless ``residual`` takes the batch's own sum off. Unlike the paper's
    listing, which adds the canary after the noise, it goes through the training's own clipping and sum.
    """

    usual_num_canaries: ClassVar[int] = 1
    usual_num_inputs: ClassVar[int] = 1

    def __init__(
        self,
        *,
        canary_rate: float = 1.0,
        residual: bool = False,
        num_canaries: int | None = None,
        **common: Any,
    ) -> None:
        super().__init__(num_canaries=num_canaries, **common)
        if num_canaries not in (None, 1):
            raise InputError(f"Expected num_canaries=1 where two batches are compared, got {num_canaries}.")
        self._rate = _validate.sample_rate(canary_rate)
        self._residual = residual

    def attach(self, training: Training) -> None:
        super().attach(training)
        # Chance of the audit's own: the training's stays as it is, and is another one also if both have
        # the same seed. The same noise in both batches would tell them apart without error.
        own = int(self._inserted.chance(0, SECOND_BATCH).integers(2**63))
        self._generators = generators(Seeds.of(own), training.device)
        self.recorder = self._record(
            training,
            tradeoff=None if self._rate == 1 else SubsampledGaussian(self._rate, 1),
            paired=True,
            may_stop=self._may_stop,
        )

    def _look(self, step: Step) -> None:
        is_in = self._inserted.chance(step.index).random() < self._rate
        rows = self._inserted.rows(step.index, [0] if is_in else [])
        second = self._second(step.index, rows)
        scores = [self._inserted.scores(one, residual=self._residual)[0] for one in (step, second)]
        self.recorder.record(scores, [False, True], tell=False)

    def _second(self, index: int, rows: Sequence[Rows]) -> Step:
        """The second batch, with chance of its own also where a model takes torch's: dropout, say."""
        assert self._training is not None  # it is the training that is observed
        own = generator(int(self._inserted.chance(index, DROPPING).integers(2**63)))
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(own.get_state())
            return self._training.draw(rows, self._generators)

    def state_dict(self) -> dict[str, Any]:
        states = {name: made.get_state() for name, made in self._generators.items()}
        return {**super().state_dict(), "generators": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for name, made in self._generators.items():
            made.set_state(state["generators"][name])


class EndToEnd(CanaryAudit):
    """Audits sampling, clipping and noise together, against the curve of the whole training.

    Each canary is in the data set or not, by a fair coin before the first step. Those that are in it are
    drawn by the training's own sampling, like any example. They are kept out of the update, but they use up
    chance of the sampling, so that the batches are others than without audit. ``num_canaries`` is by
    default 8,192, or the number of the model's parameters if that is less.
    """

    recorder: WholeRunRecorder
    usual_num_canaries: ClassVar[int] = 8192

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        if isinstance(self.canary, InputCanary):
            raise InputError(f"Expected a gradient canary such as Dirac() end to end, got {self.canary!r}.")
        if self._callbacks:
            raise InputError("Expected no callbacks end to end: there is no bound before the last step.")

    def attach(self, training: Training) -> None:
        super().attach(training)
        settings = training.settings
        present = self._inserted.in_data()
        self._entries = np.flatnonzero(present)
        self.recorder = WholeRunRecorder(
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
        return self._inserted.rows(index, self._entries[list(entries)])

    def observe(self, step: Step) -> None:
        self.recorder.record(self._inserted.scores(step))


class Diagnose(Hook):
    """A hook that collects the noise and the batches of every step; ``diagnose()`` tests them.

    The noise is what a step released less what went into it, examples and canaries: so it may be used
    beside an audit. Held against it is what the training's settings say. Give it to one training after
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
        """What the steps so far show; the false alarm rate is that of one look."""
        return self.record.diagnose(confidence)

    def state_dict(self) -> dict[str, Any]:
        return self.record.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.record.load_state_dict(state)
