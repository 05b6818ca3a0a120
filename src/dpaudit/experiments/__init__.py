"""Whole experiments: from a config file to a directory with the observations and the verdict.

Needs torch and pydantic, which the command line loads only for the commands that train.
"""

from dpaudit.errors import MissingExtraError

try:
    import pydantic as _pydantic  # noqa: F401  # fail here, with the line that installs them
    import torch as _torch  # noqa: F401
except ImportError as _error:
    raise MissingExtraError("Running experiments", "torch") from _error

from dpaudit.experiments._build import Experiment, build
from dpaudit.experiments._examples import EXAMPLES, example
from dpaudit.experiments._loop import Progress
from dpaudit.experiments._run import Outcome, rehearse, run
from dpaudit.experiments._threads import use_one_thread
from dpaudit.experiments.config import Config, load_config, parse_config

__all__ = [
    "EXAMPLES",
    "Config",
    "Experiment",
    "Outcome",
    "Progress",
    "build",
    "example",
    "load_config",
    "parse_config",
    "rehearse",
    "run",
    "use_one_thread",
]
