"""Counts, bounds and verdict of a stored run, derived again from its scores and compared with its result.

Each stored bound names its method, so it is computed again by that method, whichever version chose it. What
is not derived: power, estimates, p-values of tests, accuracy and timing. Only the seal protects those. Needs
neither torch nor the data of the run.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

import dpaudit
from dpaudit import canaries
from dpaudit._io import read_array, read_json
from dpaudit._provenance import digest
from dpaudit.accounting import Claim
from dpaudit.diagnostics._diagnosis import holm
from dpaudit.errors import InputError
from dpaudit.stats import (
    Bound,
    Guesses,
    Inference,
    Observations,
    ThresholdRule,
    TradeOff,
    Verdict,
    lower_bound,
    one_run_bound,
    one_run_fdp_bound,
)
from dpaudit.stats._audit import audit_untuned
from dpaudit.stats._bound import plain
from dpaudit.stats._observations import split_by_coins
from dpaudit.stats._one_run import too_many_correct
from dpaudit.stats.tradeoffs import ApproximateDP

SCORE_FILES: Final = {
    "scores": "f",
    "present": "b",
    "with_canary": "f",
    "without_canary": "f",
    "log_likelihood_ratios": "f",
}
"""The files of scores and presence, with their dtype kinds."""
_RELATIVE, _ABSOLUTE = 1e-6, 1e-8  # other machines and versions of SciPy round differently
_MOST_KNOWN = 1024  # derived bounds that are kept in memory
_CANARIES: Final[Mapping[str, Callable[..., canaries.GradientCanary]]] = {
    "dirac": canaries.Dirac,
    "constant": canaries.Constant,
    "mixed": canaries.Mixed,
    "mixture": canaries.Mixture,
    "random-direction": canaries.RandomDirection,
}
_NO_SCORES = "Its numbers could not be derived again: its scores are missing."
_KNOWN: dict[str, Mapping[str, Any]] = {}


def derive(folder: Path, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Compare a result with what follows from the scores; return remarks, raise if they contradict it.

    Counts and verdicts must agree. Bounds must agree if they were computed by this version of dpaudit;
    otherwise a remark names the first that this version derives differently.
    """
    path, writer = folder / "result.json", _version(folder, values)
    try:
        scores = _scores(folder, values)
        if scores is None:
            return (_NO_SCORES,)
        if writer == dpaudit.__version__:
            _require_known(values)
        differences = [*_differences(values, scores), *_verdict_differences(values, scores)]
    except InputError as error:
        if str(folder) in str(error):
            raise
        raise InputError(f"{str(error).removesuffix('.')}, in {path}.") from error
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"Expected the result of a run in {path}, but it is damaged; delete it and run the same command "
            "again to recreate it."
        ) from error
    # a verdict may depend on a bound that another version computed
    has_other_bound = any(one.key == "bound.parameter" for one in differences)
    for one in differences:
        is_own = writer == dpaudit.__version__ or (one.key == "verdict" and not has_other_bound)
        if is_own or one.key.endswith((".counts", "findings")):
            raise InputError(
                f"Expected {one.key} = {one.derived!s:.200} in {path}, as follows from the other files of "
                f"the run, got {one.stored!s:.200}: one of them has changed."
            )
    return _remarks(differences, "another version" if writer is None else f"version {writer}")


def _require_known(values: Mapping[str, Any]) -> None:
    """Raise if the bound of the verdict has a method of another name than those of this version."""
    bound = Bound.from_dict(values["bound"])
    parts = (bound.tradeoff, TradeOff), (bound.inference, Inference), (bound.threshold_rule, ThresholdRule)
    for part, kind in parts if not isinstance(bound.counts, Guesses) else parts[:1]:
        if not isinstance(part, kind):
            raise InputError(f"Expected a method of this version of dpaudit, got {part!s:.80}.")


def _scores(folder: Path, values: Mapping[str, Any]) -> StoredScores | None:
    """Return the scores, after checking that they can be counted or guessed from."""
    try:
        found = StoredScores.read(folder, values)
        if found is not None and not found.are_guessed:
            _ = found.observations
    except InputError as error:
        if str(folder) in str(error):
            raise
        raise InputError(f"The observations in {folder} are damaged. {error}") from error
    return found


