"""``observe()`` for Opacus: a context manager around the training loop.

It checks its arguments and sets up one of three audits: gradients or examples whose presence in each step is
decided by fair coins, or gradients that are entries of the data set and are drawn by the loader's own
sampler. ``_observer.py`` implements a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from opacus.optimizers import DPOptimizer
from torch import distributed

from dpaudit import _validate
from dpaudit._torch import HeldOutData
from dpaudit.accounting import Claim
from dpaudit.canaries import CanaryCoins, GradientCanary, InputCanary, fresh_seed, require_held_out
from dpaudit.diagnostics import CheckResults, ClaimedStep, CoordinateSample, RunCheck
from dpaudit.errors import InputError, first_line
from dpaudit.observers._session import MIXTURE, StepRecorder, claimed_numbers, session
from dpaudit.observers.opacus._check import LintCheck
from dpaudit.observers.opacus._clipping import clip_for
from dpaudit.observers.opacus._gradient_canaries import GradientCanaries, StepCanaries, planned
from dpaudit.observers.opacus._input_canaries import InputCanaries
from dpaudit.observers.opacus._observer import OpacusObserver, Ranks, check_unobserved
from dpaudit.observers.opacus._prepared import (
    LoaderBatches,
    OpacusParamsReader,
    PreparedTraining,
    accounted_rate,
    unwrapped,
)
from dpaudit.observers.opacus._replay import replay_training
from dpaudit.observers.opacus._sampling import SampledMembership
from dpaudit.observers.opacus._sums import SumObserver
from dpaudit.recording import DPSGDParams, LiveBound, Recorder, TrainingInfo
from dpaudit.recording._claim_source import CLAIM_PARTS

_ONE_RANK = (
    "rows and batches of other processes are not tested: they are exchanged at the end of the with block, "
    "unless it raises"
)


@_validate.reject_epsilon(CLAIM_PARTS, "target_epsilon")
@session
def observe(
    optimizer: DPOptimizer,
    *,
    claim: Claim | None = None,
    canary: GradientCanary | InputCanary = MIXTURE,
    held_out: HeldOutData | None = None,
    num_canaries: int | None = None,
    sampling: bool = False,
    noise_multiplier: float | None = None,
    sample_rate: float | None = None,
    num_steps: int | None = None,
    delta: float | None = None,
    epsilon: float | None = None,
    loader: Any = None,
    module: Any = None,
    criterion: Callable[..., Any] | None = None,
    confidence: float = 0.95,
    tests: bool = True,
    seed: int | None = None,
    every: int | None = None,
    callbacks: Sequence[Callable[[LiveBound], None]] = (),
    replay: Callable[[Any], object] | None = None,
) -> Iterator[Recorder]:
    """Audit the steps inside the ``with`` block.

    Canaries pass through the optimizer's own clipping, sum and noise, and are subtracted before the update,
    so that the weights are the same as without the audit, up to rounding. Several processes exchange their
    findings at the end of the block, so that any of them can call ``audit()`` afterwards.

    Args:
        optimizer: What ``make_private`` returned.
        claim: What is claimed. Otherwise its numbers are read from the optimizer, the accountant or the
            loader.
        canary: A gradient, or with ``held_out`` an input such as ``Crafted()``.
        held_out: The examples that :func:`hold_out` split off. Input canaries also need ``module`` and
            ``loader``, whose data must not include them.
        num_canaries: By default 1,024 gradients, or half as many as a smaller model has parameters (64 if a
            subclass or a patch replaces the clipping); 16 inputs; with ``sampling``, up to 8,192.
        sampling: Whether half of the canaries are entries of the data set, which the loader's own sampler
            draws. So the sampling is audited too, after the last step; the batches differ from those without
            the audit.
        noise_multiplier: A number of the claim, instead of ``claim``.
        sample_rate: Another such number.
        num_steps: Another such number.
        delta: Another such number.
        epsilon: The figure that was claimed beside them, which is compared with them.
        loader: What ``make_private`` returned; its batches are tested.
        module: What ``make_private`` returned; it is checked for layers that mix examples. Ghost clipping
            needs it.
        criterion: The loss, if there are input canaries and it is not the cross-entropy.
        confidence: The confidence of bound and tests together.
        tests: Whether anything but the scores is tested; without tests, the bound has the whole error rate.
        seed: The random seed of the audit, by default from the operating system.
        every: The number of steps between calls of ``callbacks``.
        callbacks: Functions that receive the live bound; they may raise to end the training run.
        replay: A function that runs one training step on a batch, for ``recorder.replay`` at the end of the
            block.

    Returns:
        A ``with`` block that gives the recorder; call its ``audit()`` afterwards.

    Raises:
        InputError: An argument is invalid, or the optimizer is not private or already observed.

    Example:
        ``with observe(optimizer, claim=claim, loader=loader, module=model) as recorder: train()``

    """
    optimizer, sampling = unwrapped(optimizer), _validate.flag("sampling", sampling)
    _check_parts(loader, module)
    training = PreparedTraining(optimizer=optimizer, module=module, loader=loader, criterion=criterion)
    clip, ranks = clip_for(optimizer, module), Ranks(optimizer, sampling=sampling)
    check_unobserved(optimizer)
    _check_canary(canary, held_out, criterion, sampling=sampling, ranks=ranks)
    claim, numbers = claimed_numbers(
        claim,
        noise_multiplier=noise_multiplier,
        sample_rate=sample_rate,
        num_steps=num_steps,
        delta=delta,
        epsilon=epsilon,
    )
    seed = ranks.agree_on(fresh_seed(seed))
    coordinates = CoordinateSample.of([parameter.numel() for parameter in optimizer.params])
    canaries: StepCanaries
    if isinstance(canary, InputCanary):
        assert held_out is not None  # checked above
        coins = CanaryCoins(16 if num_canaries is None else num_canaries, seed)
        canaries = InputCanaries(training, canary, coins, held_out)
    else:
        plan = planned(training, canary, num_canaries, seed, clip, sampling=sampling)
        canaries = GradientCanaries(training, plan, clip, coordinates.indices)
    # with sampling=True, canaries need a hook of their own on the sampler
    batches = LoaderBatches(training, is_distributed=ranks.world_size > 1, is_followed=not sampling)
    sums, lints, others = SumObserver(training, clip, batches), LintCheck(training), _OtherRanks(ranks)
    if not _validate.flag("tests", tests):
        sums.examples.num_left = sums.passes.num_left = 0
    # canaries that are drawn have the rate of the accountant, if it has one; the loader's rate is audited
    reads_loader = numbers.sample_rate is None and not (sampling and accounted_rate(optimizer) is not None)
    params = OpacusParamsReader(training, reads_loader=reads_loader)
    options, sampled = canaries.options, None
    if sampling:
        _require_whole_run(every, callbacks, claim)
        sampled = SampledMembership(canaries.coins, training, clip, batches.record)
        options |= {"entries": canaries.coins.entries(), "finished": sampled.check_complete}
    else:
        options |= {"every": every, "callbacks": callbacks, "num_canaries": canaries.coins.num_canaries}
    steps = StepRecorder(
        canary,
        params,
        numbers,
        claim=claim,
        settings=[lints],
        batches=batches.record,
        checks=[sums.norms, sums.facts, others],
        facts=lambda: TrainingInfo(
            canary=canary,
            max_grad_norm=float(optimizer.max_grad_norm),
            batch_size=optimizer.expected_batch_size,
        ),
        confidence=confidence,
        tests=tests,
        **options,
    )
    lints.history = steps.history
    observer = OpacusObserver(
        training,
        steps,
        canaries,
        sampled,
        params=params,
        coordinates=coordinates,
        ranks=ranks,
        lints=lints,
        sums=sums,
    )
    try:
        with observer.installed():
            yield steps.recorder
    finally:
        steps.recorder.replayer = partial(replay_training, training)
    if replay is not None:
        _replay_or_note(steps, replay)
    read = DPSGDParams(
        noise_multiplier=float(optimizer.noise_multiplier), sample_rate=accounted_rate(optimizer)
    ).overridden(numbers)
    claimed = ClaimedStep(noise_multiplier=read.noise_multiplier or 0.0, sample_rate=read.sample_rate)
    with steps.guard():  # not after an error, which another process may not have
        others.exchange(steps.checks, claimed)


def _replay_or_note(steps: StepRecorder, train_step: Callable[[Any], object]) -> None:
    try:
        steps.recorder.replay(train_step)
    except Exception as error:  # noqa: BLE001  # the training run is over, and its audit remains
        steps.note_not_covered(f"the step was not replayed: {first_line(error)}")


class _OtherRanks:
    """What the checks of the other processes show, which see other rows and batches.

    It is known after the ``with`` block, whose end all processes reach, so that any of them can audit alone.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._is_known = ranks.world_size == 1
        self._results = CheckResults(not_covered=() if self._is_known else (_ONE_RANK,))

    def exchange(self, checks: Sequence[RunCheck], claimed: ClaimedStep) -> None:
        """Send the results of this process to all others, and keep theirs unless they are the same."""
        if self._is_known:
            return
        own_results = [check.results(claimed) for check in checks]
        ranks: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(ranks, own_results)
        self._is_known = True
        facts = [fact for results in own_results for fact in (*results.certain, *results.to_check)]
        sentences, others = {fact.sentence for fact in facts}, list(enumerate(ranks))
        del others[distributed.get_rank()]

        def collect(name: str) -> tuple[Any, ...]:
            rows = [
                (rank, row) for rank, theirs in others for results in theirs for row in getattr(results, name)
            ]
            return tuple(
                replace(row, sentence=f"On rank {rank}: {row.sentence}")
                for rank, row in rows
                if row.sentence not in sentences
            )

        self._results = CheckResults(
            certain=collect("certain"), to_check=collect("to_check"), checks=collect("checks")
        )

    def results(self, claimed: ClaimedStep) -> CheckResults:  # noqa: ARG002
        """Return findings and tests with the number of their process."""
        return self._results


