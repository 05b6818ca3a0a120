"""Opacus on two real processes: canaries join on one of them, scores are read after the reduction."""

import math
import os
import pickle
from contextlib import nullcontext

import pytest
import torch
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.optimizers.optimizer import _generate_noise
from opacus_runs import DELTA, Made, small_data, small_model, weights
from score_noise import require_normal
from statistical_limits import count_range, room
from torch import distributed, multiprocessing, nn
from torch.utils.data import DataLoader

import dpaudit
from dpaudit.observers.opacus import check, observe
from dpaudit.observers.opacus._sums import SumObserver

# Batches are large enough never to be empty: the sampler of Opacus 1.6.0 for several processes leaves an
# empty one out, so that one process makes fewer steps than the other, which then waits for it.
STEPS, RATE, EXAMPLES = 100, 0.1, 400
NORMS = [0.2, 0.3, 0.6, 0.7]
CASES = {
    "observed": {},
    "plain": {"observed": False},
    "sum": {"loss_reduction": "sum"},
    "broken": {"broken": True},
    "doubled": {"num_steps": 30, "doubled_on": 1},
    "ended": {"num_steps": 30, "ended_on": 1},
    "ended plain": {"num_steps": 30, "observed": False},
    "sampled": {"num_steps": 60, "sampling": True},
    "ghost": {"num_steps": 60, "grad_sample_mode": "ghost"},
    "ghost plain": {"num_steps": 60, "grad_sample_mode": "ghost", "observed": False},
    "per layer": {"num_steps": 60, "clipping": "per_layer", "max_grad_norm": NORMS},
    "per layer plain": {
        "num_steps": 60,
        "clipping": "per_layer",
        "max_grad_norm": NORMS,
        "observed": False,
    },
}

# A training of its own for each: `make test-long` runs them.
LONG = {"sum", "sampled", "ghost", "ghost plain", "per layer", "per layer plain"}
RUN = {
    name: options for name, options in CASES.items() if "DPAUDIT_TEST_LONG" in os.environ or name not in LONG
}


def long(case, *arguments):
    return pytest.param(case, *arguments, marks=[pytest.mark.long] * (case in LONG))


def noise_on_every_rank(optimizer):
    """Every process adds its share of the noise: the shares are averaged, and too small together."""
    for value in optimizer.params:
        noise = _generate_noise(optimizer.noise_multiplier * optimizer.max_grad_norm, value.summed_grad)
        value.grad = value.summed_grad + noise / optimizer.world_size


def private(rank, *, loss_reduction="mean", max_grad_norm=1.0, **options):
    torch.manual_seed(0)
    model, data = small_model(), small_data(EXAMPLES)
    torch.manual_seed(rank)  # noise and sampling are each process' own
    engine = PrivacyEngine(accountant="rdp")
    model = DifferentiallyPrivateDistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss(reduction=loss_reduction)
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5 if loss_reduction == "mean" else 0.02),
        criterion=criterion,
        data_loader=DataLoader(data, batch_size=int(RATE * EXAMPLES)),
        noise_multiplier=1.0,
        max_grad_norm=max_grad_norm,
        loss_reduction=loss_reduction,
        **options,
    )
    return Made.of(made, criterion)


def failing_in_one_process(method):
    """A method of dpaudit that raises in the tenth step."""
    calls = []

    def before_noise(*args):
        calls.append(None)
        if len(calls) == 10:
            raise ZeroDivisionError
        return method(*args)

    return before_noise


def train(
    rank,
    *,
    observed=True,
    broken=False,
    doubled_on=None,
    ended_on=None,
    sampling=False,
    num_steps=STEPS,
    **options,
):
    made = private(rank, **options)
    model, optimizer, loader = made.model, made.optimizer, made.loader
    if broken:
        optimizer.add_noise = noise_on_every_rank.__get__(optimizer)

    def loop():
        for _ in range(int(num_steps * RATE)):
            for inputs, targets in loader:
                optimizer.zero_grad()
                rows = torch.arange(len(inputs)).repeat(2 if rank == doubled_on else 1)
                made.criterion(model(inputs[rows]), targets[rows]).backward()
                optimizer.step()

    if not observed:
        loop()
        return None, weights(model)
    watch = {"loader": loader, "sampling": True} if sampling else {"module": model, "loader": loader}
    # the seeds differ: the processes agree on one
    warned = nullcontext() if ended_on is None else pytest.warns(match="The audit ends")
    observed = observe(optimizer, delta=DELTA, num_steps=num_steps, seed=rank, **watch)
    with observed as recorder, warned, pytest.MonkeyPatch.context() as patch:
        if rank == ended_on:
            patch.setattr(SumObserver, "before_noise", failing_in_one_process(SumObserver.before_noise))
        loop()
    seen = recorder.observations
    found = {"kind": type(optimizer).__name__, "with": seen.with_canary, "without": seen.without_canary}
    report = check(optimizer, module=model, loader=loader, criterion=made.criterion)
    later = [finding for finding in recorder.diagnose().findings if math.isnan(finding.estimate)]
    found |= {"lints": [*report.findings, *report.not_covered, *later], "notes": report.notes}
    if sampling:
        found |= {"joined": recorder.scorer.drawn, "present": int(recorder.scorer.present.sum())}
    elif (num_steps == STEPS or doubled_on is not None) and rank == 0:  # the other rank never calls audit()
        result = recorder.audit()
        found |= {"verdict": result.verdict.name, "claim": result.claim.summary}
        found |= {"findings": [str(finding) for finding in result.findings], "gaps": result.not_covered}
    elif ended_on is not None:
        found |= {"verdict": recorder.audit().verdict.name, "gaps": recorder.audit().not_covered}
    return found, weights(model)


