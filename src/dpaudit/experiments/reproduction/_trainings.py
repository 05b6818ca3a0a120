"""Trainings of a figure: from a column of the paper to a config, and from its result to rows.

Many trainings of which only the final models are seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpaudit.accounting import Claim
from dpaudit.experiments.reproduction._figure import CIFAR10, PURCHASE, Need, Row, Settings, Work
from dpaudit.experiments.reproduction._simulation import CONFIDENCE, DELTA
from dpaudit.stats import ApproximateDP, Fixed, SameData, ThresholdRule

SAME_DATA, HALF = "same data", "t = 1/2"
_NUM_TEST = 256  # a wide network takes minutes for all of CIFAR-10; canaries are made from half of these
OURS = "ours, one run"
_RULES: dict[object, str] = {SameData(): SAME_DATA, Fixed(0.5): HALF}


@dataclass(frozen=True)
class Column:
    """Data and a model that the paper trains on them; no need means random pixels and classes."""

    model: str
    need: Need | None


COLUMNS: Mapping[str, Column] = {
    "CIFAR-10 WRN-16": Column("wide-resnet-16-4", CIFAR10),
    "CIFAR-10 WRN-40": Column("wide-resnet-40-4", CIFAR10),
    "CIFAR-10 ConvNet": Column("conv-net", CIFAR10),
    "CIFAR-10 MLP": Column("mlp", CIFAR10),
    "Purchase": Column("purchase-mlp", PURCHASE),
    "Random WRN-16": Column("wide-resnet-16-4", None),
    "Random ConvNet": Column("conv-net", None),
}


def sizes(
    num_examples: int | None,
    batch_size: int,
    num_steps: int,
    learning_rate: float,
    num_test: int | None = _NUM_TEST,
) -> dict[str, Any]:
    """How long a column is trained on how much; all data are tested on where all are trained on.

    The smaller the batch, the more noise there is in the mean: a learning rate that is large at the paper's
    scale would make models of small batches walk away, and their gradients explode.
    """
    return {
        "num_examples": num_examples,
        "num_test": None if num_examples is None else num_test,
        "batch_size": float(batch_size),
        "num_steps": num_steps,
        "learning_rate": learning_rate,
    }


# Appendix B of the paper; learning rates are not printed there, nor anything of Purchase
PAPER_WIDE = sizes(None, 4096, 2500, 2.0)
PAPER_CONV = sizes(None, 256, 20_000, 0.5)
PAPER_DENSE = sizes(None, 256, 2500, 0.5)
ALL_DATA = "CIFAR-10 WRN-16", "CIFAR-10 ConvNet", "Purchase", "Random WRN-16"


def on_all_data(wide: dict[str, Any], conv: dict[str, Any], dense: dict[str, Any]) -> dict[str, Any]:
    """Sizes for the four trainings of Table 1."""
    return dict(zip(ALL_DATA, (wide, conv, dense, wide), strict=True))


def tested(settings: Settings) -> str:
    """What accuracies are of."""
    number = next(iter(settings["columns"].values()))["num_test"]
    some = "all test data" if number is None else f"{number} examples of the test data"
    return f"Accuracy on {some}, but for those that input canaries are made from"


# Whole batches have the quickest accountant. All figures have the same, so that it is asked once. In the
# place of wide networks there is the ConvNet, and inputs are crafted in few steps.
TINY = {**sizes(4, 4, 2, 0.5, num_test=140), "is_tiny": True}
_CRAFTED = frozenset({"adversarial", "crafted"})


def audited(
    work: Work,
    column: str,
    *,
    audit: Mapping[str, Any],
    training: Mapping[str, Any],
    threat_model: str = "gradient",
) -> dict[str, Any]:
    """The result of a run of this column, which goes on where it was interrupted."""
    from dpaudit import experiments  # noqa: PLC0415  # loads torch
    from dpaudit.experiments.config import Config  # noqa: PLC0415

    experiments.use_one_thread()
    size = work.settings["columns"][column]
    data, is_tiny = _data(work, COLUMNS[column], size), size.get("is_tiny", False)
    canary = audit.get("canary", {})
    if is_tiny and canary.get("kind") in _CRAFTED:
        audit = {**audit, "canary": {**canary, "num_steps": 2}}
    raw = {
        "output": str(work.folder),
        "seed": work.seed,
        "threat_model": threat_model,
        "device": work.device,
        "model": _model(COLUMNS[column].model, data["name"], is_narrow=is_tiny),
        "data": data,
        "training": {
            "batch_size": size["batch_size"],
            "num_steps": size["num_steps"],
            "delta": DELTA,
            "optimizer": {"name": "sgd", "learning_rate": size["learning_rate"]},
            **training,
        },
        "audit": {"confidence": CONFIDENCE, **audit},
        "pool": _pool(work) if audit["mode"] == "many-runs" else None,
    }
    return experiments.run(
        Config.model_validate(raw),
        watch=lambda steps: work.within(f"step {steps.num_done:,} of {steps.num_steps:,}"),
        trials=lambda models: work.within(
            f"{models.progress.num_done:,} of {models.progress.num_trials:,} models"
        ),
        crafting=lambda done, number: work.within(f"making canaries, step {done:,} of {number:,}"),
        say=work.within,
    ).values


def _pool(work: Work) -> dict[str, Any]:
    return {"kind": "serial"} if work.num_workers == 1 else {"num_workers": work.num_workers}


def _data(work: Work, column: Column, size: Mapping[str, Any]) -> dict[str, Any]:
    number = {name: size[name] for name in ("num_examples", "num_test") if size[name] is not None}
    if column.need is not None:
        return {**work.data.config(column.need), **number}
    shape = (1, 8, 8) if work.data.embedded else (3, 32, 32)
    return {"name": "random", "shape": shape, **number}


def _model(name: str, data: str, *, is_narrow: bool = False) -> dict[str, Any]:
    """The paper's network for Purchase takes no other data."""
    if is_narrow and name.startswith("wide"):
        return {"name": "conv-net"}
    if name == "purchase-mlp" and data != "purchase100":
        return {"name": "mlp", "hidden": (128, 64)}
    return {"name": "mlp", "hidden": (32,)} if name == "mlp" else {"name": name}


