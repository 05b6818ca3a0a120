"""A recorder that compiled steps write into."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from dpaudit.observers._recorder import ObserverRecorder
from dpaudit.stats import Observations

__all__ = ["WaitingRecorder"]


class WaitingRecorder(ObserverRecorder):
    """Steps that were started may not be finished yet: whoever asks waits for them.

    Only the steps themselves do not, which would be for ever.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._here = threading.local()
        super().__init__(*args, **options)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """What is called from inside of a step is called in here."""
        self._here.in_step = True
        try:
            yield
        finally:
            self._here.in_step = False

    def _wait(self) -> None:
        if not getattr(self._here, "in_step", False):
            jax.effects_barrier()  # type: ignore[no-untyped-call]

    @property
    def num_done(self) -> int:
        self._wait()
        return super().num_done

    @property
    def observations(self) -> Observations:
        self._wait()
        return super().observations

    def state_dict(self) -> dict[str, Any]:
        self._wait()
        return super().state_dict()
