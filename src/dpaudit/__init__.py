"""Check whether differentially private training provides the privacy it claims."""
# ruff: noqa: F401, F403, F405  # a test compares __all__ with what its homes define

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names of __all__, which are imported on first access
    from dpaudit import jax_privacy, opacus, tensorflow
    from dpaudit.accounting import *
    from dpaudit.canaries import *
    from dpaudit.diagnostics import *
    from dpaudit.errors import *
    from dpaudit.recording import *
    from dpaudit.stats import *

__version__ = "0.2.0"

__all__ = [
    "Adversarial",
    "ApproximateDP",
    "BestOf",
    "Betting",
    "Blank",
    "Bound",
    "Claim",
    "ClopperPearson",
    "Constant",
    "Crafted",
    "Diagnosis",
    "Diagnostics",
    "Dirac",
    "DpauditError",
    "ErrorCounts",
    "Estimate",
    "Finding",
    "FindingError",
    "Fixed",
    "Gaussian",
    "Guesses",
    "HeldOut",
    "IncompleteError",
    "Inference",
    "InputError",
    "JointExact",
    "KatzLog",
    "Kind",
    "Laplace",
    "Leak",
    "LiveBound",
    "Mislabelled",
    "MissingExtraError",
    "Mixture",
    "Observations",
    "Optimal",
    "PiecewiseLinear",
    "Plan",
    "Posterior",
    "Power",
    "Predictable",
    "PureDP",
    "RandomDirection",
    "RandomizedResponse",
    "Recorder",
    "Result",
    "RocBand",
    "SameData",
    "Simultaneous",
    "SubsampledGaussian",
    "Tails",
    "ThreatModel",
    "ThresholdRule",
    "TradeOff",
    "Verdict",
    "ViolationError",
    "__version__",
    "audit",
    "likely_causes",
    "lower_bound",
    "noise_for_epsilon",
    "one_run_bound",
    "one_run_fdp_bound",
    "plan_canaries",
    "plan_observations",
    "plan_steps",
    "smallest_leak",
    "training_epsilon",
]

_HOMES = "errors", "canaries", "stats", "accounting", "recording", "diagnostics"


def __getattr__(name: str) -> Any:
    """Import public names on first access: importing scipy alone takes a third of a second."""
    if name in {"jax_privacy", "opacus", "tensorflow"}:  # short paths
        return import_module(f"dpaudit.{name}")
    if name in __all__:
        for home in _HOMES:
            module = import_module(f"dpaudit.{home}")
            if name in module.__all__:
                globals()[name] = value = getattr(module, name)
                return value
    raise AttributeError(f"module 'dpaudit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "jax_privacy", "opacus", "tensorflow"})