def method_rows(values: Mapping[str, Any], *, of_step: bool = False) -> list[Row]:
    """The bound of each method, of the whole training where steps were seen, unless ``of_step``."""
    rows: list[Row] = []
    for one in values["methods"]:
        epsilon = one["epsilon"]
        if not of_step and values["mode"] != "many-runs":
            epsilon = _composed(one, values)
        rows.append({"method": one["name"].split()[0], **_row(one, epsilon, values)})
    return rows


def our_row(values: Mapping[str, Any], *, of_step: bool = False) -> Row:
    """The bound that the verdict rests on; of a single step the same bets."""
    bound = values["bound"]
    if of_step:
        [bound] = [one for one in values["methods"] if one["name"] == "f-DP(betting)"]
    return {"method": OURS, **_row(bound, bound["epsilon"], values)}


def _row(bound: Mapping[str, Any], epsilon: Any, values: Mapping[str, Any]) -> Row:
    rule = ThresholdRule.from_dict(bound["threshold_rule"])
    return {
        "rule": _RULES.get(rule, bound["threshold_rule"]["type"].lower()),
        "kind": bound["kind"],
        "epsilon": epsilon,
        "accuracy": values["accuracy"],
    }


def _composed(bound: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """Of the whole training; an epsilon at delta = 0 is read as one at delta, as the paper must have done."""
    if bound["training_epsilon"] is not None:
        return bound["training_epsilon"]
    return claim_of(values).hypothesis(ApproximateDP(DELTA)).epsilon(bound["epsilon"])


def claim_of(values: Mapping[str, Any]) -> Claim:
    """What the training of a result claims."""
    return Claim.dpsgd(
        noise_multiplier=values["noise_multiplier"],
        sample_rate=values["sample_rate"],
        num_steps=values["num_steps"],
        delta=DELTA,
    )


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
