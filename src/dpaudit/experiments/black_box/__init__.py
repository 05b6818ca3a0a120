"""Black-box audits: the adversary inserts examples, and asks final models only."""

from dpaudit.experiments.black_box._final_model import FinalModel
from dpaudit.experiments.black_box._recipe import ManyRuns
from dpaudit.experiments.black_box._run import run_many
from dpaudit.experiments.black_box._running import Running

__all__ = ["FinalModel", "ManyRuns", "Running", "run_many"]
