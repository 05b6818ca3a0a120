"""Algorithm 2 of Nasr et al. 2023: a second batch with the canary beside the one that trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from dpaudit import _validate
from dpaudit.accounting import SubsampledGaussian
from dpaudit.errors import InputError
from dpaudit.training._seeds import Seeds, generator, generators
from dpaudit.training._step import Step
from dpaudit.training._training import Training
from dpaudit.training.audits._inserted import DROPPING, SECOND_BATCH
from dpaudit.training.audits._of_steps import AuditOfSteps
from dpaudit.training.gradients._rows import Rows

__all__ = ["TwoBatches"]


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
