"""Figures that train models: configs from a column of the paper, and rows from the results.

A :class:`Study` trains several variants at several epsilons, audited by the paper's methods and by ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dpaudit.accounting import Claim
from dpaudit.experiments.reproduction import _figure as fig
from dpaudit.experiments.reproduction._simulation import CONFIDENCE, DELTA, step_noise
from dpaudit.stats import ApproximateDP, Fixed, SameData, ThresholdRule

PAPER_METHODS = "f-DP(CP)", "f-DP(ZB)", "(eps,delta)(CP)", "(eps,delta)(ZB)", "eps-DP(Katz)"
OURS = "ours, one run"
SAME_DATA, HALF = "same data", "t = 1/2"
_RULES: dict[object, str] = {SameData(): SAME_DATA, Fixed(0.5): HALF}


def accuracy_title(settings: fig.Settings) -> str:
    """Return the title of a table of accuracies."""
    number = next(iter(settings["columns"].values()))["num_test"]
    some = "all test data" if number is None else f"{number} test examples"
    return f"Accuracy on {some}, except those that input canaries are crafted from"


def run_audit(
    work: fig.Work,
    column: str,
    *,
    audit: Mapping[str, Any],
    training: Mapping[str, Any],
    threat_model: str = "gradient",
) -> dict[str, Any]:
    """Run or resume the audit of this column and return its result."""
    from dpaudit import experiments  # noqa: PLC0415  # loads torch
    from dpaudit.experiments.config import Config  # noqa: PLC0415

    experiments.use_one_thread()
    size = work.settings["columns"][column]
    network, is_tiny = fig.CATALOGUE["column"][column], size.get("is_tiny", False)
    data = _data(work, network.get("data"), size)
    canary = audit.get("canary", {})
    if is_tiny and canary.get("kind") in ("adversarial", "crafted"):
        audit = {**audit, "canary": {**canary, "num_steps": 2}}
    raw = {
        "output": str(work.folder),
        "seed": work.seed,
        "threat_model": threat_model,
        "device": work.device,
        "model": _model(network["model"], data["name"], is_narrow=is_tiny),
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
        crafting=lambda done, number: work.within(f"crafting canaries, step {done:,} of {number:,}"),
        say=work.within,
    ).values


def _pool(work: fig.Work) -> dict[str, Any]:
    return {"kind": "serial"} if work.num_workers == 1 else {"num_workers": work.num_workers}


def _data(work: fig.Work, data: str | None, size: Mapping[str, Any]) -> dict[str, Any]:
    number = {name: size[name] for name in ("num_examples", "num_test") if size[name] is not None}
    if data is not None:
        return {**work.data.config(fig.NEEDS[data]), **number}
    shape = (1, 8, 8) if work.data.embedded else (3, 32, 32)
    return {"name": "random", "shape": shape, **number}


def _model(name: str, data: str, *, is_narrow: bool = False) -> dict[str, Any]:
    """Return the table ``model``; the paper's network for Purchase fits no other data."""
    if is_narrow and name.startswith("wide"):
        return {"name": "conv-net"}
    if name == "purchase-mlp" and data != "purchase100":
        return {"name": "mlp", "hidden": (128, 64)}
    return {"name": "mlp", "hidden": (32,)} if name == "mlp" else {"name": name}


def method_rows(values: Mapping[str, Any], *, of_step: bool = False) -> list[fig.Row]:
    """Return the bound of each method; per-step bounds are composed over the run unless ``of_step``."""
    rows: list[fig.Row] = []
    for bound in values["methods"]:
        epsilon = bound["epsilon"]
        if not of_step and values["mode"] != "many-runs":
            epsilon = _composed(bound, values)
        rows.append({"method": bound["name"].split()[0], **_row(bound, epsilon, values)})
    return rows


def our_row(values: Mapping[str, Any], *, of_step: bool = False) -> fig.Row:
    """Return the bound behind the verdict, or the corresponding betting bound of a single step."""
    bound = values["bound"]
    if of_step:
        [bound] = [row for row in values["methods"] if row["name"] == "f-DP(betting)"]
    return {"method": OURS, **_row(bound, bound["epsilon"], values)}


def _row(bound: Mapping[str, Any], epsilon: Any, values: Mapping[str, Any]) -> fig.Row:
    rule = ThresholdRule.from_dict(bound["threshold_rule"])
    return {
        "rule": _RULES.get(rule, bound["threshold_rule"]["type"].lower()),
        "kind": bound["kind"],
        "epsilon": epsilon,
        "accuracy": values["accuracy"],
    }


