"""From a config to its audit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from dpaudit._torch.crafting import Tell, nobody
from dpaudit.canaries import (
    Adversarial,
    Blank,
    Constant,
    Crafted,
    Dirac,
    GradientCanary,
    InputCanary,
    Mislabelled,
    Mixed,
    RandomDirection,
)
from dpaudit.experiments._resolved import Resolved
from dpaudit.experiments.config import AuditConfig, Config, EndToEndConfig, PaperConfig
from dpaudit.recording import LiveBound
from dpaudit.training import EndToEnd, OneRun, TwoBatches
from dpaudit.training.data import HeldOutData

__all__ = ["Audit", "Watchers", "audit_for"]

Audit: TypeAlias = OneRun | TwoBatches | EndToEnd

_CANARIES: Mapping[str, Callable[..., GradientCanary | InputCanary]] = {
    "dirac": Dirac,
    "constant": Constant,
    "mixed": Mixed,
    "random-direction": RandomDirection,
    "blank": Blank,
    "mislabelled": Mislabelled,
    "adversarial": Adversarial,
    "crafted": Crafted,
}


@dataclass(frozen=True)
class Watchers:
    """Who hears what an audit does: of the live bound, and of canaries that are being made."""

    live: tuple[Callable[[LiveBound], None], ...] = ()
    crafting: Tell = nobody


def audit_for(config: Config, resolved: Resolved, held_out: HeldOutData | None, watchers: Watchers) -> Audit:
    """The audit that the config asks for."""
    audit: AuditConfig = config.audit
    common: dict[str, Any] = {
        "delta": config.training.delta,
        "canary": _canary(audit),
        "num_canaries": audit.num_canaries,
        "confidence": audit.confidence,
        "seed": resolved.audit_seed,
    }
    if isinstance(audit, EndToEndConfig):
        return EndToEnd(**common)
    common |= {
        "callbacks": watchers.live,
        "may_stop": audit.stop_on_violation,
        "first_steps": audit.first_steps,
        "held_out": held_out,
        "tell": watchers.crafting,
    }
    if isinstance(audit, PaperConfig):
        return TwoBatches(canary_rate=audit.canary_rate, residual=audit.residual, **common)
    return OneRun(**common)


def _canary(audit: AuditConfig) -> GradientCanary | InputCanary:
    """The keys of a canary's table are the fields of the canary."""
    assert audit.canary is not None  # the config has filled it in
    values = audit.canary.model_dump()
    return _CANARIES[values.pop("kind")](**values)
