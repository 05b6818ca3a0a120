"""Black-box audits: the adversary inserts examples and queries only final models."""

from dpaudit.experiments._loop import Running
from dpaudit.experiments.black_box._final_model import FinalModel
from dpaudit.experiments.black_box._many_runs import ManyRuns, run_many

__all__ = ["FinalModel", "ManyRuns", "Running", "run_many"]
