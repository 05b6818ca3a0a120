"""Who makes the trials: this process, processes on this machine, or a Ray cluster, behind one ``map``."""

from dpaudit.experiments.trials.pools._pool import Pool
from dpaudit.experiments.trials.pools._processes import Processes
from dpaudit.experiments.trials.pools._ray import Ray
from dpaudit.experiments.trials.pools._serial import Serial

__all__ = ["Pool", "Processes", "Ray", "Serial"]