def _check_parts(loader: Any, module: Any) -> None:
    """Raise if a loader or a module is something else."""
    if loader is not None and not (hasattr(loader, "batch_sampler") or hasattr(loader, "sample_rate")):
        raise InputError(
            "loader must be the one that make_private returned, which has a sampler, got a "
            f"{type(loader).__name__}; leave it out, and batches are not tested."
        )
    if module is not None and not (hasattr(module, "named_parameters") or hasattr(module, "_module")):
        raise InputError(
            f"module must be the model that make_private returned, got a {type(module).__name__}."
        )


def _check_canary(
    canary: object, held_out: object, criterion: object, *, sampling: bool, ranks: Ranks
) -> None:
    """Raise on gradient canaries with held-out data, input canaries without, or an unsupported setting."""
    if isinstance(canary, GradientCanary):
        for name, argument in (("held_out", held_out), ("criterion", criterion)):
            if argument is not None:
                raise InputError(f"{canary!r} is not made from examples; leave out {name}.")
        return
    if not isinstance(canary, InputCanary):
        raise InputError(f"canary must be a gradient or input canary such as Dirac(), got {canary!r}.")
    require_held_out(canary, held_out, HeldOutData)
    if sampling:
        raise InputError(
            f"canary must be a gradient canary such as Dirac() with sampling=True, got {canary!r}: "
            "whole-run scores need orthogonal canaries."
        )
    if ranks.world_size > 1:
        raise InputError(
            f"{canary!r} needs a single process, but the optimizer sums gradients of several; use a "
            "gradient canary such as Dirac()."
        )


def _require_whole_run(
    every: int | None, callbacks: Sequence[Callable[[LiveBound], None]], claim: Claim | None
) -> None:
    """Raise on arguments of the live bound, which the sampling of canaries does not have."""
    if callbacks or every is not None:
        name = "callbacks" if callbacks else "every"
        raise InputError(f"{name} cannot be used with sampling=True: there is no bound before the last step.")
    if claim is not None:
        raise InputError(
            f"claim must be about DP-SGD, such as Claim.dpsgd(...), with sampling=True, got {claim.summary}."
        )
