"""What an audit records of a training while it runs, whatever library trains.

:class:`Recorder` keeps the scores of every step, :class:`WholeRunRecorder` one score a canary of the whole
run. Observers compose them of parts: where the claim comes from, a log of the noise, what is known of the
training.
"""

from dpaudit.recording._claim_source import DPSGDParams, ReadClaim, TrainingInfo
from dpaudit.recording._recorder import Recorder
from dpaudit.recording._signal_and_noise import ArrivalError, CoordinateSample, NoiseLog, UntestedError
from dpaudit.recording._trajectory import LiveBound, Trajectory, TrajectoryPoint
from dpaudit.recording._whole_run import LikelihoodRatios, WholeRunRecorder

__all__ = [
    "ArrivalError",
    "CoordinateSample",
    "DPSGDParams",
    "LikelihoodRatios",
    "LiveBound",
    "NoiseLog",
    "ReadClaim",
    "Recorder",
    "TrainingInfo",
    "Trajectory",
    "TrajectoryPoint",
    "UntestedError",
    "WholeRunRecorder",
]
