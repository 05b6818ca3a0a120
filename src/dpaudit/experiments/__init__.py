"""Experiments, from a config file to a directory with the observations and the verdict.

Requires torch and pydantic, which are imported lazily: a worker process that imports only
``dpaudit.experiments.trials`` does not wait for them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dpaudit.errors import MissingExtraError

if TYPE_CHECKING:
    from dpaudit.experiments._build import EXAMPLES, Experiment, build, example
    from dpaudit.experiments._loop import Progress, Running
    from dpaudit.experiments._run import Outcome, rehearse, run, use_one_thread
    from dpaudit.experiments.config import Config, load_config, parse_config

__all__ = [
    "EXAMPLES",
    "Config",
    "Experiment",
    "Outcome",
    "Progress",
    "Running",
    "build",
    "example",
    "load_config",
    "parse_config",
    "rehearse",
    "run",
    "use_one_thread",
]

_HOMES = {
    "_build": ("EXAMPLES", "Experiment", "build", "example"),
    "_loop": ("Progress", "Running"),
    "_run": ("Outcome", "rehearse", "run", "use_one_thread"),
    "config": ("Config", "load_config", "parse_config"),
}


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'dpaudit.experiments' has no attribute {name!r}")
    try:  # fail here, with the command that installs them
        import_module("pydantic")
        import_module("torch")
    except ImportError as error:
        raise MissingExtraError("Running experiments", "torch pydantic") from error
    globals()[name] = value = getattr(import_module(f"dpaudit.experiments.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