@dataclass(frozen=True)
class Difference:
    """A stored number, and what follows from the scores instead."""

    key: str
    stored: object
    derived: object


def _remarks(differences: list[Difference], writer: str) -> tuple[str, ...]:
    """Return a sentence on numbers that this version derives differently."""
    if not differences:
        return ()
    shown = [one for one in differences if one.key == "verdict"] + differences
    first, count = shown[0], len(differences) - 1
    more = f", and {count} more {'number' if count == 1 else 'numbers'} differ" if count else ""
    return (
        f"Its bounds were computed by {writer} of dpaudit; this version derives {first.key} = "
        f"{first.derived!s:.80} instead of {first.stored!s:.80}{more}.",
    )


@dataclass(frozen=True, eq=False)
class StoredScores:
    """The scores of a run, as its bounds counted them, and the claim."""

    arrays: Mapping[str, np.ndarray]
    values: Mapping[str, Any]
    canary: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path, values: Mapping[str, Any]) -> StoredScores | None:
        """Read the scores of a run with this result; None if there are none."""
        found = {name: read_array(folder / f"{name}.npy", kinds) for name, kinds in SCORE_FILES.items()}
        arrays = {name: array for name, array in found.items() if array is not None}
        complete = (
            {"scores", "present"},
            {"with_canary", "without_canary"},
            {"log_likelihood_ratios", "present"},
        )
        if not any(names <= arrays.keys() for names in complete):
            return None
        stored = _config(folder)
        _require_config(values, stored, folder)
        audit = stored.get("config", {}).get("audit", {})
        return cls(arrays, values, values.get("canary") or audit.get("canary") or {})

    @cached_property
    def digest(self) -> str:
        """Digest of everything that a bound depends on besides its method."""
        found = hashlib.sha256()
        for name, array in self.arrays.items():
            found.update(f"{name} {array.dtype.str} {array.shape}".encode())
            found.update(np.ascontiguousarray(array).data)
        keys = "mode", "threat_model", "noise_multiplier", "sample_rate", "num_steps", "delta"
        return found.hexdigest() + digest([self.canary, [self.values.get(key) for key in keys]])

    @property
    def are_guessed(self) -> bool:
        """Whether there is one score per canary of a final model, and presence is guessed from them."""
        return "scores" in self.arrays and self.arrays["scores"].ndim == 1

    @cached_property
    def claim(self) -> Claim | None:
        """The claim; None for a run without noise, which claims nothing."""
        if not self.values["noise_multiplier"]:
            return None
        return Claim.dpsgd(
            noise_multiplier=self.values["noise_multiplier"],
            sample_rate=self.values["sample_rate"],
            num_steps=self.values["num_steps"],
            delta=self.values["delta"],
        )

    @cached_property
    def observations(self) -> Observations:
        """The scores that count for the bound."""
        if "with_canary" in self.arrays:
            present, absent = self.arrays["with_canary"], self.arrays["without_canary"]
            return Observations(with_canary=present, without_canary=absent)
        present = self.arrays["present"]
        if "log_likelihood_ratios" in self.arrays:
            return Observations.from_presence(self.arrays["log_likelihood_ratios"], present)
        scores = self.arrays["scores"]
        if self.values["mode"] == "paper":
            return Observations.from_presence(scores, present, normalized=True, paired=True)
        # as in the score log of a recorder
        kind = _CANARIES.get(str(self.canary.get("kind")))
        if kind is not None:
            fields = {name: value for name, value in self.canary.items() if name != "kind"}
            canary = kind(**fields)
            steps = [index for index in range(len(scores)) if canary.is_counted(index)]
            width = scores.shape[1] - canary.num_uncounted(scores.shape[1])
            scores, present = scores[steps, :width], present[steps, :width]
        Observations.from_presence(scores, present)  # raises unless coins are fair and scores finite
        coupled = self.values["threat_model"] == "input" and scores.shape[1] > 1
        return split_by_coins(scores, present, normalized=True, coupled=coupled)

    def guesses(self, count: int) -> Guesses:
        """Return the guesses on canaries of one run."""
        if "log_likelihood_ratios" in self.arrays:
            ratios = self.arrays["log_likelihood_ratios"]
            return Guesses.at_threshold(ratios, self.arrays["present"], threshold=0.0)
        return Guesses.from_scores(self.arrays["scores"], self.arrays["present"], num_guesses=count)

    def derived(self, bound: Bound, *, is_verdict: bool = False) -> Mapping[str, Any]:
        """Return the numbers of a bound, computed again; empty if its method is not known here."""
        parts = [part.to_dict() for part in (bound.tradeoff, bound.inference, bound.threshold_rule)]
        guesses = bound.counts.num_guesses if isinstance(bound.counts, Guesses) else None
        key = digest([self.digest, parts, bound.delta, bound.confidence, guesses, is_verdict])
        if key not in _KNOWN:
            if len(_KNOWN) >= _MOST_KNOWN:
                _KNOWN.clear()
            _KNOWN[key] = self._derive(bound, guesses, is_verdict=is_verdict)
        return _KNOWN[key]

    def _derive(self, bound: Bound, guesses: int | None, *, is_verdict: bool) -> Mapping[str, Any]:
        if not isinstance(bound.tradeoff, TradeOff):
            return {}
        if guesses is not None:
            return self._from_guesses(bound, bound.tradeoff, guesses)
        if not isinstance(bound.inference, Inference) or not isinstance(bound.threshold_rule, ThresholdRule):
            return {}
        method: dict[str, Any] = {
            "confidence": bound.confidence,
            "tradeoff": bound.tradeoff,
            "inference": bound.inference,
            "threshold": bound.threshold_rule,
        }
        if is_verdict and self.claim is not None:
            result = audit_untuned(self.observations, claim=self.claim, **method)
            return _numbers(result.bound) | {"verdict": result.verdict.name}
        found = lower_bound(self.observations, delta=bound.delta, **method)
        composed = None
        if self.claim is not None and bound.delta == self.values["delta"]:
            composed = plain(self.claim.hypothesis(bound.tradeoff).epsilon(found.parameter))
        return _numbers(found) | {"training_epsilon": composed}

    def _from_guesses(self, bound: Bound, tradeoff: TradeOff, count: int) -> Mapping[str, Any]:
        guesses, level = self.guesses(count), {"delta": bound.delta, "confidence": bound.confidence}
        if isinstance(tradeoff, ApproximateDP):
            return _numbers(one_run_bound(guesses, **level))
        found = one_run_fdp_bound(guesses, tradeoff=tradeoff, **level)
        claimed = math.inf if self.claim is None else self.claim.hypothesis(tradeoff).parameter
        verdict = Verdict.NO_VIOLATION
        if found.parameter > claimed:
            verdict = Verdict.VIOLATION
        else:
            best = Guesses(num_canaries=guesses.num_canaries, num_guesses=count, num_correct=count)
            if not too_many_correct(best, tradeoff, claimed, 1 - bound.confidence):
                verdict = Verdict.UNDERPOWERED
        return _numbers(found) | {"verdict": verdict.name}


