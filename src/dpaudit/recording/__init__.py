"""What an audit keeps of a training while it runs, whoever trains."""

from dpaudit.recording._recorder import LiveBound, Recorder
from dpaudit.recording._trajectory import Course, Moment
from dpaudit.recording._whole_run import LikelihoodRatios, WholeRunRecorder

__all__ = ["Course", "LikelihoodRatios", "LiveBound", "Moment", "Recorder", "WholeRunRecorder"]
