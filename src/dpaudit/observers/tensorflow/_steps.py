"""Chance and scores of an observer, outside of any graph: here everything is numpy."""

from __future__ import annotations

import numpy as np

from dpaudit.canaries import Draws
from dpaudit.errors import InputError
from dpaudit.observers._recorder import ObserverRecorder
from dpaudit.stats._types import BoolArray, FloatArray, IntArray

__all__ = ["NOT_POISSON", "Steps"]

NOT_POISSON = (
    "how batches are drawn does not show: those of fit() are shuffled, and the claim is of Poisson sampling"
)
_SEVERAL = (
    "microbatches have several examples each: a canary is a microbatch of its own, so that it does not show "
    "that one of several examples can move a clipped mean by up to twice the clipping norm"
)


class Steps:
    """Counts the calls of a graph that was traced once, and knows what each of them has to do.

    Several calls are one step if gradients are accumulated: then canaries join in the first of them, and what
    is recorded is the sum. A graph outlives its observer; from then on it gets no canaries.
    """

    def __init__(
        self, recorder: ObserverRecorder, draws: Draws, *, calls_each: int, calls_before: int
    ) -> None:
        self._recorder, self._draws = recorder, draws
        self._calls_each = calls_each
        self._before = calls_before % calls_each  # a step that has begun already is left alone
        self._step: tuple[BoolArray, FloatArray, FloatArray] | None = None
        self.leaves: tuple[int, ...] = ()  # of the places where noise is looked at
        self.precision = 0.0
        self.num_calls = 0
        self.is_on = True

    @property
    def num_canaries(self) -> int:
        """How many there are, present or not."""
        return self._draws.num_canaries

    def begin(self) -> tuple[IntArray, BoolArray]:
        """The number of this call, and which canaries are present in it."""
        number = np.asarray(self.num_calls)
        if not self.is_on or (self._before + self.num_calls) % self._calls_each:
            return number, np.zeros(self._draws.num_canaries, np.bool_)
        coins = self._draws.coins(self._recorder.num_done)
        self._step = coins, np.zeros(coins.size), np.zeros((2, 1))
        return number, coins

    def directions(self, _: int, num_parameters: int) -> tuple[FloatArray, IntArray]:
        """Values and places of the canaries of this call."""
        found = self._draws.directions(self._recorder.num_done, int(num_parameters))
        places = found.coordinates
        if places is None:
            places = np.arange(found.values.size).reshape(found.values.shape)
        places = np.minimum(places, num_parameters - 1)  # what fills up the last row is zero, wherever it is
        return found.values.astype(np.float32), places.astype(np.int32)

    def end(self, number: int, scores: FloatArray, examples_each: int, noisy: FloatArray) -> None:
        """The scores of this call; they are recorded if it is the last one of its step.

        ``noisy`` is what was released where noise is looked at, and below it the sum that went into it.
        """
        if not self.is_on:
            return
        if number != self.num_calls:
            raise InputError("Expected one step after the other, got several of one graph at the same time.")
        self.num_calls += 1
        if examples_each > 1:
            self._recorder.not_covered = (NOT_POISSON, _SEVERAL)
        if self._step is not None:
            self._add(scores, noisy, self._step)

    def _add(
        self, scores: FloatArray, noisy: FloatArray, so_far: tuple[BoolArray, FloatArray, FloatArray]
    ) -> None:
        present, summed, both = so_far[0], so_far[1] + scores, so_far[2] + noisy
        self._step = present, summed, both
        if (self._before + self.num_calls) % self._calls_each == 0:
            self._step = None
            self._recorder.noise.observe(both[0], both[1], self.leaves, norm=1.0, eps=self.precision)
            self._recorder.record(summed, present)
