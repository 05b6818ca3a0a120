"""Phases of one training are observed one after another: what they share is seen, and nothing else."""

import copy
import io

import pytest
import torch
from opacus import PrivacyEngine
from opacus_runs import DELTA, Made, run
from torch import nn
from torch.utils.data import DataLoader

from dpaudit.observers.opacus import observe

STEPS = 20


def observed(made, seed=None, *, num_steps=STEPS, state=None):
    """The recorder of some steps, with torch seeded before."""
    if seed is not None:
        torch.manual_seed(seed)
    known = {"loader": made.loader, "module": made.model, "delta": DELTA, "num_canaries": 16}
    with observe(made.optimizer, **known) as recorder:
        if state is not None:
            recorder.load_state_dict(state)
        run(made, num_steps)
    return recorder


def facts(recorder):
    diagnosis = recorder.diagnose(noise_multiplier=1.0)
    return {fact.name for fact in (*diagnosis.findings, *diagnosis.to_check) if fact.p_value == 0}


def prepared_again(made, model=None):
    """Another engine for the same weights, or for those of a model."""
    model = made.model if model is None else model
    values = [value for value in model.parameters() if value.requires_grad]
    criterion = nn.CrossEntropyLoss()
    parts = PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(values, lr=0.5),
        data_loader=DataLoader(made.loader.dataset, batch_size=10),
        criterion=criterion,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    return Made.of(parts, criterion)


def loaded(made):
    """Another engine for a model that is read from a file."""
    file = io.BytesIO()
    torch.save(made.model._module.state_dict(), file)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    file.seek(0)
    model.load_state_dict(torch.load(file))
    return prepared_again(made, model)


PHASES = {"same optimizer": lambda made: made, "another engine": prepared_again, "from a file": loaded}


@pytest.mark.few(12)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("seed", range(10))
def test_a_phase_that_is_seeded_like_an_earlier_one_is_found(private, phase, seed):
    made = private(noise_multiplier=1.0, seed=seed)
    assert "earlier-noise" not in facts(observed(made, seed + 50))
    again = PHASES[phase](made)
    assert "earlier-noise" in facts(observed(again, seed + 50))
    assert "earlier-noise" not in facts(observed(again, seed + 51))


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_resumed_run_that_repeats_the_noise_of_its_state_is_found(private, mode):
    made = private(noise_multiplier=1.0, grad_sample_mode=mode)
    state = observed(made, 1).state_dict()
    for seed, expected in ((1, True), (2, False)):
        other = private(noise_multiplier=1.0, grad_sample_mode=mode, seed=5)
        assert ("earlier-noise" in facts(observed(other, seed, state=state))) is expected


def test_the_same_training_that_is_run_again_is_no_finding(private):
    for rate in (0.5, 0.1):
        made = private(
            noise_multiplier=1.0, optimizer=lambda values, rate=rate: torch.optim.SGD(values, lr=rate)
        )
        assert "earlier-noise" not in facts(observed(made, 3))
        assert "earlier-noise" not in facts(observed(made, 4))


def test_a_model_that_is_set_back_and_trained_again_is_no_finding(private):
    made = private(noise_multiplier=1.0)
    first = copy.deepcopy(made.model.state_dict())
    for seed in (3, 3):
        made.model.load_state_dict(first)
        assert "earlier-noise" not in facts(observed(made, seed))


def test_a_run_that_returns_to_its_last_checkpoint_is_no_finding(private):
    made = private(noise_multiplier=1.0)
    recorder = observed(made, 3)
    weights, state, generator = (
        copy.deepcopy(made.model.state_dict()),
        recorder.state_dict(),
        torch.get_rng_state(),
    )
    for _ in range(2):  # the second time as if the first had been interrupted
        made.model.load_state_dict(weights)
        torch.set_rng_state(generator)
        assert "earlier-noise" not in facts(observed(made, state=state))
