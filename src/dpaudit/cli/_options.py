"""Options shared by several commands, and the claim that they state."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, TypeAlias

import typer

import dpaudit
from dpaudit.cli._console import OUTPUT_PANEL
from dpaudit.errors import InputError

panel = partial(partial, typer.Option)
_claim, _output = panel(rich_help_panel="Claim"), panel(rich_help_panel=OUTPUT_PANEL)

Epsilon: TypeAlias = Annotated[
    float | None,
    _claim(
        help="Epsilon that you claim for the step or run behind each score. Beside --noise-multiplier, it is "
        "compared with the accountant."
    ),
]
Delta: TypeAlias = Annotated[
    float | None, _claim(help="Delta of the claim. Without a claim, bounds use 1e-5.")
]
NoiseMultiplier: TypeAlias = Annotated[
    float | None,
    _claim(
        help="Noise multiplier that you claim, for one Gaussian step or with --sample-rate and --num-steps."
    ),
]
SampleRate: TypeAlias = Annotated[float | None, _claim(help="Sample rate of DP-SGD (Poisson sampling).")]
NumSteps: TypeAlias = Annotated[int | None, _claim(help="Number of DP-SGD steps.")]
EndToEnd: TypeAlias = Annotated[
    bool, _claim("--end-to-end", help="Each score comes from a whole DP-SGD run.")
]
PerStep: TypeAlias = Annotated[bool, _claim("--per-step", help="Each score comes from a single DP-SGD step.")]
OneRun: TypeAlias = Annotated[
    bool,
    _claim(
        "--one-run",
        help="All scores come from one trained model: one per canary, whose presence a fair coin decided.",
    ),
]
Confidence: TypeAlias = Annotated[
    float, typer.Option(help="Confidence of the verdict.", rich_help_panel="Error rates")
]
Verbose: TypeAlias = Annotated[bool, _output("--verbose", "-v", help="Print all details.")]
Quiet: TypeAlias = Annotated[bool, _output("--quiet", "-q", help="Print the headline only.")]
AllMethods: TypeAlias = Annotated[bool, _output("--all-methods", help="Add the bounds of all methods.")]
Json: TypeAlias = Annotated[bool, _output("--json", help="Print one JSON object.")]


_FORMS = (
    "--epsilon and --delta, or --noise-multiplier and --delta, or --noise-multiplier, --sample-rate, "
    "--num-steps and --delta; --epsilon beside these is compared with the accountant"
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
                "A DP-SGD claim needs one of --per-step (each score is of a single step), --end-to-end "
                "(each is of a whole training run) and --one-run (all are of one trained model, with one "
                f"score per canary), got {' and '.join(stated) or 'none'}."
            )
        if not stated:
            return None
        from dpaudit.stats import ONE_RUN, RUN, STEP  # noqa: PLC0415  # loads scipy

        return dict(zip(options, (STEP, RUN, ONE_RUN), strict=True))[stated[0]]

    @property
    def claim(self) -> dpaudit.Claim | None:
        """The stated claim, if any."""
        self._check()
        if self.noise_multiplier is None and self.epsilon is not None:
            return dpaudit.Claim.approximate_dp(epsilon=self.epsilon, delta=self._given_delta)
        if self.noise_multiplier is None:
            return None
        if self.sample_rate is None or self.num_steps is None:
            return dpaudit.Claim.gaussian(
                noise_multiplier=self.noise_multiplier, delta=self._given_delta, epsilon=self.epsilon
            )
        return dpaudit.Claim.dpsgd(
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.sample_rate,
            num_steps=self.num_steps,
            delta=self._given_delta,
            epsilon=self.epsilon,
        )

    @property
    def required(self) -> dpaudit.Claim:
        """The stated claim; raises ``InputError`` if there is none."""
        claim = self.claim
        if claim is None:
            raise InputError(f"A claim is required: {_FORMS}.")
        return claim

    @property
    def tradeoff(self) -> dpaudit.SubsampledGaussian | None:
        """The trade-off of an end-to-end run; None for the claim's own."""
        if not self.end_to_end or self.sample_rate is None or self.num_steps is None:
            return None
        return dpaudit.SubsampledGaussian(self.sample_rate, self.num_steps)

    @property
    def is_of_steps(self) -> bool:
        """Whether each score comes from a single step of a longer training run."""
        return self.num_steps is not None and not self.end_to_end

    @property
    def _given_delta(self) -> float:
        if self.delta is None:
            raise InputError("--delta is required with a claim: an epsilon is meaningless without it.")
        return self.delta

    def _check(self) -> None:
        noise = self._given("--noise-multiplier", "--sample-rate", "--num-steps")
        if noise and "--noise-multiplier" not in noise:
            raise InputError(f"{noise[0]} needs --noise-multiplier; pass {_FORMS}.")
        if len(noise) == 2:
            raise InputError(f"--sample-rate and --num-steps must be passed together, got only {noise[1]}.")
        if (self.end_to_end or self.per_step) and len(noise) < 3:
            raise InputError(
                f"{'--end-to-end' if self.end_to_end else '--per-step'} needs a DP-SGD claim: "
                "--noise-multiplier, --sample-rate, --num-steps and --delta."
            )

    def _given(self, *names: str) -> list[str]:
        """Return which of these options were given."""
        return [n for n in names if getattr(self, n.removeprefix("--").replace("-", "_")) is not None]
