"""What an audit keeps of a training while it runs, whoever trains."""

from dpaudit.recording._course import Course, Moment
from dpaudit.recording._live import LiveBound
from dpaudit.recording._ratios import LikelihoodRatios
from dpaudit.recording._recorder import Recorder
from dpaudit.recording._whole_run import WholeRunRecorder

__all__ = ["Course", "LikelihoodRatios", "LiveBound", "Moment", "Recorder", "WholeRunRecorder"]
