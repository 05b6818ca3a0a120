"""Options shared by several commands, and the claim that they state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

import typer

from dpaudit.accounting import Claim, SubsampledGaussian
from dpaudit.errors import InputError
from dpaudit.stats import ONE_RUN, RUN, STEP

_CLAIM = "Claim"

Epsilon: TypeAlias = Annotated[
    float | None,
    typer.Option(help="Claimed epsilon of the step or run behind each score.", rich_help_panel=_CLAIM),
]
Delta: TypeAlias = Annotated[
    float | None,
    typer.Option(
        help="Claimed delta, required with every claim. Without a claim, bounds use 1e-5.",
        rich_help_panel=_CLAIM,
    ),
]
NoiseMultiplier: TypeAlias = Annotated[
    float | None,
    typer.Option(
        help="Claimed standard deviation of the noise, divided by the sensitivity. Without --num-steps, "
        "the claim is about one Gaussian step.",
        rich_help_panel=_CLAIM,
    ),
]
SampleRate: TypeAlias = Annotated[
    float | None,
    typer.Option(help="Poisson sampling rate of DP-SGD.", rich_help_panel=_CLAIM),
]
NumSteps: TypeAlias = Annotated[
    int | None,
    typer.Option(help="Number of DP-SGD steps.", rich_help_panel=_CLAIM),
]
EndToEnd: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--end-to-end", help="Each score is of a whole DP-SGD run, not of a step.", rich_help_panel=_CLAIM
    ),
]
PerStep: TypeAlias = Annotated[
    bool,
    typer.Option("--per-step", help="Each score is of a single DP-SGD step.", rich_help_panel=_CLAIM),
]
OneRun: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--one-run",
        help="All scores are of one trained model, with one score per canary, whose presence was decided by "
        "a fair coin. They may be dependent.",
        rich_help_panel=_CLAIM,
    ),
]
Confidence: TypeAlias = Annotated[float, typer.Option(help="Confidence level of bounds and verdicts.")]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print a single JSON object and nothing else.")]


_FORMS = (
    "--epsilon and --delta, or --noise-multiplier and --delta, or --noise-multiplier, --sample-rate, "
    "--num-steps and --delta"
)


@dataclass(frozen=True)
class ClaimOptions:
    """The options that state a claim, and the resulting claim."""

    epsilon: float | None
    delta: float | None
    noise_multiplier: float | None
    sample_rate: float | None
    num_steps: int | None
    end_to_end: bool
    per_step: bool = False
    one_run: bool = False

    @property
    def scores_of(self) -> str | None:
        """What a score is of, which a DP-SGD claim needs; None if it does not matter."""
        options = {"--per-step": self.per_step, "--end-to-end": self.end_to_end, "--one-run": self.one_run}
        stated = [name for name, is_stated in options.items() if is_stated]
        if len(stated) > 1 or (not stated and self.num_steps is not None):
            raise InputError(
                "Expected one of --per-step (each score is of a single step), --end-to-end (each is of a "
                "whole training run) and --one-run (all are of one trained model, with one score per canary) "
                f"with a DP-SGD claim, got {' and '.join(stated) or 'none'}."
            )
        return dict(zip(options, (STEP, RUN, ONE_RUN), strict=True))[stated[0]] if stated else None

    @property
    def claim(self) -> Claim | None:
        """The stated claim, if any."""
        self._check()
        if self.epsilon is not None:
            return Claim.approximate_dp(epsilon=self.epsilon, delta=self._given_delta)
        if self.noise_multiplier is None:
            return None
        if self.sample_rate is None or self.num_steps is None:
            return Claim.gaussian(noise_multiplier=self.noise_multiplier, delta=self._given_delta)
        return Claim.dpsgd(
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.sample_rate,
            num_steps=self.num_steps,
            delta=self._given_delta,
        )

    @property
    def required(self) -> Claim:
        """The stated claim; raises ``InputError`` if there is none."""
        claim = self.claim
        if claim is None:
            raise InputError(f"Expected a claim: {_FORMS}.")
        return claim

    @property
    def tradeoff(self) -> SubsampledGaussian | None:
        """The trade-off of an end-to-end run; None for the claim's own."""
        if not self.end_to_end or self.sample_rate is None or self.num_steps is None:
            return None
        return SubsampledGaussian(self.sample_rate, self.num_steps)

    @property
    def is_of_steps(self) -> bool:
        """Whether each score comes from a single step of a longer training run."""
        return self.num_steps is not None and not self.end_to_end

    @property
    def _given_delta(self) -> float:
        if self.delta is None:
            raise InputError("Expected --delta with the claim: an epsilon is meaningless without it.")
        return self.delta

    def _check(self) -> None:
        noise = self._given("--noise-multiplier", "--sample-rate", "--num-steps")
        if self.epsilon is not None and noise:
            raise InputError(f"Expected one claim, got --epsilon and {noise[0]}; pass {_FORMS}.")
        if noise and "--noise-multiplier" not in noise:
            raise InputError(f"Expected --noise-multiplier with {noise[0]}; pass {_FORMS}.")
        if len(noise) == 2:
            raise InputError(f"Expected --sample-rate and --num-steps together, got only {noise[1]}.")
        if (self.end_to_end or self.per_step) and len(noise) < 3:
            raise InputError(
                f"Expected {'--end-to-end' if self.end_to_end else '--per-step'} with a DP-SGD claim: "
                "--noise-multiplier, --sample-rate, --num-steps and --delta."
            )

    def _given(self, *names: str) -> list[str]:
        """Return which of these options were given."""
        return [n for n in names if getattr(self, n.removeprefix("--").replace("-", "_")) is not None]
