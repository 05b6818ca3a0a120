"""Trials of a user's own training function, and the score of a model that it returns."""

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
    """Two data sets that differ in the canary, of any type that the training function takes."""

    with_canary: Any
    without_canary: Any
    canary: tuple[Any, int] | None = None
    """Its input, as a model takes it, and its class; needed for functions that return a model."""


def function_recipe(
    function: str,
    *,
    data: str,
    data_arguments: Mapping[str, Any] | None = None,
    score: str | None = None,
) -> Recipe:
    """Return a recipe for ``train(dataset, seed) -> model or score``, named as ``module:function``.

    The function gets the data set with or without the canary, and a seed of 32 bits; it must not change the
    data set. Python's, numpy's and torch's own generators are seeded before every call, too. It returns a
    number, higher for "present", or a model: a function from a batch of inputs to logits.

    ``data`` names a function that makes :class:`Neighbours` from ``data_arguments``, once in a process.
    ``score`` names a function ``(model, input, label) -> float`` to be used instead of the logarithm of
    p / (1 - p), where p is the probability of the canary's label.
    """
    arguments = {"function": function, "data": data, "data_arguments": dict(data_arguments or {})}
    return Recipe(target="dpaudit:function-scorer", arguments={**arguments, "score": score})


def log_odds(model: Any, example: Any, label: int) -> float:
    """Return the logarithm of p / (1 - p), with p the probability of the label (Carlini et al. 2022).

    From the logits it is finite even where p is rounded to 1.

    >>> log_odds(lambda batch: [[100.0, 0.0, 0.0]], [0.5], 0)
    99.30685281944005
    """
    logits = _logits(model, example)
    if logits.ndim != 1 or not 0 <= label < len(logits) or len(logits) < 2:
        raise InputError(
            f"Expected a model that gives one logit for each class, got shape {logits.shape} for "
            f"class {label}."
        )
    with np.errstate(invalid="ignore"):  # the score of a diverged model is not finite, which is reported
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
    """Return the logits of the only example of a batch."""
    found = np.asarray(logits, dtype=np.float64)
    return found[0] if found.ndim > 1 and len(found) == 1 else found


def function_scorer(
    *, function: str, data: str, data_arguments: Mapping[str, Any], score: str | None
) -> Callable[[Sequence[Trial]], list[float]]:
    """Return the scorer of :func:`function_recipe`."""
    train, score_model = load(function), log_odds if score is None else load(score)
    _load_torch()
    neighbours = load(data)(**data_arguments)
    if not isinstance(neighbours, Neighbours):
        raise InputError(f"Expected {data!r} to make Neighbours, got {type(neighbours).__name__}.")

    versions = {present: _versions(_dataset(neighbours, present)) for present in (False, True)}

    def scored(trial: Trial) -> float:
        dataset = _dataset(neighbours, trial.present)
        with _seeded(seed := _seed_32(trial.seed)):
            found = train(dataset, seed)
            score = _score(found, function, neighbours.canary, score_model)
        if _versions(dataset) != versions[trial.present]:
            raise InputError(f"Expected {function!r} to leave its data set alone, but it changed a tensor.")
        return score

    return lambda trials: [scored(trial) for trial in trials]


def _dataset(neighbours: Neighbours, present: bool) -> Any:
    return neighbours.with_canary if present else neighbours.without_canary


def _versions(part: Any, depth: int = 2) -> list[int]:
    """Return torch's version counter of each tensor of a data set, which counts changes in place."""
    own = getattr(part, "_version", None)
    if isinstance(own, int):
        return [own]
    inside = part if isinstance(part, tuple | list) else getattr(part, "__dict__", {}).values()
    return [found for one in inside for found in _versions(one, depth - 1)] if depth else []


def _score(
    found: Any, function: str, canary: tuple[Any, int] | None, score_model: Callable[..., float]
) -> float:
    is_number = isinstance(found, Real) or (hasattr(found, "item") and getattr(found, "ndim", None) == 0)
    if is_number and not isinstance(found, bool):
        return float(found)
    if not callable(found):
        raise InputError(f"Expected {function!r} to return a score or a model, got {type(found).__name__}.")
    if canary is None:
        raise InputError(
            f"Expected {function!r} to return a score, got a model: there is no canary to ask it."
        )
    return float(score_model(found, *canary))


def _seed_32(seed: int) -> int:
    """Return a seed of 32 bits: torch uses no more of it, and numpy takes no more."""
    return int(np.random.SeedSequence(seed).generate_state(1, np.uint32)[0])


def _load_torch() -> None:
    """Load torch now: the first call of a function that imports it itself would be unseeded."""
    if find_spec("torch") is not None:
        import torch  # noqa: F401, PLC0415


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global generators, so that a function that uses them depends on its trial alone."""
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
