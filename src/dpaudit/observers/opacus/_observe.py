"""``observe()`` for Opacus: a context manager around the training loop.

It checks its arguments and sets up one of three audits: gradients or examples whose presence in each step is
decided by fair coins, or gradients that are entries of the data set and are drawn by the loader's own
sampler. ``_observer.py`` implements a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import distributed, nn

from dpaudit import _validate
from dpaudit._torch import HeldOutData, require_fitting
from dpaudit.canaries import (
    CanaryCoins,
    CanaryPlan,
    GradientCanary,
    InputCanary,
    Mixture,
    fresh_seed,
    require_held_out,
)
from dpaudit.diagnostics import (
    Check,
    CheckResults,
    ClaimedStep,
    CoordinateSample,
    Finding,
    NoiseCheck,
    RunCheck,
    SumRecord,
)
from dpaudit.errors import InputError
from dpaudit.observers._session import session
from dpaudit.observers.opacus._batches import LoaderBatches
from dpaudit.observers.opacus._clipping import OpacusClip, clip_for, precision
from dpaudit.observers.opacus._gradient_canaries import (
    GradientCanaries,
    check_norm_share,
    default_num_canaries,
    default_num_sampled,
    norm_share,
    parameter_layout,
    uncovered_layers,
)
from dpaudit.observers.opacus._input_canaries import (
    GhostBackward,
    InputCanaries,
    PerSampleBackward,
    UnwrappedModel,
    check_held_out,
)
from dpaudit.observers.opacus._lints import LintCheck
from dpaudit.observers.opacus._observer import OpacusObserver, Ranks, check_unobserved
from dpaudit.observers.opacus._prepared import (
    OpacusParamsReader,
    PreparedTraining,
    accounted_rate,
    unwrapped,
)
from dpaudit.observers.opacus._sampling import CoinMembership, SampledMembership
from dpaudit.observers.opacus._sums import SumObserver
from dpaudit.recording import (
    DPSGDParams,
    LiveBound,
    ObservedCanaries,
    ReadClaim,
    Recorder,
    TrainingInfo,
    WholeRunRecorder,
)
from dpaudit.recording._claim_source import CLAIM_PARTS

_NUM_INPUTS = 16  # canaries if no number is given
_MIXTURE = Mixture()
_ONE_RANK = (
    "rows and batches of other processes are not tested: they are exchanged at the end of the with block, "
    "unless it raises"
)


@_validate.reject_epsilon(CLAIM_PARTS)
@session
def observe(
    optimizer: DPOptimizer,
    *,
    canary: GradientCanary | InputCanary = _MIXTURE,
    held_out: HeldOutData | None = None,
    num_canaries: int | None = None,
    sampling: bool = False,
    noise_multiplier: float | None = None,
    sample_rate: float | None = None,
    num_steps: int | None = None,
    delta: float | None = None,
    loader: Any = None,
    module: Any = None,
    criterion: Callable[..., Any] | None = None,
    confidence: float = 0.95,
    tests: bool = True,
    seed: int | None = None,
    every: int | None = None,
    callbacks: Sequence[Callable[[LiveBound], None]] = (),
) -> Iterator[Recorder | WholeRunRecorder]:
    """Audit the steps inside the ``with`` block.

    ``optimizer`` is the one that ``make_private`` returned. Canaries pass through its own clipping, sum and
    noise, and are subtracted before the update, so that the weights are the same as without the audit, up to
    rounding. The parameters of the claim are read from the optimizer, its accountant or ``loader``, unless
    passed here or to ``audit()``. Batches are tested if ``loader`` is the loader that ``make_private``
    returned. ``module`` is the model that it returned, which ghost clipping needs; elsewhere, it gives the
    parameters their names and is checked for layers that mix examples. ``seed`` is the random seed of the
    audit, by default from the operating system. ``callbacks`` receive the live bound every ``every`` steps;
    they may raise to end the training run. Bound and tests share the error rate of ``confidence``; with
    ``tests=False`` nothing but the scores is tested, and the bound has all of it. Several processes exchange
    their findings at the end of the block, so that any of them can call ``audit()`` afterwards.

    By default there are 1,024 gradient canaries, or half as many as a smaller model has parameters (64 if a
    subclass or a patch replaces the clipping), and fair coins decide which of them are present in each step.
    With ``held_out``, the examples that :func:`hold_out` split off, ``canary`` may be an input canary such as
    ``Crafted()``. By default there are 16 of them; they also pass through the model and the loss. They need
    ``module``, ``loader``, whose data must not include held-out examples, and ``criterion`` unless it is the
    cross-entropy.

    With ``sampling``, half of the gradient canaries are entries of the data set of ``loader``, and its own
    sampler draws them like examples. So the sampling is audited too, after the last step. The batches then
    differ from those without the audit, because canaries consume random numbers of the sampler. By default
    there are half as many canaries as the model has parameters, but at most 8,192.
    """
    optimizer, sampling = unwrapped(optimizer), _validate.flag("sampling", sampling)
    _check_parts(loader, module)
    clip, ranks = clip_for(optimizer, module), Ranks(optimizer, sampling=sampling)
    check_unobserved(optimizer)
    _check_canary(canary, held_out, criterion, sampling=sampling, ranks=ranks)
    seed = ranks.agree_on(fresh_seed(seed))
    # with sampling=True, canaries need a hook of their own on the sampler
    batches = LoaderBatches(loader, is_distributed=ranks.world_size > 1, is_followed=not sampling)
    sums = SumObserver(optimizer, clip, batches, module)
    prepared = PreparedTraining(optimizer=optimizer, module=module, loader=loader)
    lints = LintCheck(prepared)
    checks: list[RunCheck] = [lints, SumRecord(), sums.batches, sums.norms, batches]
    others = _OtherRanks(ranks.world_size)
    shared: dict[str, Any] = {
        "lints": lints,
        "names": _parameter_names(optimizer, prepared.network),
        "loader": loader,
        "ranks": ranks,
        "sums": sums,
        "checks": [NoiseCheck(), *checks, others],
        "passed_params": DPSGDParams(
            noise_multiplier=noise_multiplier, sample_rate=sample_rate, num_steps=num_steps, delta=delta
        ),
        "num_steps": num_steps,
        "confidence": confidence,
        "tests": tests,
        "facts": lambda: TrainingInfo(
            canary=canary,
            max_grad_norm=float(optimizer.max_grad_norm),
            batch_size=optimizer.expected_batch_size,
        ),
    }
    if sampling:
        _require_no_live_bound(every, callbacks)
    else:
        shared |= {"every": every, "callbacks": callbacks}
    if isinstance(canary, InputCanary):
        shared |= {"module": module, "criterion": criterion, "held_out": held_out}
        observer = _setup_inputs(optimizer, canary, num_canaries, seed, **shared)
    else:
        shared |= {"clip": clip, "sampling": sampling, "module": prepared.network}
        observer = _setup_gradients(optimizer, canary, num_canaries, seed, **shared)
    with observer.installed():
        yield observer.recorder
    if ranks.world_size > 1:  # not after an error, which another process may not have
        noise = float(optimizer.noise_multiplier) if noise_multiplier is None else noise_multiplier
        rate = accounted_rate(optimizer) if sample_rate is None else sample_rate
        claimed = ClaimedStep(noise_multiplier=noise, sample_rate=rate)
        others.exchange([check.results(claimed) for check in checks])


class _OtherRanks:
    """What the checks of the other processes show, which see other rows and batches.

    It is known after the ``with`` block, whose end all processes reach, so that any of them can audit alone.
    """

    def __init__(self, world_size: int) -> None:
        self._is_known = world_size == 1
        self._certain: list[Finding] = []
        self._checks: list[Check] = []

    def exchange(self, own_results: list[CheckResults]) -> None:
        """Send the results of this process to all others, and keep theirs unless they are the same."""
        ranks: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(ranks, own_results)
        self._is_known = True
        sentences = {finding.sentence for results in own_results for finding in results.certain}
        for rank, theirs in enumerate(ranks):
            if rank == distributed.get_rank():
                continue
            for results in theirs:
                new = [finding for finding in results.certain if finding.sentence not in sentences]
                self._certain += [
                    replace(finding, sentence=f"On rank {rank}: {finding.sentence}") for finding in new
                ]
                self._checks += [
                    replace(check, sentence=f"On rank {rank}: {check.sentence}") for check in results.checks
                ]

    def results(self, claimed: ClaimedStep) -> CheckResults:  # noqa: ARG002
        """Return findings and tests with the number of their process."""
        unknown = () if self._is_known else (_ONE_RANK,)
        return CheckResults(certain=tuple(self._certain), checks=tuple(self._checks), not_covered=unknown)


def _check_parts(loader: Any, module: Any) -> None:
    """Raise if a loader or a module is something else."""
    if loader is not None and not (hasattr(loader, "batch_sampler") or hasattr(loader, "sample_rate")):
        raise InputError(
            "Expected loader=..., the loader that make_private returned, which has a sampler, got a "
            f"{type(loader).__name__}: leave it out, and batches are not tested."
        )
    if module is not None and not (hasattr(module, "named_parameters") or hasattr(module, "_module")):
        raise InputError(
            f"Expected module=..., the model that make_private returned, got a {type(module).__name__}."
        )


def noise_coordinates(optimizer: DPOptimizer) -> CoordinateSample:
    """Return the coordinates whose noise is tested."""
    return CoordinateSample.of([parameter.numel() for parameter in optimizer.params])


def _parameter_names(optimizer: DPOptimizer, module: Any) -> list[str]:
    """Return the names of the optimizer's parameters, which only the module knows; empty without one."""
    if not isinstance(module, nn.Module):
        return []
    names_by_id = {id(value): name.removeprefix("_module.") for name, value in module.named_parameters()}
    return [names_by_id.get(id(value), f"parameter {index}") for index, value in enumerate(optimizer.params)]


