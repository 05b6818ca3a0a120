"""Opacus on two real processes: canaries join on one of them, scores are read after the reduction."""

import pickle

import pytest
import torch
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.optimizers.optimizer import _generate_noise
from opacus_runs import DELTA, small_data, small_model, weights
from torch import distributed, multiprocessing, nn
from torch.utils.data import DataLoader

import dpaudit
from dpaudit.observers.opacus import observe

# Batches are large enough never to be empty: the sampler of Opacus 1.6.0 for several processes leaves an
# empty one out, so that one process makes fewer steps than the other, which then waits for it.
STEPS, RATE, EXAMPLES = 200, 0.1, 400
CASES = ["observed", "plain", "sum", "broken"]


def noise_on_every_rank(optimizer):
    """Every process adds its share of the noise: the shares are averaged, and too small together."""
    for value in optimizer.params:
        noise = _generate_noise(optimizer.noise_multiplier * optimizer.max_grad_norm, value.summed_grad)
        value.grad = value.summed_grad + noise / optimizer.world_size


def private(rank, loss_reduction):
    torch.manual_seed(0)
    model, data = small_model(), small_data(EXAMPLES)
    torch.manual_seed(rank)  # noise and sampling are each process' own
    engine = PrivacyEngine(accountant="rdp")
    model = DifferentiallyPrivateDistributedDataParallel(model)
    return engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5 if loss_reduction == "mean" else 0.02),
        data_loader=DataLoader(data, batch_size=int(RATE * EXAMPLES)),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        loss_reduction=loss_reduction,
    )


def train(rank, case):
    reduction = "sum" if case == "sum" else "mean"
    model, optimizer, loader = private(rank, reduction)
    if case == "broken":
        optimizer.add_noise = noise_on_every_rank.__get__(optimizer)

    def loop():
        for _ in range(int(STEPS * RATE)):
            for inputs, targets in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets, reduction=reduction).backward()
                optimizer.step()

    if case == "plain":
        loop()
        return None, weights(model)
    with observe(optimizer, delta=DELTA, num_steps=STEPS) as recorder:  # no seed: the processes agree on one
        loop()
    result = recorder.audit()
    return (result.verdict.name, recorder.observations.with_canary, result.claim.summary), weights(model)


def work(rank, folder):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = {case: train(rank, case) for case in CASES}
    with open(f"{folder}/{rank}.pickle", "wb") as file:  # noqa: PTH123
        pickle.dump(found, file)
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(work, args=(str(folder),), nprocs=2)
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in (0, 1)]


def test_correct_training_on_two_processes_is_not_flagged(found):
    for case in ("observed", "sum"):
        (verdict, scores, claim), _ = found[0][case]
        assert verdict == dpaudit.Verdict.NO_VIOLATION.name
        assert scores.mean() == pytest.approx(1.0, abs=0.05)
        assert scores.std() == pytest.approx(1.0, rel=0.05)
        assert claim.startswith("DP-SGD, noise multiplier 1, sample rate 0.1, 200 steps")


def test_both_processes_record_the_same_and_keep_the_same_weights(found):
    for case in CASES:
        (first, weights_0), (second, weights_1) = found[0][case], found[1][case]
        assert torch.equal(weights_0, weights_1)
        assert first is second is None or (first[1] == second[1]).all()


def test_the_weights_are_those_without_an_observer(found):
    torch.testing.assert_close(found[0]["observed"][1], found[0]["plain"][1], rtol=1e-4, atol=1e-5)


def test_noise_that_every_process_adds_before_an_average_is_a_violation(found):
    assert found[0]["broken"][0][0] == dpaudit.Verdict.VIOLATION.name
