"""Recorders: what an audit collects during a training run, whatever library trains the model.

:class:`Recorder` keeps the scores of every step, :class:`WholeRunRecorder` one score per canary for the whole
run. Observers assemble them from parts: a source of the claim, checks of the steps, facts about the training
run.
"""

from dpaudit.diagnostics import ObservedStep, StepCheck
from dpaudit.recording._claim_source import DPSGDParams, ReadClaim, TrainingInfo
from dpaudit.recording._joint_verdict import SupportsDiagnose
from dpaudit.recording._recorder import Recorder
from dpaudit.recording._score_log import ObservedCanaries
from dpaudit.recording._signal_check import MissingCanaryError, UntestedError
from dpaudit.recording._trajectory import LiveBound, Trajectory, TrajectoryPoint
from dpaudit.recording._whole_run import LikelihoodRatios, WholeRunRecorder

__all__ = [
    "DPSGDParams",
    "LikelihoodRatios",
    "LiveBound",
    "MissingCanaryError",
    "ObservedCanaries",
    "ObservedStep",
    "ReadClaim",
    "Recorder",
    "StepCheck",
    "SupportsDiagnose",
    "TrainingInfo",
    "Trajectory",
    "TrajectoryPoint",
    "UntestedError",
    "WholeRunRecorder",
]
