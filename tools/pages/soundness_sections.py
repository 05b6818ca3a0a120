"""The sections of docs/soundness.md on steps: which mechanisms are simulated, and how often."""

from __future__ import annotations

import soundness_steps as steps
from _adaptive_runs import has_finding
from soundness_runs import run_sections
from soundness_steps import MIDDLE, MUS, Section, Trial, trial


def sections(repetitions: int) -> list[Section]:
    """Return all sections, given the repetitions of the fastest cells."""
    some = max(repetitions // 4, 1)
    return [
        _bets(max(repetitions * 2 // 5, 1)),
        _lengths(some),
        _adaptive_bets(some),
        _adaptive(some),
        _against_counts(max(repetitions * 2 // 5, 1)),
        _tails(some),
        _truncated(max(repetitions // 10, 1)),
        _overlap(some),
        _halves(some),
        _adaptive_training(max(repetitions // 25, 1)),
        *run_sections(repetitions),
    ]


def _bets(repetitions: int) -> Section:
    return Section(
        title="Bets on steps that canaries share",
        head=("canaries in a step", "coins"),
        trials=tuple(
            trial(
                steps.bets,
                (name, f"{coins:,}"),
                mu,
                repetitions,
                mechanism=name,
                coins=coins,
                steps=100,
                planned=True,
            )
            for name in steps.MECHANISMS
            for coins in (2, 16, 128, 1024)
            for mu in MUS
        ),
    )


def _lengths(repetitions: int) -> Section:
    lengths = ((20, True), (20, False), (100, False), (500, True), (500, False))
    return Section(
        title="Short and long runs, planned or not",
        head=("canaries in a step", "coins", "steps"),
        trials=tuple(
            trial(
                steps.bets,
                (name, f"{coins:,}", f"{count}, {'planned' if planned else 'not planned'}"),
                mu,
                repetitions,
                mechanism=name,
                coins=coins,
                steps=count,
                planned=planned,
            )
            for name in ("independent", "total reveal", "shared distance")
            for coins in (16, 1024)
            for count, planned in lengths
            for mu in MIDDLE
        ),
    )


def _adaptive_bets(repetitions: int) -> Section:
    return Section(
        title="Mechanisms that adapt: numbers of right guesses",
        head=("chooses",),
        trials=tuple(
            trial(steps.adaptive_bets, (policy,), mu, repetitions, policy=policy, coins=64, steps=100)
            for policy in ("by luck", "by wealth", "by the last step")
            for mu in MUS
        ),
    )


def _adaptive(repetitions: int) -> Section:
    policies = ("by luck", "by the live bound", "operating point by luck")
    return Section(
        title="Mechanisms that adapt: the default audit of a recorder",
        head=("chooses", "steps"),
        trials=tuple(
            trial(
                steps.adaptive,
                (policy, "planned" if planned else "not planned"),
                mu,
                repetitions,
                policy=policy,
                steps=100,
                canaries=64,
                planned=planned,
            )
            for policy in policies
            for planned in (True, False)
            for mu in MIDDLE
        ),
    )


def _against_counts(repetitions: int) -> Section:
    return Section(
        title="A mechanism made to mislead counts",
        head=("audited by",),
        trials=tuple(
            trial(
                steps.against_counts,
                (name,),
                mu,
                repetitions,
                is_covered=not counted,
                num_steps=40,
                counted=counted,
            )
            for name, counted in (
                ("`PerStep(paired=True)`", False),
                ("`JointExact()`, assumption violated", True),
            )
            for mu in (0.3, 1.0)
        ),
    )


def _tails(repetitions: int) -> Section:
    variants = (
        ("default", 0.1, False),
        ("default, raw scores", 0.1, True),
        ("`Betting(tails=0.5)`", 0.5, False),
    )
    return Section(
        title="Tails",
        head=("canaries in a step", "inference"),
        trials=tuple(
            trial(
                steps.scores,
                (kind, name),
                mu,
                repetitions,
                kind=kind,
                steps=100,
                canaries=64,
                tails=tails,
                raw=raw,
            )
            for kind in ("independent", "shared distance")
            for name, tails, raw in variants
            for mu in MUS
        ),
    )


def _truncated(repetitions: int) -> Section:
    kinds = ("cut off at 2 sd", "cut off at 3 sd", "unclipped in 1 of 50 steps", "one shared draw")
    return Section(
        title="What tails detect",
        head=("noise", "inference"),
        trials=tuple(
            trial(
                steps.scores,
                (kind, name),
                mu,
                repetitions,
                is_covered=False,
                kind=kind,
                steps=300,
                canaries=64,
                tails=tails,
            )
            for kind in kinds
            for name, tails in (("default", 0.1), ("`Betting(tails=0)`", 0.0))
            for mu in (0.22, 0.39, 1.0)
        ),
    )


def _overlap(repetitions: int) -> Section:
    cells = [
        trial(
            steps.overlapping,
            (f"{canaries} gradients in {dimensions} dimensions, {lengths}",),
            mu,
            repetitions,
            canaries=canaries,
            dimensions=dimensions,
            shortest=shortest,
            steps=100,
        )
        for canaries, dimensions, shortest, lengths in (
            (32, 4, 1.0, "as long as the clipping norm"),
            (32, 1, 1.0, "as long as the clipping norm"),
            (32, 4, 0.3, "0.3 to 1 of the clipping norm"),
        )
        for mu in MIDDLE
    ]
    cells += [
        trial(
            steps.scores,
            (f"scores that depend on other coins: {kind}",),
            mu,
            repetitions,
            kind=kind,
            steps=100,
            canaries=32,
            coupled=True,
        )
        for kind in ("one shared draw", "all right or all wrong")
        for mu in MIDDLE
    ]
    return Section(
        title="Input canaries that overlap",
        head=("canaries",),
        trials=tuple(cells),
    )


def _halves(repetitions: int) -> Section:
    return Section(
        title="Exactly half of the canaries present",
        head=("presence",),
        trials=tuple(
            trial(
                steps.half_present,
                ("the same half in every step" if constant else "a random half in every step",),
                mu,
                repetitions,
                constant=constant,
                steps=100,
                canaries=16,
            )
            for constant in (True, False)
            for mu in MIDDLE
        )
        + tuple(
            trial(
                steps.opposite_pairs,
                (f"opposite pairs, {count} steps of {canaries:,}",),
                mu,
                repetitions,
                steps=count,
                canaries=canaries,
            )
            for count, canaries, mu in ((6, 1024, 0.39), (3, 4096, 0.1))
        ),
    )


def _adaptive_training(repetitions: int) -> Section:
    columns = {1.0: "as claimed", 0.995: "times 0.995 per step", 0.9: "times 0.9 per step"}
    settings = [
        (update, rate, clipped)
        for update, rate in (("SGD", 0.5), ("SGD", 1.0), ("momentum", 1.0), ("Adam", 1.5))
        for clipped in (0.0, 0.5)
    ]
    return Section(
        title="Tests of noise in adaptive training",
        head=("update, learning rate x curvature", "clipped"),
        trials=tuple(
            Trial(
                (f"{update}, {rate:g}", f"{100 * clipped:g} %"),
                columns[decay],
                0.5,
                repetitions,
                has_finding,
                tuple(
                    {"update": update, "rate": rate, "clipped": clipped, "decay": decay, "steps": 300}.items()
                ),
            )
            for update, rate, clipped in settings
            for decay in columns
        ),
        has_ratio=False,
    )