def _setup_gradients(
    optimizer: DPOptimizer,
    canary: GradientCanary,
    num_canaries: int | None,
    seed: int,
    *,
    clip: OpacusClip,
    sampling: bool,
    module: Any,
    loader: Any,
    ranks: Ranks,
    lints: LintCheck,
    names: Sequence[str],
    sums: SumObserver,
    passed_params: DPSGDParams,
    **options: Any,
) -> OpacusObserver:
    """Set up gradient canaries, whose presence is decided by fair coins or by the loader's own sampler.

    ``options`` are passed to the recorder.
    """
    if sampling and isinstance(canary, Mixture):  # all entries of a data set are long, and in every step
        canary = replace(canary, short=False)
    if num_canaries is None and sampling:
        num_canaries = default_num_sampled(optimizer, canary)
    elif num_canaries is None:
        num_canaries = default_num_canaries(optimizer, clip, canary)
    draws = CanaryPlan(canary, num_canaries, seed)
    share = norm_share(optimizer, num_canaries, canary)
    options |= {"signal": min(canary.scale, 1.0), "reach": share}
    options["not_covered"] = clip.not_covered + uncovered_layers(share, num_canaries, canary)
    layout = parameter_layout(optimizer, module)
    sampled = noise_coordinates(optimizer).indices
    canaries = GradientCanaries(optimizer, draws, clip, layout, sampled)
    membership: CoinMembership | SampledMembership
    recorder: Recorder | WholeRunRecorder
    if sampling:
        check_norm_share(share, num_canaries)
        membership = SampledMembership(draws, optimizer, loader, clip, sums.batches)
        # the claimed rate is that of the accountant, if it has one; the loader's rate is audited
        knows_rate = passed_params.sample_rate is not None or accounted_rate(optimizer) is not None
        params = OpacusParamsReader(optimizer, None if knows_rate else loader)
        options["finished"] = membership.check_complete
        recorder = WholeRunRecorder(draws.entries(), claim=ReadClaim(params, passed_params), **options)
    else:
        membership = CoinMembership(draws)
        params = OpacusParamsReader(optimizer, loader if passed_params.sample_rate is None else None)
        eps = precision(optimizer.params)
        observed = ObservedCanaries(canary, canaries.directions, lambda: layout, lambda: eps, share)
        options |= {"canaries": observed, "num_canaries": num_canaries}
        recorder = Recorder(claim=ReadClaim(params, passed_params), **options)
    return OpacusObserver(
        optimizer,
        recorder,
        params,
        canaries,
        membership,
        coordinates=noise_coordinates(optimizer),
        ranks=ranks,
        lints=lints,
        sums=sums,
        names=names,
    )


