"""``dpaudit plan``: the number of observations needed to detect a leak, or the smallest detectable leak."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from dpaudit import _validate
from dpaudit.accounting import Claim
from dpaudit.cli import _options as opt
from dpaudit.cli._console import (
    output,
    print_json,
    print_labelled,
    print_table,
    slim_table,
    working,
)
from dpaudit.cli._exit_status import UNDERPOWERED, ExitStatus
from dpaudit.cli._options import ClaimOptions
from dpaudit.errors import InputError
from dpaudit.stats import (
    Betting,
    ClopperPearson,
    Inference,
    JointExact,
    Leak,
    Plan,
    Power,
    Verdict,
    plain,
    plan_canaries,
    plan_steps,
    smallest_leak,
    unrefuted,
)

_METHODS: tuple[Inference, ...] = (ClopperPearson(), JointExact(), Betting())
_Found = TypeVar("_Found")
_EXPECTED = (
    "Expected either a leak to detect (--noise-factor or --true-epsilon) or a size (--observations, or "
    "--steps and --canaries)"
)


@dataclass(frozen=True)
class PlanResult:
    """The sizes that detect a leak, or the leaks that each method detects with a size.

    A size is a number of steps, and of canaries per step and side.
    """

    claim: Claim
    confidence: float
    power: float
    plans: tuple[Plan, ...] = ()
    size: tuple[int, int] = (0, 0)
    leaks: tuple[tuple[Inference, Power], ...] = ()

    @property
    def is_found(self) -> bool:
        """Whether any method detects the leak, or the default one twice the claimed epsilon at this size."""
        if self.plans:
            return any(plan.num_observations is not None for plan in self.plans)
        parameter = self.claim.hypothesis(None).parameter
        default = Betting if self.size[1] > 1 else (ClopperPearson, JointExact)
        return any(
            unrefuted(leak, self.claim.epsilon, parameter) is Verdict.NO_VIOLATION
            for inference, leak in self.leaks
            if isinstance(inference, default)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        num_steps, num_canaries = self.size
        sizes = {
            "num_steps": num_steps,
            "num_canaries": num_canaries,
            "num_observations": num_steps * num_canaries,
        }
        return {
            "claim": {
                "summary": self.claim.summary,
                "epsilon": plain(self.claim.epsilon),
                "delta": self.claim.delta,
            },
            "confidence": self.confidence,
            "power": self.power,
            "plans": [plan.to_dict() for plan in self.plans],
            "smallest_leaks": [
                {"inference": inference.to_dict(), **sizes, "leak": leak.to_dict()}
                for inference, leak in self.leaks
            ],
        }


@dataclass(frozen=True)
class PlanOptions:
    """The options of ``dpaudit plan``, and the result for them."""

    claimed: ClaimOptions
    noise_factor: float | None
    true_epsilon: float | None
    observations: int | None
    steps: int | None
    canaries: int | None
    power: float
    confidence: float

    def check(self) -> None:
        """Raise ``InputError`` for invalid options, before planning is announced."""
        claim, leak = self.claimed.required, self._leak()
        if leak is None:
            self._size()
        elif self.claimed.epsilon is not None:  # a claim by noise needs an accountant, which may be slow
            leak.parameter(claim, claim.hypothesis(None))
        _validate.fraction("power", self.power)
        _validate.confidence(self.confidence)

    def result(self) -> PlanResult:
        """Return sizes for a given leak, or leaks for a given size."""
        leak, common = self._leak(), (self.claimed.required, self.confidence, self.power)
        if leak is not None:
            return PlanResult(*common, plans=(*self._by_steps(leak), *self._by_canaries(leak)))
        num_steps, num_canaries = size = self._size()
        find = self._of_claim(smallest_leak, num_steps=num_steps, num_canaries=num_canaries)
        leaks = tuple((method, find(inference=method)) for method in _METHODS)
        return PlanResult(*common, size=size, leaks=leaks)

    def _leak(self) -> Leak | None:
        named = {"--observations": self.observations, "--steps": self.steps, "--canaries": self.canaries}
        sizes = [_validate.integer(name, size) for name, size in named.items() if size is not None]
        if self.noise_factor is None and self.true_epsilon is None:
            if not sizes:
                raise InputError(f"{_EXPECTED}, got neither.")
            return None
        if self.observations is not None or len(sizes) > 1:
            raise InputError(f"{_EXPECTED}, got both.")
        if self.noise_factor is not None and self.true_epsilon is not None:
            raise InputError("Expected one leak to detect, got both --noise-factor and --true-epsilon.")
        return Leak(noise_factor=self.noise_factor, epsilon=self.true_epsilon)

    def _size(self) -> tuple[int, int]:
        """Return the number of steps, and the number of canaries per step and side."""
        if self.observations is not None and self.steps is None and self.canaries is None:
            return self.observations, 1
        if self.observations is None and self.steps is not None and self.canaries is not None:
            return self.steps, self.canaries
        raise InputError("Expected either --observations, or --steps and --canaries, as the size.")

    def _by_steps(self, leak: Leak) -> list[Plan]:
        """Plan steps for all methods with one score per step and side, and for betting also with more."""
        if self.steps is not None:
            return []
        plan = self._of_claim(plan_steps, leak=leak)
        if self.canaries is not None:
            return [plan(inference=method, num_canaries=self.canaries) for method in _METHODS]
        single = [plan(inference=method, num_canaries=1) for method in _METHODS]
        return single + [plan(inference=Betting(), num_canaries=more) for more in (8, 64, 512)]

    def _by_canaries(self, leak: Leak) -> list[Plan]:
        """Plan canaries for the given number of steps, or else for that of the claim."""
        num_steps = self.steps
        if num_steps is None and self.canaries is None and self.claimed.is_of_steps:
            num_steps = self.claimed.num_steps
        if num_steps is None:
            return []
        plan = self._of_claim(plan_canaries, leak=leak, num_steps=num_steps)
        return [plan(inference=method) for method in (JointExact(), Betting())]

    def _of_claim(self, function: Callable[..., _Found], **sizes: Any) -> Callable[..., _Found]:
        """Bind the claim and the other arguments that all methods share."""
        return partial(
            function,
            self.claimed.required,
            power=self.power,
            confidence=self.confidence,
            tradeoff=self.claimed.tradeoff,
            **sizes,
        )


def print_planned(console: Console, planned: PlanResult) -> None:
    """Print the claim, the leak if one was given, and one row per method."""
    power, confidence = map(_validate.percent, (planned.power, planned.confidence))
    level = f"with {power} probability, at {confidence} confidence"
    rows = [("claim", planned.claim.summary)]
    if planned.plans:
        rows.append(("to detect", f"{_leak(planned.plans[0].leak)}, {level}"))
    else:
        rows.append(("smallest leak", f"detected {level}"))
    print_labelled(console, rows)
    console.print()
    print_table(console, _plans(planned.plans) if planned.plans else _leaks(planned))
    console.print()
    console.print(
        "Canaries are counted per step and side; a step is whatever yields one score per canary. The attack "
        "is the best one that the mechanism allows, with normalized scores and the threshold at their "
        "midpoint. ClopperPearson and JointExact pool all scores and assume that they are independent, even "
        "within a step; Betting proceeds step by step and allows the canaries within a step to be dependent. "
        "By default, audits use Betting if there are several canaries per step, and JointExact otherwise."
    )
    if not planned.is_found:
        console.print()
        console.print(_nothing(planned))


def _leak(leak: Power) -> str:
    text = f"a true epsilon of {leak.epsilon:.4g}"
    if leak.noise_factor is None:
        return text
    return f"{text} (noise at {leak.noise_factor:.4g} of the claimed level)"


def _sized(*more: str) -> Table:
    table = slim_table("method")
    for name in ("canaries", "steps", "scores per side", *more):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _plans(plans: tuple[Plan, ...]) -> Table:
    table = _sized()
    for plan in plans:
        canaries, steps, total = (
            f"> {plan.most:,}" if size is None else f"{size:,}"
            for size in (plan.num_canaries, plan.num_steps, plan.num_observations)
        )
        name = type(plan.inference).__name__
        table.add_row(name, canaries, steps, total if plan.num_observations else "")
    return table


def _leaks(planned: PlanResult) -> Table:
    is_scaled = any(leak.noise_factor is not None for _, leak in planned.leaks)
    table = _sized("epsilon", *(["noise factor"] if is_scaled else []))
    num_steps, num_canaries = planned.size
    for inference, leak in planned.leaks:
        numbers = [leak.epsilon, *([leak.noise_factor] if is_scaled else [])]
        cells = [f"{number:.4g}" if leak.parameter < float("inf") else "none" for number in numbers]
        sizes = (f"{size:,}" for size in (num_canaries, num_steps, num_canaries * num_steps))
        table.add_row(type(inference).__name__, *sizes, *cells)
    return table


def _nothing(planned: PlanResult) -> str:
    if planned.leaks:
        power = _validate.percent(planned.power)
        return (
            f"This size does not detect twice the claimed epsilon with {power} probability. "
            "Try a larger size (--observations, or --steps and --canaries), or pass a leak with "
            "--true-epsilon instead of a size to compute how many scores are needed."
        )
    return "No method detects this leak within the sizes that were tried."


_LEAK, _SIZE = "Leak to detect", "Or size of the audit, to compute the smallest detectable leak"

_NoiseFactor = Annotated[
    float | None,
    typer.Option(help="True noise divided by the claimed noise, below 1.", rich_help_panel=_LEAK),
]
_TrueEpsilon = Annotated[
    float | None, typer.Option(help="True epsilon, above the claimed one.", rich_help_panel=_LEAK)
]
_Observations = Annotated[
    int | None, typer.Option(help="Independent scores per side.", rich_help_panel=_SIZE)
]
_Steps = Annotated[
    int | None,
    typer.Option(
        help="Observed steps. With a leak to detect: compute the number of canaries needed.",
        rich_help_panel=_SIZE,
    ),
]
_Canaries = Annotated[
    int | None,
    typer.Option(
        help="Canaries per step and side. With a leak to detect: compute the number of steps needed.",
        rich_help_panel=_SIZE,
    ),
]
_Power = Annotated[float, typer.Option(help="Probability of detecting the leak.")]


def plan(
    *,
    epsilon: opt.Epsilon = None,
    delta: opt.Delta = None,
    noise_multiplier: opt.NoiseMultiplier = None,
    sample_rate: opt.SampleRate = None,
    num_steps: opt.NumSteps = None,
    end_to_end: opt.EndToEnd = False,
    noise_factor: _NoiseFactor = None,
    true_epsilon: _TrueEpsilon = None,
    observations: _Observations = None,
    steps: _Steps = None,
    canaries: _Canaries = None,
    power: _Power = 0.8,
    confidence: opt.Confidence = 0.95,
    as_json: opt.Json = False,
) -> None:
    """Compute the number of observations needed to detect a leak, or the smallest detectable leak.

    The attack is assumed to be the best one that the mechanism allows, with the
    threshold at the midpoint of the scores.

    Exit status: 0 if a method detects the leak within 10 million observations, or
    the default method twice the claimed epsilon at a given size; 2 for bad input;
    3 otherwise.
    """
    claimed = ClaimOptions(epsilon, delta, noise_multiplier, sample_rate, num_steps, end_to_end)
    options = PlanOptions(
        claimed, noise_factor, true_epsilon, observations, steps, canaries, power, confidence
    )
    options.check()
    with working("Planning"):
        planned = options.result()
    if as_json:
        print_json(planned.to_dict())
    else:
        print_planned(output(), planned)
    if not planned.is_found:
        raise ExitStatus(UNDERPOWERED)
