"""Many trainings of which only the final models are seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpaudit.experiments.reproduction._trained import OURS, audited, method_rows, our_row
from dpaudit.experiments.reproduction._values import Row
from dpaudit.experiments.reproduction._work import Work

__all__ = ["final_models"]

_METHODS = "f-DP(CP)", "f-DP(ZB)", "f-DP(joint)"


def final_models(
    work: Work, column: str, *, num_models: int, canary: str, score: str, training: Mapping[str, Any]
) -> list[Row]:
    """The paper's rows, and the bound that a verdict rests on."""
    values = audited(
        work,
        column,
        audit={
            "mode": "many-runs",
            "num_models": num_models,
            "score": score,
            "canary": {"kind": canary},
            "methods": list(_METHODS),
        },
        training=training,
        threat_model="black-box",
    )
    return [*method_rows(values), {**our_row(values), "method": OURS.partition(",")[0]}]
