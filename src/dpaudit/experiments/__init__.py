"""Whole experiments: from a config file to a directory with the observations and the verdict.

Needs torch and pydantic, which are loaded with the first of these names: a worker process that imports only
``dpaudit.experiments.trials`` does not wait for them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dpaudit.errors import MissingExtraError

if TYPE_CHECKING:
    from dpaudit.experiments._build import EXAMPLES, Experiment, build, example
    from dpaudit.experiments._loop import Progress
    from dpaudit.experiments._run import Outcome, rehearse, run, use_one_thread
    from dpaudit.experiments.black_box import Running
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
    "Config": "config",
    "load_config": "config",
    "parse_config": "config",
    "Running": "black_box",
    "EXAMPLES": "_build",
    "Experiment": "_build",
    "build": "_build",
    "example": "_build",
    "Progress": "_loop",
    "Outcome": "_run",
    "rehearse": "_run",
    "run": "_run",
    "use_one_thread": "_run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dpaudit.experiments' has no attribute {name!r}")
    _require_extras()
    value = getattr(import_module(f"dpaudit.experiments.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _require_extras() -> None:
    """Fail here, with the line that installs them."""
    try:
        import_module("pydantic")
        import_module("torch")
    except ImportError as error:
        raise MissingExtraError("Running experiments", "torch") from error
