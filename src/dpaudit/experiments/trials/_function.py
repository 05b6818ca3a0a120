"""Trials of a user's training function, and the score of the model that it returns."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpaudit.errors import InputError
from dpaudit.experiments.trials._trial_plan import Recipe, Trial, load


@dataclass(frozen=True, kw_only=True, eq=False)
class Neighbours:
    """Two data sets that differ only in the canary, of any type that the training function accepts."""

    with_canary: Any
    without_canary: Any
    canary: tuple[Any, int] | None = None
    """Its input, as passed to a model, and its class; needed for functions that return a model."""


def function_recipe(
    function: str,
    *,
    data: str,
    data_arguments: Mapping[str, Any] | None = None,
    score: str | None = None,
) -> Recipe:
    """Return a recipe for ``train(dataset, seed) -> model or score``, named as ``module:function``.

    The function receives the data set with or without the canary and a 32-bit seed; it must not modify the
    data set. The global RNGs of Python, NumPy and torch are also seeded before every call. It returns a score
    that is higher if the canary is present, or a model: a callable that maps a batch of inputs to logits.

    ``data`` names a function that creates :class:`Neighbours` from ``data_arguments``, once per process.
    ``score`` names a function ``(model, input, label) -> float`` that replaces the default, the logarithm of
    p / (1 - p), where p is the probability of the canary's label.
    """
    arguments = {"function": function, "data": data, "data_arguments": dict(data_arguments or {})}
    return Recipe(target="dpaudit:function-scorer", arguments={**arguments, "score": score})


def log_odds(model: Any, example: Any, label: int) -> float:
    """Return the logarithm of p / (1 - p), where p is the probability of the label (Carlini et al. 2022).

    It is computed from the logits and therefore finite even if p rounds to 1.

    >>> log_odds(lambda batch: [[100.0, 0.0, 0.0]], [0.5], 0)
    99.30685281944005
    """
    logits = _logits(model, example)
    if logits.ndim != 1 or not 0 <= label < len(logits) or len(logits) < 2:
        raise InputError(
            f"The model must return one logit for each class, got shape {logits.shape} for class {label}."
        )
    with np.errstate(invalid="ignore"):  # the non-finite score of a diverged model is reported later
        return float(logits[label] - np.logaddexp.reduce(np.delete(logits, label)))


def _logits(model: Any, example: Any) -> NDArray[np.float64]:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        return _as_logits(model(np.asarray(example)[None]))
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            device = next(iter(model.parameters()), torch.empty(0)).device
            return _as_logits(model(torch.as_tensor(example, device=device)[None]).cpu())
    finally:
        model.train(was_training)


def _as_logits(logits: Any) -> NDArray[np.float64]:
    """Return the logits of the only example in a batch."""
    array = np.asarray(logits, dtype=np.float64)
    return array[0] if array.ndim > 1 and len(array) == 1 else array


def function_scorer(
    *, function: str, data: str, data_arguments: Mapping[str, Any], score: str | None
) -> Callable[[Sequence[Trial]], list[float]]:
    """Return the scorer of :func:`function_recipe`."""
    train, score_model = load(function), log_odds if score is None else load(score)
    _load_torch()
    neighbours = load(data)(**data_arguments)
    if not isinstance(neighbours, Neighbours):
        raise InputError(f"{data!r} must return Neighbours, got {type(neighbours).__name__}.")

    versions = {present: _versions(_dataset(neighbours, present)) for present in (False, True)}

    def scored(trial: Trial) -> float:
        dataset = _dataset(neighbours, trial.present)
        with _seeded(seed := _seed_32(trial.seed)):
            outcome = train(dataset, seed)
            score = _score(outcome, function, neighbours.canary, score_model)
        if _versions(dataset) != versions[trial.present]:
            raise InputError(f"{function!r} must not modify its data set, but it changed a tensor.")
        return score

    return lambda trials: [scored(trial) for trial in trials]


def _dataset(neighbours: Neighbours, present: bool) -> Any:
    return neighbours.with_canary if present else neighbours.without_canary


def _versions(part: Any, depth: int = 2) -> list[int]:
    """Return torch's version counter of each tensor in a data set, which counts in-place changes."""
    version = getattr(part, "_version", None)
    if isinstance(version, int):
        return [version]
    inside = part if isinstance(part, tuple | list) else getattr(part, "__dict__", {}).values()
    return [inner for item in inside for inner in _versions(item, depth - 1)] if depth else []


def _score(
    outcome: Any, function: str, canary: tuple[Any, int] | None, score_model: Callable[..., float]
) -> float:
    is_number = isinstance(outcome, Real) or (
        hasattr(outcome, "item") and getattr(outcome, "ndim", None) == 0
    )
    if is_number and not isinstance(outcome, bool):
        return float(outcome)
    if not callable(outcome):
        raise InputError(f"{function!r} must return a score or a model, got {type(outcome).__name__}.")
    if canary is None:
        raise InputError(
            f"{function!r} returned a model, which cannot be scored; set Neighbours.canary, or return a "
            "score."
        )
    return float(score_model(outcome, *canary))


def _seed_32(seed: int) -> int:
    """Return a 32-bit seed: torch uses and NumPy accepts no more bits."""
    return int(np.random.SeedSequence(seed).generate_state(1, np.uint32)[0])


def _load_torch() -> None:
    """Import torch now: if the user's function imported it, its first call would be unseeded."""
    if find_spec("torch") is not None:
        import torch  # noqa: F401, PLC0415


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global RNGs, so that a function that uses them depends only on its trial."""
    torch = sys.modules.get("torch")
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
    before = torch.get_rng_state() if torch is not None else None
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    if torch is not None:
        torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
        if torch is not None and before is not None:
            torch.set_rng_state(before)