def work(rank, folder):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = {case: train(rank, **options) for case, options in RUN.items()}
    with open(f"{folder}/{rank}.pickle", "wb") as file:  # noqa: PTH123
        pickle.dump(found, file)
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(work, args=(str(folder),), nprocs=2)
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in (0, 1)]


@pytest.mark.slow
def test_correct_training_on_two_processes_is_not_flagged(found):
    for case in {"observed", "sum"} & {*RUN}:
        seen, _ = found[0][case]
        assert seen["verdict"] == dpaudit.Verdict.NO_VIOLATION.name
        assert seen["claim"].startswith("DP-SGD, noise multiplier 1, sample rate 0.1, 100 steps")


@pytest.mark.parametrize(
    ("case", "kind", "noise"),
    [
        ("observed", "DistributedDPOptimizer", 1.0),
        long("sum", "DistributedDPOptimizer", 1.0),
        long("ghost", "DistributedDPOptimizerFastGradientClipping", 1.0),
        # 128 canaries do not fit into the layers with 16 and with 2 parameters nor into that with 32
        long("per layer", "SimpleDistributedPerLayerOptimizer", math.hypot(*NORMS) / NORMS[0]),
    ],
)
def test_scores_are_right_for_every_optimizer_of_several_processes(found, case, kind, noise):
    seen, _ = found[0][case]
    assert seen["kind"] == kind
    scores = dpaudit.Observations(with_canary=seen["with"], without_canary=seen["without"])
    require_normal(scores, noise=noise)


def test_both_processes_record_the_same_and_keep_the_same_weights(found):
    for case in RUN:
        (first, weights_0), (second, weights_1) = found[0][case], found[1][case]
        assert torch.equal(weights_0, weights_1)
        assert first is second is None or (first["with"] == second["with"]).all()


@pytest.mark.parametrize(
    ("case", "plain"),
    [("observed", "plain"), long("ghost", "ghost plain"), long("per layer", "per layer plain")],
)
def test_the_weights_are_those_without_an_observer(found, case, plain):
    torch.testing.assert_close(found[0][case][1], found[0][plain][1], rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_canaries_join_where_they_are_drawn_and_are_seen_by_all_processes(found):
    joined = [found[rank]["sampled"][0]["joined"] for rank in (0, 1)]
    tries = found[0]["sampled"][0]["present"] * 60
    fewest, most = count_range(tries, RATE)
    assert fewest <= sum(side.count for side in joined) <= most
    fewest, most = count_range(tries, RATE / 2, comparisons=2)
    for side in joined:
        assert fewest <= side.count <= most
        assert side.mean == pytest.approx(1.0, abs=room(1 / math.sqrt(side.count), comparisons=2))


def test_noise_that_every_process_adds_before_an_average_is_a_violation(found):
    assert found[0]["broken"][0]["verdict"] == dpaudit.Verdict.VIOLATION.name


def test_a_fault_that_only_the_second_rank_sees_is_reported_by_the_first(found):
    seen = found[0]["doubled"][0]
    assert seen["verdict"] == dpaudit.Verdict.VIOLATION.name
    assert any("On rank 1: " in text for text in seen["findings"]), seen["findings"]
    assert not any("On rank 0: " in text for text in seen["findings"])
    assert found[0]["observed"][0]["findings"] == []
    assert not any("other processes" in text for text in seen["gaps"])


def test_an_error_in_one_process_ends_the_audit_in_all_and_the_training_goes_on(found):
    reasons = "the observation ended in another process", "ZeroDivisionError in dpaudit"
    for rank, reason in zip(found, reasons, strict=True):
        (seen, after), (_, plain) = rank["ended"], rank["ended plain"]
        assert seen["gaps"][0].startswith(f"steps from step 9 on are not audited: {reason}")
        assert seen["verdict"] in {"NO_VIOLATION", "UNDERPOWERED"}
        torch.testing.assert_close(after, plain, rtol=1e-4, atol=1e-5)


def test_the_settings_of_every_rank_have_no_finding(found):
    observed = [case for case, options in RUN.items() if options.get("observed", case != "doubled")]
    for case in observed:
        assert [rank[case][0]["lints"] for rank in found] == [[], []], case
        divides = any("with 399, it divides by 39" in note for note in found[0][case][0]["notes"])
        assert divides == (case != "sum")
