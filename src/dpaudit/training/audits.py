"""Audits as training hooks: gradients or examples are inserted into steps, and scored in three ways.

``OneRun`` and ``TwoBatches`` score individual steps, from which a recorder composes a bound on the whole
run; ``EndToEnd`` obtains one observation of the whole run per canary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from dpaudit import _validate
from dpaudit._torch import HeldOutData
from dpaudit._torch._crafting import ProgressCallback
from dpaudit._types import FloatArray
from dpaudit.accounting import Claim, SubsampledGaussian
from dpaudit.canaries import (
    Crafted,
    GradientCanary,
    InputCanary,
    Mixture,
    fresh_seed,
    refuse_held_out,
    require_held_out,
)
from dpaudit.errors import InputError
from dpaudit.recording import CanaryScorer, LiveBound, PerStep, Recorder, TrainingInfo, WholeRun
from dpaudit.training._canaries import (
    DROPPING,
    SECOND_BATCH,
    CanaryInserter,
    GradientInserter,
    InputInserter,
)
from dpaudit.training._settings import Seeds, generator, generators
from dpaudit.training._training import ChecksOfHook, Diagnose, Hook, Step, Training
from dpaudit.training.gradients import Rows

__all__ = ["EndToEnd", "OneRun", "TwoBatches"]


_PENDING = 64  # steps whose scores are computed together


class CanaryAudit(Hook):
    """Hook that inserts canaries and records their scores.

    ``canary`` is a gradient such as ``Dirac()``, or an input such as ``Crafted()``, which is made from
    ``held_out``, the examples that :func:`dpaudit.training.data.hold_out` splits off. ``notify`` is called in
    each crafting step with the number of finished steps and their total number. With ``first_steps``, only
    these steps are scored, in which input canaries leak most; the claim still covers the whole training run.

    The claim is derived from the training settings, at ``delta``. If the same run has a :class:`Diagnose`
    hook, ``recorder.audit()`` includes its findings. All randomness comes from ``seed``, or from
    the operating system. ``callbacks`` receive the live bound during training; they may raise to stop it.
    """

    default_gradient: ClassVar[Mixture] = Mixture(short=False)
    default_num_gradients: ClassVar[int]
    default_num_inputs: ClassVar[int] = 1

    def __init__(
        self,
        *,
        delta: float,
        canary: GradientCanary | InputCanary | None = None,
        held_out: HeldOutData | None = None,
        num_canaries: int | None = None,
        first_steps: int | None = None,
        confidence: float = 0.95,
        seed: int | None = None,
        callbacks: Sequence[Callable[[LiveBound], None]] = (),
        notify: ProgressCallback | None = None,
    ) -> None:
        default = self.default_gradient if held_out is None else Crafted()
        self.canary = default if canary is None else canary
        if isinstance(self.canary, Mixture) and not self.default_gradient.short:  # each score must count
            self.canary = replace(self.canary, short=False)
        if isinstance(self.canary, GradientCanary):
            refuse_held_out(self.canary, held_out)
        elif isinstance(self.canary, InputCanary):
            require_held_out(self.canary, held_out, HeldOutData)
        else:
            raise InputError(f"canary must be a gradient or input canary such as Dirac(), got {canary!r}.")
        if num_canaries is not None:
            _validate.integer("num_canaries", num_canaries)
        self._first_steps = None if first_steps is None else _validate.integer("first_steps", first_steps)
        self.seed = fresh_seed(seed)
        self.delta = _validate.delta(delta)
        self.confidence = _validate.confidence(confidence)
        self._held_out, self._num_canaries = held_out, num_canaries
        self._callbacks, self._on_step = callbacks, notify
        self._training: Training | None = None
        self._recorder: Recorder | None = None

    @property
    def recorder(self) -> Recorder:
        """The recorder of the scores, available once the audit is attached to a ``Training``."""
        if self._recorder is None:
            raise InputError("The audit has no recorder yet; make it a hook of a Training first.")
        return self._recorder

    @property
    def num_canaries(self) -> int:
        """The number of canaries, available once the audit is attached to a ``Training``."""
        return self._inserter.draws.num_canaries

    def attach(self, training: Training) -> None:
        if self._training is not None and self._training is not training:
            raise InputError("This audit is already attached to another Training; make one for each.")
        if any(isinstance(hook, CanaryAudit) and hook is not self for hook in training.hooks):
            raise InputError(
                "A Training can have only one audit: each would take the other's canaries for a leak."
            )
        self._training = training
        self._inserter = self._make_inserter(training)
        self._recorder = self._make_recorder(training, self._make_scorer())

    def _make_scorer(self) -> CanaryScorer:
        """Return what turns the scores of the inserted canaries into a bound."""
        raise NotImplementedError

    def _make_inserter(self, training: Training) -> CanaryInserter:
        count = self._num_canaries
        if isinstance(self.canary, InputCanary):
            assert self._held_out is not None  # required for input canaries
            count = self.default_num_inputs if count is None else count
            return InputInserter(
                training, self.canary, count, self.seed, data=self._held_out, on_step=self._on_step
            )
        if count is None:
            fitting = max(1, training.num_parameters // self.canary.places_per_canary)
            count = min(self.default_num_gradients, fitting)
        return GradientInserter(training, self.canary, count, self.seed)

    def _make_recorder(self, training: Training, scorer: CanaryScorer) -> Recorder:
        """Return a recorder of all or of the first steps; the claim covers the whole training run."""
        settings, num_steps = training.settings, self._first_steps or training.settings.num_steps
        if num_steps > settings.num_steps:
            limit = f"{settings.num_steps}, the number of training steps"
            raise InputError(f"first_steps must be at most {limit}, got {num_steps}.")
        claim = Claim.dpsgd(
            noise_multiplier=settings.noise_multiplier,
            sample_rate=settings.sample_rate,
            num_steps=settings.num_steps,
            delta=self.delta,
        )
        return Recorder(
            claim=claim,
            scorer=scorer,
            checks=[ChecksOfHook(hook) for hook in training.hooks if isinstance(hook, Diagnose)][:1],
            num_steps=num_steps,
            confidence=self.confidence,
            callbacks=self._callbacks,
            facts=lambda: TrainingInfo(
                canary=self.canary,
                max_grad_norm=settings.max_grad_norm,
                batch_size=training.expected_batch_size,
            ),
            synchronize=self._record_pending,
        )

    def _record_pending(self) -> None:
        """Record the steps that were only read so far; the recorder calls this before it is used."""

    def _is_audited(self, index: int) -> bool:
        assert self._recorder is not None  # attached, because a step is being observed
        return index < self._recorder.num_steps

    def after(self, step: Step) -> None:
        if self._is_audited(step.index):
            self.recorder.notify()

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "canaries": self._inserter.state_dict(), **self.recorder.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["seed"] != self.seed:  # a random one: recreate the canaries of the saved run
            self.seed = state["seed"]
            assert self._training is not None  # attached, because a Training is loading the state
            self.attach(self._training)
        self._inserter.load_state_dict(state["canaries"])
        self.recorder.load_state_dict(state)


class OneRun(CanaryAudit):
    """Audit of every step that leaves training unchanged: the weights are the same as without the audit.

    ``num_canaries`` per step defaults to 1,024, or to half the model parameters if that is smaller. For
    input canaries the default is 16: each costs as much as one or two examples of the batch.
    """

    default_gradient: ClassVar[Mixture] = Mixture()
    default_num_gradients: ClassVar[int] = 1024
    default_num_inputs: ClassVar[int] = 16

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        self._pending: list[tuple[int, Callable[[], FloatArray]]] = []  # steps whose scores are not recorded

    def _make_scorer(self) -> PerStep:
        canaries = self._inserter.observed if isinstance(self._inserter, GradientInserter) else None
        return PerStep(coupled=self._inserter.coupled, num_canaries=self.num_canaries, canaries=canaries)

    def joining(self, index: int, entries: Sequence[int]) -> Iterable[Rows]:  # noqa: ARG002
        if not self._is_audited(index):
            return ()
        return self._inserter.rows_by_coins(index)

    def observe(self, step: Step) -> None:
        if not self._is_audited(step.index):
            return
        if isinstance(self._inserter, GradientInserter):
            self._pending.append((step.index, self._inserter.read(step)))
            if len(self._pending) == _PENDING:
                self._record_pending()
            return
        present = self._inserter.draws.coins(step.index)
        scores = self._inserter.scores(step)
        self.recorder.record(scores, present, lengths=self._inserter.lengths, notify=False)

    def _record_pending(self) -> None:
        pending, self._pending = self._pending, []
        while pending:
            index, scores = pending[0]
            try:
                self.recorder.record(scores(), self._inserter.draws.coins(index), notify=False)
            except BaseException:  # nothing is lost if this is interrupted
                self._pending = pending
                raise
            del pending[0]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pending.clear()  # steps after the state
        super().load_state_dict(state)


class TwoBatches(CanaryAudit):
    """The paper's Algorithm 2: per step, one score from the training batch and one from a second batch.

    The canary is in the second batch with probability ``canary_rate``; the model is updated with the first.
    Scores are plain dot products, unless ``residual`` subtracts the sum of the batch. The paper's listing
    adds the canary after the noise; here it is clipped and summed by the audited code.
    """

    default_num_gradients: ClassVar[int] = 1

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
            raise InputError(f"num_canaries must be 1 with TwoBatches, got {num_canaries}.")
        self._rate = _validate.sample_rate(canary_rate)
        self._residual = residual

    def attach(self, training: Training) -> None:
        super().attach(training)
        # Separate generators: those of the training run are not affected, and differ even if both have the
        # same seed. Equal noise in both batches would distinguish them without error.
        seed = int(self._inserter.draws.rng(0, SECOND_BATCH).integers(2**63))
        self._generators = generators(Seeds.of(seed), training.device)

    def _make_scorer(self) -> PerStep:
        return PerStep(tradeoff=None if self._rate == 1 else SubsampledGaussian(self._rate, 1), paired=True)

    def observe(self, step: Step) -> None:
        if not self._is_audited(step.index):
            return
        is_in = self._inserter.draws.rng(step.index).random() < self._rate
        rows = self._inserter.rows(step.index, [0] if is_in else [])
        second = self._second_batch(step.index, rows)
        scores = [self._inserter.scores(batch, residual=self._residual)[0] for batch in (step, second)]
        lengths = None if self._inserter.lengths is None else self._inserter.lengths.repeat(2)
        self.recorder.record(scores, [False, True], lengths=lengths, notify=False)

    def _second_batch(self, index: int, rows: Sequence[Rows]) -> Step:
        """Draw the second batch, also with its own global torch RNG, which dropout uses, for example."""
        assert self._training is not None  # attached, because a step is being observed
        rng = generator(int(self._inserter.draws.rng(index, DROPPING).integers(2**63)))
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(rng.get_state())
            return self._training.draw(rows, self._generators)

    def state_dict(self) -> dict[str, Any]:
        states = {name: rng.get_state() for name, rng in self._generators.items()}
        return {**super().state_dict(), "generators": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for name, rng in self._generators.items():
            rng.set_state(state["generators"][name])


class EndToEnd(CanaryAudit):
    """Audit of sampling, clipping and noise together, against the trade-off curve of the whole run.

    A fair coin decides before the first step whether a canary is in the data set. Present canaries are drawn
    by the audited sampling, like any example. They are excluded from the update, but they consume random
    numbers of the sampling, so the batches differ from those without the audit. ``num_canaries`` defaults to
    8,192, or to half the number of model parameters if that is smaller.
    """

    default_num_gradients: ClassVar[int] = 8192

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        if isinstance(self.canary, InputCanary):
            raise InputError(
                f"canary must be a gradient canary such as Dirac() with EndToEnd, got {self.canary!r}."
            )
        if self._callbacks:
            raise InputError("EndToEnd allows no callbacks: there is no bound before the last step.")
        if self._first_steps is not None:
            raise InputError("EndToEnd allows no first_steps: its scores are those of all steps.")

    def _make_scorer(self) -> WholeRun:
        present = self._inserter.draws.entries()
        self._entries = np.flatnonzero(present)
        return WholeRun(present)

    @property
    def num_entries(self) -> int:
        return len(self._entries)

    def joining(self, index: int, entries: Sequence[int]) -> Iterable[Rows]:
        return self._inserter.rows(index, self._entries[list(entries)])

    def observe(self, step: Step) -> None:
        self.recorder.record(self._inserter.scores(step))
