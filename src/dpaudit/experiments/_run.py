"""Run one experiment, from its config to its result; an interrupted run is resumed.

``run`` keeps everything in the output directory of the config; ``rehearse`` runs without checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from dpaudit._io import read_json
from dpaudit.canaries import ThreatModel
from dpaudit.errors import InputError
from dpaudit.experiments import _build as building
from dpaudit.experiments._analysis import RESULT_SCHEMA, RunScores, compare, plain_values
from dpaudit.experiments._directory import MANIFEST, RunDirectory
from dpaudit.experiments._loop import (
    Listener,
    Progress,
    Running,
    Trained,
    ignore,
    summary,
    train,
)
from dpaudit.experiments._recompute import verify_finished
from dpaudit.experiments.black_box import FinalModel, ManyRuns, run_many
from dpaudit.experiments.config import Config
from dpaudit.experiments.config._schema import ManyRunsConfig
from dpaudit.training import EndToEnd


@dataclass(frozen=True)
class Outcome:
    """Plain values of ``result.json``, and whether the run had been finished before.

    ``seal`` is the digest of the manifest; ``remarks`` are sentences on files that were removed since.
    """

    values: dict[str, Any]
    was_finished: bool
    seal: str
    remarks: tuple[str, ...] = ()


def run(
    config: Config,
    *,
    watch: Callable[[Progress], None] = ignore,
    say: Callable[[str], None] = ignore,
    crafting: Callable[[int, int], None] = ignore,
    trials: Callable[[Running], None] = ignore,
    retry_failed: bool = False,
) -> Outcome:
    """Train, audit and keep everything in the config's output directory.

    With the same config, resume from the last checkpoint or return the existing result.

    Args:
        config: The config, such as from :func:`load_config`.
        watch: Called after every step.
        say: Called with a description of the work in between.
        crafting: Called with the number of finished crafting steps of canaries, and their total number.
        trials: Called after every group of models.
        retry_failed: Whether failed training runs are repeated.

    Returns:
        The values of the result, and whether the run was already finished.

    Raises:
        InputError: The directory holds a run with another config, or files of another run.

    Example:
        ``run(load_config("config.toml")).values["verdict"]``

    """
    listener = Listener(message=say, step=watch, crafting=crafting, trials=trials)
    directory = RunDirectory(config.output)
    with directory.locked():
        stored, resolved = directory.resolved(config), None
        if stored is not None:
            resolved = building.Resolved.from_dict(stored, str(directory.path / "config.json"))
            building.require_same_code(resolved, config)
            finished = verify_finished(directory.path) if directory.has_result else None
            if finished is not None and not (retry_failed and finished.values.get("num_failed")):
                seal, remarks = finished.seal.digest, finished.remarks
                return Outcome(finished.values, was_finished=True, seal=seal, remarks=remarks)
            directory.require_own_files(config)
        values = _run_training(config, directory, resolved, listener, retry_failed=retry_failed)
        return Outcome(values, was_finished=False, seal=read_json(directory.path / MANIFEST)["seal"])


def rehearse(
    config: Config,
    *,
    watch: Callable[[Progress], None] = ignore,
    crafting: Callable[[int, int], None] = ignore,
    keep: bool = False,
) -> dict[str, Any]:
    """Train and audit without checkpoints.

    Args:
        config: The config.
        watch: Called after every step.
        crafting: Called with the number of finished crafting steps of canaries, and their total number.
        keep: Whether everything is written to the output directory at the end, replacing any earlier run with
            the same config.

    Returns:
        The values of the result.

    Raises:
        InputError: The config describes many models, or the directory holds another run.

    Example:
        ``rehearse(load_config("config.toml"))["verdict"]``

    """
    if config.threat_model == ThreatModel.BLACK_BOX.value:
        raise InputError(
            "threat_model must be 'gradient' or 'input', got 'black-box'; use run(), which keeps the "
            "scores in a directory."
        )
    if keep:
        RunDirectory(config.output).resolved(config)  # raises if there is another run, or a file of one
    listener, data = Listener(step=watch), building.load_data(config.data)
    resolved = building.resolve(config, data[0])
    experiment = building.build(config, resolved, data, crafting)
    values = _outcome(experiment, train(experiment, None, listener))
    if keep:
        return RunDirectory(config.output).replace(config, resolved, _arrays(experiment), values)
    return values


def use_one_thread() -> None:
    """Limit torch to one thread: several threads on one core mostly wait for each other."""
    torch.set_num_threads(1)


def _run_training(
    config: Config,
    directory: RunDirectory,
    resolved: building.Resolved | None,
    listener: Listener,
    *,
    retry_failed: bool,
) -> dict[str, Any]:
    """Train, audit and return the values of ``result.json``; ``resolved`` is None for a new run."""
    data = building.load_data(config.data)
    if resolved is not None:
        building.require_same_data(resolved, data[0])
        begin: Callable[[], None] = directory.note_start
    else:
        if config.training.target_epsilon is not None:
            listener.message("Calibrating the noise")
        resolved = building.resolve(config, data[0])
        # the config is written only after all checks have passed
        begin = partial(directory.start, config, resolved)
    if isinstance(config.audit, ManyRunsConfig):
        runs = ManyRuns(config=config, resolved=resolved, data=data)
        return run_many(runs, directory, begin=begin, listener=listener, retry_failed=retry_failed)
    experiment: building.Experiment | FinalModel
    if config.threat_model == ThreatModel.BLACK_BOX.value:
        experiment, methods = FinalModel.of(config, resolved, data), ""
    else:
        experiment, methods = building.build(config, resolved, data, listener.crafting), " of all methods"
    begin()
    listener.message("Training")
    trained = train(experiment, directory.checkpoint, listener)
    if trained.stopped_early:
        listener.message(f"Stopped at step {experiment.training.num_done:,}: the claim is refuted")
    listener.message(f"Computing the bounds{methods}")
    return directory.finish(config, resolved, _arrays(experiment), _outcome(experiment, trained))


def _arrays(experiment: building.Experiment | FinalModel) -> dict[str, np.ndarray]:
    """Return the recorded observations, keyed by file name."""
    if isinstance(experiment, FinalModel):
        return {"scores": experiment.scores, "present": experiment.present}
    state = experiment.audit.recorder.state_dict()
    if isinstance(experiment.audit, EndToEnd):
        return {"log_likelihood_ratios": state["ratios"], "present": state["present"]}
    return {"scores": state["scores"], "present": state["present"]}


def _outcome(experiment: building.Experiment | FinalModel, trained: Trained) -> dict[str, Any]:
    """Return the verdict, all bounds, power, tests of the noise, accuracy and timing."""
    started, about = time.monotonic(), summary(experiment, trained)
    scores = RunScores(_arrays(experiment), about, experiment.config.identity()["audit"])
    result = None if isinstance(experiment, FinalModel) else experiment.audit.recorder.audit()
    values = {"schema_version": RESULT_SCHEMA, **plain_values(scores, compare(scores, result)), **about}
    values["timing"]["audit_seconds"] = round(time.monotonic() - started, 3)
    return values