def _setup_inputs(
    optimizer: DPOptimizer,
    canary: InputCanary,
    num_canaries: int | None,
    seed: int,
    *,
    module: Any,
    criterion: Callable[..., Any] | None,
    held_out: HeldOutData,
    loader: Any,
    ranks: Ranks,
    lints: LintCheck,
    names: Sequence[str],
    sums: SumObserver,
    passed_params: DPSGDParams,
    **options: Any,
) -> OpacusObserver:
    """Set up input canaries made from held-out data, whose presence is decided by fair coins."""
    coins = CanaryCoins(_NUM_INPUTS if num_canaries is None else num_canaries, seed)
    if not isinstance(module, nn.Module):
        raise InputError(
            "Expected module=..., the model that PrivacyEngine.make_private returned, which computes the "
            f"gradients of canaries; got {type(module).__name__}."
        )
    check_held_out(held_out, loader)
    loss = _loss(optimizer, criterion)
    require_fitting(module, getattr(loss, "criterion", loss), held_out)  # ghost clipping wraps the loss
    is_ghost = isinstance(optimizer, DPOptimizerFastGradientClipping)
    canaries = InputCanaries(
        optimizer,
        canary,
        coins,
        model=UnwrappedModel(optimizer, module, loss),
        backward=(GhostBackward if is_ghost else PerSampleBackward)(optimizer, module, loss),
        data=held_out,
    )
    params = OpacusParamsReader(optimizer, loader)
    options |= {"signal": 1.0, "coupled": True, "num_canaries": coins.num_canaries}
    recorder = Recorder(claim=ReadClaim(params, passed_params), **options)
    membership = CoinMembership(coins)
    return OpacusObserver(
        optimizer,
        recorder,
        params,
        canaries,
        membership,
        coordinates=noise_coordinates(optimizer),
        ranks=ranks,
        lints=lints,
        sums=sums,
        names=names,
    )


