"""``dpaudit plan``: the number of observations needed to detect a leak, or the smallest detectable leak."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

import dpaudit
from dpaudit.cli import _options as opt
from dpaudit.cli._console import (
    output,
    print_json,
    print_rows,
    print_table,
    slim_table,
    working,
)
from dpaudit.cli._exit_status import UNDERPOWERED, ExitStatus
from dpaudit.cli._options import ClaimOptions
from dpaudit.errors import InputError

_Found = TypeVar("_Found")
_PURPOSE = (
    "Pass either a leak to detect (--noise-factor or --true-epsilon) or a size (--observations, or --steps "
    "and --canaries)"
)


def _methods() -> tuple[dpaudit.Inference, ...]:
    return dpaudit.ClopperPearson(), dpaudit.JointExact(), dpaudit.Betting()


@dataclass(frozen=True)
class PlanResult:
    """The sizes that detect a leak, or the leaks that each method detects with a size.

    A size is a number of steps, and of canaries per step and side.
    """

    claim: dpaudit.Claim
    confidence: float
    power: float
    plans: tuple[dpaudit.Plan, ...] = ()
    size: tuple[int, int] = (0, 0)
    leaks: tuple[tuple[dpaudit.Inference, dpaudit.Power], ...] = ()

    @property
    def is_found(self) -> bool:
        """Whether any method detects the leak, or the default one twice the claimed epsilon at this size."""
        from dpaudit.stats import unrefuted  # noqa: PLC0415  # loads scipy

        if self.plans:
            return any(plan.num_observations is not None for plan in self.plans)
        parameter = self.claim.hypothesis(None).parameter
        default = dpaudit.Betting if self.size[1] > 1 else (dpaudit.ClopperPearson, dpaudit.JointExact)
        return any(
            unrefuted(leak, self.claim.epsilon, parameter) is dpaudit.Verdict.NO_VIOLATION
            for inference, leak in self.leaks
            if isinstance(inference, default)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        from dpaudit.stats import plain  # noqa: PLC0415

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
            "diagnosis": None if (facts := self.claim.diagnosed()) is None else facts.to_dict(),
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
        from dpaudit import _validate  # noqa: PLC0415  # loads numpy

        claim, leak = self.claimed.required, self._leak()
        if leak is None:
            self._size()
        elif self.claimed.noise_multiplier is None:  # a claim by noise needs an accountant, which may be slow
            leak.parameter(claim, claim.hypothesis(None))
        _validate.fraction("power", self.power)
        _validate.confidence(self.confidence)

    def result(self) -> PlanResult:
        """Return sizes for a given leak, or leaks for a given size."""
        leak, common = self._leak(), (self.claimed.required, self.confidence, self.power)
        if leak is not None:
            return PlanResult(*common, plans=(*self._by_steps(leak), *self._by_canaries(leak)))
        num_steps, num_canaries = size = self._size()
        find = self._of_claim(dpaudit.smallest_leak, num_steps=num_steps, num_canaries=num_canaries)
        leaks = tuple((method, find(inference=method)) for method in _methods())
        return PlanResult(*common, size=size, leaks=leaks)

    def _leak(self) -> dpaudit.Leak | None:
        from dpaudit import _validate  # noqa: PLC0415

        named = {"--observations": self.observations, "--steps": self.steps, "--canaries": self.canaries}
        sizes = [_validate.integer(name, size) for name, size in named.items() if size is not None]
        if self.noise_factor is None and self.true_epsilon is None:
            if not sizes:
                raise InputError(f"{_PURPOSE}, got neither.")
            return None
        if self.observations is not None or len(sizes) > 1:
            raise InputError(f"{_PURPOSE}, got both.")
        if self.noise_factor is not None and self.true_epsilon is not None:
            raise InputError("Pass either --noise-factor or --true-epsilon, not both.")
        return dpaudit.Leak(noise_factor=self.noise_factor, epsilon=self.true_epsilon)

    def _size(self) -> tuple[int, int]:
        """Return the number of steps, and the number of canaries per step and side."""
        if self.observations is not None and self.steps is None and self.canaries is None:
            return self.observations, 1
        if self.observations is None and self.steps is not None and self.canaries is not None:
            return self.steps, self.canaries
        named = {"--observations": self.observations, "--steps": self.steps, "--canaries": self.canaries}
        got = " and ".join(name for name, size in named.items() if size is not None)
        raise InputError(f"The size is either --observations, or --steps and --canaries, got {got}.")

    def _by_steps(self, leak: dpaudit.Leak) -> list[dpaudit.Plan]:
        """Plan steps for all methods with one score per step and side, and for betting also with more."""
        if self.steps is not None:
            return []
        plan = self._of_claim(dpaudit.plan_steps, leak=leak)
        if self.canaries is not None:
            return [plan(inference=method, num_canaries=self.canaries) for method in _methods()]
        single = [plan(inference=method, num_canaries=1) for method in _methods()]
        return single + [plan(inference=dpaudit.Betting(), num_canaries=more) for more in (8, 64, 512)]

    def _by_canaries(self, leak: dpaudit.Leak) -> list[dpaudit.Plan]:
        """Plan canaries for the given number of steps, or else for that of the claim."""
        num_steps = self.steps
        if num_steps is None and self.canaries is None and self.claimed.is_of_steps:
            num_steps = self.claimed.num_steps
        if num_steps is None:
            return []
        plan = self._of_claim(dpaudit.plan_canaries, leak=leak, num_steps=num_steps)
        return [plan(inference=method) for method in (dpaudit.JointExact(), dpaudit.Betting())]

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


def print_planned(console: Console, planned: PlanResult, *, verbose: bool, quiet: bool) -> None:
    """Print the answer in a sentence, the claim, and one row per method."""
    from dpaudit import _validate  # noqa: PLC0415

    console.print(_answer(planned), style="bold")
    if quiet:
        return
    power, confidence = map(_validate.percent, (planned.power, planned.confidence))
    console.print()
    basis = f"detected {power} of the time at {confidence} confidence"
    print_rows(console, [("claim", planned.claim.summary), *_facts(planned.claim), ("basis", basis)])
    console.print()
    print_table(console, _plans(planned.plans) if planned.plans else _leaks(planned))
    if verbose:
        console.print()
        console.print(_assumed())
    if not planned.is_found and planned.leaks:
        console.print("\nTry a larger size, or pass --true-epsilon to compute how many scores are needed.")


def _facts(claim: dpaudit.Claim) -> list[tuple[str, str]]:
    """Return labeled lines on what is known of the claim without an audit."""
    labels = {"finding": claim.facts.certain, "to check": claim.facts.to_check, "note": claim.facts.notes}
    return [(label, str(text)) for label, texts in labels.items() for text in texts]


def _assumed() -> str:
    return (
        "Canaries are counted per step and side; a step is whatever yields one score per canary. The attack "
        "is the best one that the mechanism allows, with normalized scores and the threshold at their "
        "midpoint. ClopperPearson and JointExact pool all scores and assume that they are independent, even "
        "within a step; Betting proceeds step by step and allows the canaries within a step to be dependent. "
        "By default, audits use Betting if there are several canaries per step, and JointExact otherwise."
    )


def _answer(planned: PlanResult) -> str:
    """Return the plan in one sentence: size or smallest leak of the method that audits use by default."""
    if planned.plans:
        usual = (plan for plan in planned.plans if isinstance(plan.inference, _default(plan.num_canaries)))
        default = next(usual, planned.plans[-1])
        leak, name = _leak(default.leak), type(default.inference).__name__
        if default.num_observations is None:
            subject = f"{name} does not detect" if planned.is_found else "No method detects"
            return f"{subject} {leak} with up to {default.most:,} scores per side."
        size = f"{default.num_steps:,} scores per side"
        if default.num_canaries != 1:
            size = f"{default.num_canaries:,} canaries per side in each of {default.num_steps:,} steps"
        return f"You need {size} to detect {leak} with {name}."
    num_steps, num_canaries = planned.size
    usual_kind = _default(num_canaries)
    smallest = next(leak for inference, leak in planned.leaks if isinstance(inference, usual_kind))
    size = f"{num_steps:,} scores per side"
    if num_canaries > 1:
        size = f"{num_canaries:,} canaries per side in each of {num_steps:,} steps"
    verb = "would detect" if planned.is_found else "are too few for this claim: they would detect"
    return f"{size} {smallest.sentence(verb)}."


def _default(num_canaries: int | None) -> type[dpaudit.Inference]:
    """Return the method of audits with this many canaries per step; None are as many as are needed."""
    return dpaudit.JointExact if num_canaries == 1 else dpaudit.Betting


def _leak(leak: dpaudit.Power) -> str:
    if leak.noise_factor is None:
        return f"epsilon {leak.epsilon:.2f}"
    return f"epsilon {leak.epsilon:.2f} (noise at {100 * leak.noise_factor:.0f} % of the claim)"


def _sized(*more: str) -> Table:
    table = slim_table("method")
    for name in ("canaries", "steps", "scores per side", *more):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _plans(plans: tuple[dpaudit.Plan, ...]) -> Table:
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


_leaking, _sizing = (opt.panel(rich_help_panel=name) for name in ("Leak to detect", "Or size of the audit"))

_NoiseFactor = Annotated[
    float | None, _leaking(help="Actual noise as a fraction of the claimed noise, such as 0.8.")
]
_TrueEpsilon = Annotated[float | None, _leaking(help="Actual epsilon, above the claimed one.")]
_Observations = Annotated[
    int | None, _sizing(help="Independent scores with the canary, and as many without.")
]
_Steps = Annotated[int | None, _sizing(help="Steps. With a leak: computes the canaries needed.")]
_Canaries = Annotated[
    int | None, _sizing(help="Canaries per step and side. With a leak: computes the steps needed.")
]
_Power = Annotated[
    float, typer.Option(help="Probability of detecting the leak.", rich_help_panel="Error rates")
]


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
    verbose: opt.Verbose = False,
    quiet: opt.Quiet = False,
    as_json: opt.Json = False,
) -> None:
    """Plan an audit: how many scores it needs, or what it can detect.

    Pass the claim and either a leak to detect or a size. The plan assumes the
    best attack that the claimed mechanism allows.

    Exit status: 0 if at most 10 million scores detect the leak, or this size
    detects twice the claimed epsilon; 2 bad input; 3 otherwise.
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
        print_planned(output(), planned, verbose=verbose, quiet=quiet)
    if not planned.is_found:
        raise ExitStatus(UNDERPOWERED)
