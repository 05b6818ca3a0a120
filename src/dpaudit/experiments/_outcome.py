"""The result of a run as plain values, and its observations as arrays."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import numpy as np

from dpaudit.accounting import SubsampledGaussian
from dpaudit.canaries import InputCanary
from dpaudit.experiments._build import Experiment
from dpaudit.experiments._directory import SCHEMA_VERSION
from dpaudit.experiments._loop import Trained
from dpaudit.experiments.config import EndToEndConfig, PaperConfig
from dpaudit.methods import examine
from dpaudit.recording import WholeRunRecorder
from dpaudit.stats import TradeOff
from dpaudit.training import OneRun, accuracy

__all__ = ["observed", "outcome"]

_SHARED = (
    "Gradients of input canaries are not orthogonal: scores of one step share their noise. The verdict's "
    "bound allows for that; bounds by counts do not, and are left out."
)
_BETS = "f-DP(betting)"
_STOPPED = (
    "The run was stopped at its first violation. The verdict's bound allows for that; bounds by counts and "
    "tests of the noise do not, and are left out."
)


def observed(experiment: Experiment) -> dict[str, np.ndarray]:
    """What was recorded, by the names of the files."""
    state = experiment.audit.recorder.state_dict()
    if isinstance(experiment.audit.recorder, WholeRunRecorder):
        return {"log_likelihood_ratios": state["ratios"], "present": state["present"]}
    return {"scores": state["scores"], "present": state["present"]}


def outcome(experiment: Experiment, trained: Trained) -> dict[str, Any]:
    """Verdict, all bounds, power, tests of the noise, accuracy and timing."""
    started = time.monotonic()
    values = _bounds(experiment, trained)
    training, resolved = experiment.training, experiment.resolved
    return {
        "schema_version": SCHEMA_VERSION,
        **values,
        "diagnosis": _diagnosis(experiment, trained),
        "mode": experiment.config.audit.mode,
        "threat_model": experiment.config.threat_model,
        "noise_multiplier": resolved.noise_multiplier,
        "sample_rate": resolved.sample_rate,
        "num_steps": training.settings.num_steps,
        "num_done": training.num_done,
        "stopped_early": trained.stopped_early,
        "num_parameters": training.num_parameters,
        "num_canaries": experiment.audit.num_canaries,
        "accuracy": accuracy(training.model, experiment.test.to(training.device)),
        "timing": {
            "training_seconds": round(trained.seconds, 3),
            "steps_per_second": round(training.num_done / max(trained.seconds, 1e-9), 3),
            "audit_seconds": round(time.monotonic() - started, 3),
        },
    }


def _bounds(experiment: Experiment, trained: Trained) -> dict[str, Any]:
    recorder = experiment.audit.recorder
    of_run = isinstance(recorder, WholeRunRecorder)
    found = examine(
        recorder.observations,
        delta=recorder.claim.delta,
        confidence=recorder.confidence,
        claim=recorder.claim,
        tradeoff=_curve(experiment),
        of_steps=not of_run,
        threshold=0.0 if of_run else None,
        names=_names(experiment, trained),
        result=recorder.audit(),
    )
    values = found.to_dict()
    if isinstance(recorder, WholeRunRecorder):
        values["one_run_bound"] = recorder.one_run_bound().to_dict()
    if trained.stopped_early:
        values["notes"].append(_STOPPED)
    elif _shares_noise(experiment):
        values["notes"].append(_SHARED)
    return values


def _diagnosis(experiment: Experiment, trained: Trained) -> dict[str, Any] | None:
    """Tests of the noise and the batches, with an error of their own; none of a run that chose its end."""
    if trained.stopped_early:
        return None
    return experiment.tests.diagnose(experiment.audit.recorder.confidence).to_dict()


def _names(experiment: Experiment, trained: Trained) -> Collection[str] | None:
    """The methods beside the verdict that hold here."""
    asked = experiment.config.audit.methods
    if trained.stopped_early:  # a fixed number of observations is what the others count on
        return ()
    if _shares_noise(experiment):
        return () if asked is not None and _BETS not in asked else (_BETS,)
    return asked


def _shares_noise(experiment: Experiment) -> bool:
    """Whether scores of one step depend on each other also in a correct training."""
    audit = experiment.audit
    return isinstance(audit, OneRun) and isinstance(audit.canary, InputCanary) and audit.num_canaries > 1


def _curve(experiment: Experiment) -> TradeOff | None:
    """The curve of one observation, where it is not that of a step that has the canary."""
    recorder, audit = experiment.audit.recorder, experiment.config.audit
    if isinstance(audit, EndToEndConfig) and isinstance(recorder, WholeRunRecorder):
        return recorder.tradeoff
    if isinstance(audit, PaperConfig) and audit.canary_rate < 1:
        return SubsampledGaussian(audit.canary_rate, 1)
    return None