def _loss(optimizer: DPOptimizer, criterion: Any) -> Any:
    """Return the loss, by default cross-entropy."""
    if isinstance(optimizer, DPOptimizerFastGradientClipping):
        if not isinstance(criterion, DPLossFastGradientClipping):
            raise InputError(
                "Expected criterion=..., the loss that PrivacyEngine.make_private returned, which does the "
                f"ghost clipping; got {type(criterion).__name__}."
            )
        return criterion
    return nn.CrossEntropyLoss(reduction=optimizer.loss_reduction) if criterion is None else criterion


def _require_no_live_bound(every: int | None, callbacks: Sequence[Callable[[LiveBound], None]]) -> None:
    """Raise on arguments of the live bound, which the sampling of canaries does not have."""
    if callbacks or every is not None:
        name = "callbacks" if callbacks else "every"
        raise InputError(f"Expected no {name} with sampling=True: there is no bound before the last step.")


def _check_canary(
    canary: object, held_out: object, criterion: object, *, sampling: bool, ranks: Ranks
) -> None:
    """Raise on gradient canaries with held-out data, input canaries without, or an unsupported setting."""
    if isinstance(canary, GradientCanary):
        superfluous = [
            name
            for name, argument in (("held_out", held_out), ("criterion", criterion))
            if argument is not None
        ]
        if superfluous:
            raise InputError(
                f"Expected no {superfluous[0]} with {canary!r}, which is not made from examples."
            )
        return
    if not isinstance(canary, InputCanary):
        raise InputError(f"Expected canary to be a gradient or input canary such as Dirac(), got {canary!r}.")
    require_held_out(canary, held_out, HeldOutData)
    if sampling:
        raise InputError(
            f"Expected a gradient canary such as Dirac() with sampling=True, got {canary!r}: whole-run "
            "scores need orthogonal canaries."
        )
    if ranks.world_size > 1:
        raise InputError(
            f"Expected a single process with {canary!r}, got an optimizer that sums gradients of several: "
            "use a gradient canary such as Dirac()."
        )
