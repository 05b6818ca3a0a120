"""Recorders: what an audit collects during a training run, whatever library trains the model.

:class:`Recorder` keeps the scores of every step, :class:`WholeRunRecorder` one score per canary for the whole
run. Observers assemble them from parts: a source of the claim, a log of the noise, facts about the training
run.
"""

from dpaudit.recording._claim_source import DPSGDParams, ReadClaim, TrainingInfo
from dpaudit.recording._noise_log import CoordinateSample, NoiseLog
from dpaudit.recording._recorder import Recorder
from dpaudit.recording._score_log import ObservedCanaries
from dpaudit.recording._signal_and_noise import ArrivalError, UntestedError
from dpaudit.recording._trajectory import LiveBound, Trajectory, TrajectoryPoint
from dpaudit.recording._whole_run import LikelihoodRatios, WholeRunRecorder

__all__ = [
    "ArrivalError",
    "CoordinateSample",
    "DPSGDParams",
    "LikelihoodRatios",
    "LiveBound",
    "NoiseLog",
    "ObservedCanaries",
    "ReadClaim",
    "Recorder",
    "TrainingInfo",
    "Trajectory",
    "TrajectoryPoint",
    "UntestedError",
    "WholeRunRecorder",
]