def _composed(bound: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """Return epsilon composed over the training run.

    An epsilon at delta = 0 is treated as one at delta, as the paper must have done.
    """
    if bound["training_epsilon"] is not None:
        return bound["training_epsilon"]
    return claim_of(values).hypothesis(ApproximateDP(DELTA)).epsilon(bound["epsilon"])


def claim_of(values: Mapping[str, Any]) -> Claim:
    """Return the claim of the training run behind a result."""
    return Claim.dpsgd(
        noise_multiplier=values["noise_multiplier"],
        sample_rate=values["sample_rate"],
        num_steps=values["num_steps"],
        delta=DELTA,
    )


def final_model_rows(
    work: fig.Work, column: str, *, num_models: int, canary: str, score: str, training: Mapping[str, Any]
) -> list[fig.Row]:
    """Return the rows of many training runs, with final models audited by the paper's methods and ours."""
    values = run_audit(
        work,
        column,
        audit={
            "mode": "many-runs",
            "num_models": num_models,
            "score": score,
            "canary": {"kind": canary},
            "methods": ["f-DP(CP)", "f-DP(ZB)", "f-DP(joint)"],
        },
        training=training,
        threat_model="black-box",
    )
    return [*method_rows(values), {**our_row(values), "method": OURS.partition(",")[0]}]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One variant of a study, with its changes to the tables ``audit`` and ``training`` of a config."""

    column: str
    audit: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    true_epsilon: float | None = None
    """The epsilon of a step that the noise is made for, if that is not what is claimed."""


@dataclass(frozen=True, kw_only=True)
class Study(fig.Figure):
    """Figure with training runs of several variants at several epsilons."""

    variants: Mapping[str, Variant]
    threat_model: str = "gradient"
    methods: Sequence[str] = PAPER_METHODS
    per_step: bool = False
    """Whether single steps are audited, in which case epsilons are those of a step."""
    printed: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    """The paper's values by method, epsilon and variant."""
    axis: str = ""
    """The axis label of the variants, if their names do not suffice."""
    more_tables: Callable[[fig.FigureRows, Study], Sequence[fig.Table]] = lambda *_: ()
    draw: Callable[[fig.FigureRows, Study], fig.Picture] | None = None
    """Function that draws the picture if the paper's figure has another form."""

    def cells(self, settings: fig.Settings) -> list[fig.Key]:
        return fig.crossed(
            variant=settings.get("variants", list(self.variants)),
            claimed=settings["epsilons"],
            run=range(settings["num_runs"]),
            mode=("paper", "ours") if settings["num_canaries"] else ("paper",),
        )

    def measure(self, key: fig.Key, work: fig.Work) -> list[fig.Row]:
        variant, claimed = self.variants[str(key["variant"])], float(key["claimed"])
        noise = {"noise_multiplier": step_noise(claimed)} if self.per_step else {"target_epsilon": claimed}
        training = {**noise, **variant.training}
        if variant.true_epsilon not in (None, claimed):
            factor = step_noise(variant.true_epsilon) / step_noise(claimed)
            training["fault"] = {"name": "noise-too-small", "factor": factor}
        audit: dict[str, Any] = {"mode": "paper", **variant.audit, **work.settings.get("audit", {})}
        if key["mode"] == "ours":
            audit |= {"mode": "one-run", "num_canaries": work.settings["num_canaries"]}
            audit["methods"] = ["f-DP(betting)"]
        values = run_audit(
            work, variant.column, audit=audit, training=training, threat_model=self.threat_model
        )
        if key["mode"] == "ours":
            return [our_row(values, of_step=self.per_step)]
        return method_rows(values, of_step=self.per_step)

    def picture(self, rows: fig.FigureRows, settings: fig.Settings) -> fig.Picture:
        """Return a panel over epsilon for each variant, or bars if there is only one epsilon."""
        shown, names = rows.where(self._is_shown), rows.values("variant")
        if self.draw is not None:
            return self.draw(shown, self)
        if len(settings["epsilons"]) == 1:
            panel = fig.bars_panel(shown, "variant", names, settings["epsilons"][0], x_label=self.axis)
            return fig.Picture(panels=[panel])
        panels = [
            fig.epsilon_panel(variant.series_over("claimed"), sorted(variant.values("claimed")), name)
            for name in names
            for variant in [shown.only(variant=name)]
        ]
        return fig.Picture(panels=panels, columns=2)

    def _is_shown(self, row: fig.Row) -> bool:
        """Return whether a row is drawn: the paper's practice, or one of our sound bounds."""
        if row["method"] in self.methods:
            return row["rule"] == SAME_DATA
        return row["method"] in (OURS, "f-DP(joint)")

    def tables(self, rows: fig.FigureRows, settings: fig.Settings) -> list[fig.Table]:
        """Return the means over runs next to the paper's values."""
        names = rows.values("variant")
        lines = [
            (
                label,
                str(bounds[0]["kind"]),
                f"{epsilon:g}",
                *(self._cell(bounds.only(claimed=epsilon, variant=name)) for name in names),
            )
            for label, bounds in rows.by_method()
            if bounds[0]["method"] in (*PAPER_METHODS, OURS, "f-DP(joint)")
            for epsilon in settings["epsilons"]
        ]
        number = settings["num_runs"]
        several = f"Mean epsilon of {number} runs (standard deviation in parentheses)"
        text = several if number > 1 else "Epsilon of one run"
        text += "; the paper's value follows the slash" if self.printed else ""
        accuracy = ", ".join(f"{name}: {rows.only(variant=name).mean('accuracy'):.1%}" for name in names)
        return [
            fig.Table(title=text, header=("method", "kind", "epsilon", *names), rows=lines),
            fig.Table(title=accuracy_title(settings), header=("mean",), rows=[(accuracy,)]),
            *self.more_tables(rows, self),
        ]

    def _cell(self, bounds: fig.FigureRows) -> str:
        if not bounds:
            return ""
        off = f" ({bounds.spread():.2f})" if len(bounds) > 1 else ""
        row, printed = bounds[0], None
        if row["rule"] == SAME_DATA and row["method"] in self.printed:
            epsilons = self.settings[fig.Scale.PAPER]["epsilons"]
            values = self.printed[str(row["method"])][epsilons.index(row["claimed"])]
            printed = values[list(self.variants).index(str(row["variant"]))]
        return f"{bounds.mean():.2f}{off}" + ("" if printed is None else f" / {printed:.2f}")