def _numbers(bound: Bound) -> dict[str, Any]:
    return {
        "counts": bound.counts.to_dict(),
        "threshold": bound.threshold,
        "parameter": plain(bound.parameter),
        "epsilon": plain(bound.epsilon),
    }


def _differences(values: Mapping[str, Any], scores: StoredScores) -> Iterator[Difference]:
    """Yield the stored numbers that differ from the derived ones: claim, bound, then all methods."""
    bound = Bound.from_dict(values["bound"])
    if scores.claim is not None and isinstance(bound.tradeoff, TradeOff):
        hypothesis = scores.claim.hypothesis(bound.tradeoff)
        claimed = {"epsilon": plain(scores.claim.epsilon), "parameter": plain(hypothesis.parameter)}
        yield from _compared("claim", values["claim"], {**claimed, "delta": values["delta"]})
    verdict = dict(scores.derived(bound, is_verdict=True))
    verdict.pop("verdict", None)
    yield from _compared("bound", values["bound"], {**verdict, "confidence": values["confidence"]})
    for row in values["methods"]:
        found = {**scores.derived(Bound.from_dict(row)), "confidence": values["confidence"]}
        found.pop("verdict", None)
        if row.get("training_epsilon") is None:
            found.pop("training_epsilon", None)
        yield from _compared(f"methods.{ascii(row.get('name'))[1:-1]:.40}", row, found)
    if values.get("one_run_bound") is not None:
        row = values["one_run_bound"]
        found = dict(scores.derived(Bound.from_dict(row)))
        found.pop("verdict", None)
        for one in _compared("one_run_bound", row, found):
            # version 0.1 guessed otherwise
            yield replace(one, key=one.key.replace(".counts", ".guesses"))


