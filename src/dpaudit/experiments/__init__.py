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

_HOMES = "config", "black_box", "_build", "_loop", "_run"


def __getattr__(name: str) -> Any:
    if name in __all__:
        _require_extras()
        for home in _HOMES:
            module = import_module(f"dpaudit.experiments.{home}")
            if name in module.__all__:
                globals()[name] = value = getattr(module, name)
                return value
    raise AttributeError(f"module 'dpaudit.experiments' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _require_extras() -> None:
    """Fail here, with the line that installs them."""
    try:
        import_module("pydantic")
        import_module("torch")
    except ImportError as error:
        raise MissingExtraError("Running experiments", "torch") from error
