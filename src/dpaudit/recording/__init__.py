"""The recorder: what an audit collects during a training run, whatever library trains the model.

A :class:`Recorder` has a scorer: :class:`PerStep` keeps the scores of every step, :class:`WholeRun` one score
per canary for the whole run. Observers add further parts: a source of the claim, checks of the steps, facts
about the training run.
"""

from dpaudit.diagnostics import ObservedStep, StepCheck
from dpaudit.recording._claim_source import DPSGDParams, ReadClaim, TrainingInfo, UntestedError, claimed_noise
from dpaudit.recording._joint_verdict import SupportsDiagnose
from dpaudit.recording._per_step import LiveBound, PerStep, Trajectory, TrajectoryPoint
from dpaudit.recording._recorder import CanaryScorer, Recorder
from dpaudit.recording._score_log import MissingCanaryError, ObservedCanaries
from dpaudit.recording._whole_run import WHOLE_RUN_RULE, WholeRun

__all__ = [
    "WHOLE_RUN_RULE",
    "CanaryScorer",
    "DPSGDParams",
    "LiveBound",
    "MissingCanaryError",
    "ObservedCanaries",
    "ObservedStep",
    "PerStep",
    "ReadClaim",
    "Recorder",
    "StepCheck",
    "SupportsDiagnose",
    "TrainingInfo",
    "Trajectory",
    "TrajectoryPoint",
    "UntestedError",
    "WholeRun",
    "claimed_noise",
]