def _compared(where: str, stored: Mapping[str, Any], derived: Mapping[str, Any]) -> Iterator[Difference]:
    for key, value in derived.items():
        if not _is_close(stored.get(key), value):
            yield Difference(f"{where}.{key}", stored.get(key), value)


def _is_close(stored: object, derived: object) -> bool:
    if (
        isinstance(stored, bool)
        or not isinstance(stored, int | float)
        or not isinstance(derived, int | float)
    ):
        return stored == derived
    return math.isclose(stored, derived, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)


def _verdict_differences(values: Mapping[str, Any], scores: StoredScores) -> Iterator[Difference]:
    """Yield the verdict if it is not that of the bound and the tests, and findings without p-values."""
    derived = scores.derived(Bound.from_dict(values["bound"]), is_verdict=True).get("verdict")
    tests = values.get("diagnosis")
    if tests is not None:
        expected, found = _findings(tests)
        if expected != found:
            yield Difference("findings", sorted(found), sorted(expected))
        # in version 0.1, no verdict rested on tests
        is_joint = values.get("refuted") is not None
        derived = Verdict.VIOLATION.name if is_joint and tests["findings"] else derived
    stored = values.get("verdict")
    # failed trials are errors that the scores do not show
    may_have_failed = bool(values.get("num_failed")) and derived == Verdict.NO_VIOLATION.name
    is_known = derived is not None and not (may_have_failed and stored == Verdict.UNDERPOWERED.name)
    if is_known and stored != derived:
        yield Difference("verdict", stored, derived)


def _findings(tests: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """Return the tests that their p-values make findings, and those that are stored as findings."""
    names = [str(one["name"]) for one in tests["tests"]]
    adjusted, limit = holm([float(one["p_value"]) for one in tests["tests"]]), 1 - float(tests["confidence"])
    expected = {name for name, level in zip(names, adjusted, strict=True) if level <= limit}
    # the others need no statistics
    return expected, {str(one["name"]) for one in tests["findings"]}.intersection(names)


def _require_config(values: Mapping[str, Any], stored: Mapping[str, Any], folder: Path) -> None:
    """Raise if the claim is not about the training run that the config describes."""
    config, resolved = stored.get("config", {}), stored.get("resolved", {})
    training, audit = config.get("training", {}), config.get("audit", {})
    pairs = (
        ("noise_multiplier", resolved.get("noise_multiplier")),
        ("sample_rate", resolved.get("sample_rate")),
        ("num_steps", training.get("num_steps")),
        ("delta", training.get("delta")),
        ("mode", audit.get("mode")),
        ("threat_model", config.get("threat_model")),
    )
    for key, expected in pairs:
        if expected is not None and values.get(key) != expected:
            raise InputError(
                f"Expected {key} = {expected!s:.60} in {folder / 'result.json'}, as in config.json, got "
                f"{values.get(key)!s:.60}: one of the files has changed."
            )
    least = audit.get("confidence")
    if least is not None and values["confidence"] < least - _RELATIVE:
        raise InputError(
            f"Expected a confidence of at least {least:g} in {folder / 'result.json'}, as in config.json, "
            f"got {values['confidence']:g}: one of the files has changed."
        )


def _config(folder: Path) -> Mapping[str, Any]:
    """Return the stored config; empty if it was removed, because it holds the seeds."""
    path = folder / "config.json"
    return read_json(path) if path.exists() else {}


def _version(folder: Path, values: Mapping[str, Any]) -> str | None:
    """Return the version of dpaudit that computed the result, if it is known."""
    try:
        return str(values["provenance"]["packages"]["dpaudit"])
    except (KeyError, TypeError):
        path = folder / "versions.json"
        found = read_json(path).get("dpaudit") if path.exists() else None
        return None if found is None else f"{found!s:.40}"
