"""Phases of one training are observed one after another: what they share is seen, and nothing else."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from opacus import PrivacyEngine
from opacus.optimizers import DPOptimizer
from opacus_runs import DELTA, Made, run
from torch import nn
from torch.utils.data import DataLoader

from dpaudit.observers.opacus import observe
from dpaudit.observers.opacus._prepared import attached_accounting

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


def others(recorder):
    """What is to check about other private steps, and notes about earlier ones."""
    result = recorder.audit()
    to_check = [fact.sentence for fact in result.to_check if fact.name == "other-private-steps"]
    return to_check, [note for note in result.diagnosis.notes if "from before the audit" in note]


@pytest.mark.few(12)
@pytest.mark.parametrize("phase", [prepared_again, loaded])
@pytest.mark.parametrize("seed", range(10))
def test_an_accountant_without_the_steps_of_earlier_phases_is_to_check(private, phase, seed):
    made = private(noise_multiplier=1.0, seed=seed)
    assert others(observed(made)) == ([], [])
    recorder = observed(phase(made))
    ((sentence,), notes) = others(recorder)
    assert sentence.startswith(
        "The accountant does not have 20 steps of earlier phases: together, epsilon is at most"
    )
    assert float(sentence.split("at most ")[1].split()[0]) > recorder.claim.epsilon
    assert notes == []


def test_an_accountant_that_continues_another_one_is_a_note(private):
    made = private(noise_multiplier=1.0)
    observed(made)
    again = prepared_again(made)
    history = made.engine.accountant.state_dict()
    accounting = attached_accounting(again.optimizer)
    accounting.accountant.load_state_dict(history)
    to_check, (note,) = others(observed(again))
    assert to_check == []
    assert note.startswith("The accountant has 20 steps from before the audit: together, epsilon is at most")
    ((sentence,), _) = others(observed(made))  # the first accountant does not have the second phase
    assert sentence.startswith("The accountant does not have 20 steps of earlier phases")


def halves(made):
    """Two engines, each with a layer of the model."""
    model, criterion, parts = made.model, made.criterion, []
    for layer in (model._module[0], model._module[2]):
        engine = PrivacyEngine(accountant="rdp")
        optimizer = DPOptimizer(
            torch.optim.SGD(layer.parameters(), lr=0.5),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            expected_batch_size=10,
        )
        optimizer.attach_step_hook(engine.accountant.get_optimizer_hook_fn(sample_rate=0.05))
        parts.append(Made(model, optimizer, criterion, made.loader, False))
    return parts


@pytest.mark.parametrize("seed", range(10))
def test_another_private_optimizer_of_the_same_model_is_to_check(private, seed):
    made = private(noise_multiplier=1.0, seed=seed)
    first, second = halves(made)
    epochs = itertools.chain.from_iterable(itertools.repeat(made.loader))
    with observe(first.optimizer, module=made.model, loader=made.loader, delta=DELTA) as recorder:
        for inputs, targets in itertools.islice(epochs, STEPS):
            second.optimizer.zero_grad()
            first.optimizer.zero_grad()
            made.criterion(made.model(inputs), targets).backward()
            first.optimizer.step()
            second.optimizer.step()
    result = recorder.audit()
    assert others(recorder)[0] == [
        "Parameters 2.weight, 2.bias changed by another private optimizer, whose steps this claim leaves out."
    ]
    assert not [finding for finding in result.findings if finding.p_value == 0]


def test_more_accounted_than_observed_steps_are_to_check(private):
    made = private(noise_multiplier=1.0)
    accountant = made.engine.accountant
    with observe(made.optimizer, module=made.model, loader=made.loader, delta=DELTA) as recorder:
        run(made, STEPS)
        for _ in range(7):
            accountant.step(noise_multiplier=1.0, sample_rate=0.05)
    for _ in range(7):  # after the audit, which is another matter
        accountant.step(noise_multiplier=1.0, sample_rate=0.05)
    assert others(recorder)[0] == [
        "The accountant got 7 more steps than were observed, of an optimizer that this claim leaves out."
    ]


@pytest.mark.parametrize("kind", ["rows", "momentum"])
def test_steps_before_the_first_accounted_one_are_to_check(private, kind):
    made = private(
        noise_multiplier=1.0, optimizer=lambda values: torch.optim.SGD(values, lr=0.1, momentum=0.9)
    )
    run(made, 3)
    inner, model = made.optimizer.original_optimizer, made.model
    again = prepared_again(made)
    if kind == "momentum":
        for value in model.parameters():
            value.grad_sample = None
        again.optimizer.original_optimizer = inner
    ((sentence,), _) = others(observed(again))
    assert "gradients of earlier steps, but its accountant had none" in sentence


KINDS = {
    "adam": lambda values: torch.optim.Adam(values, lr=0.01),
    "adagrad": lambda values: torch.optim.Adagrad(values, lr=0.01, initial_accumulator_value=0.1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_new_trainings_on_the_same_data_are_not_mentioned(private, kind):
    made = private(noise_multiplier=1.0, optimizer=KINDS[kind])
    assert others(observed(made)) == ([], [])
    other = private(noise_multiplier=1.0, optimizer=KINDS[kind], seed=1)
    other.loader = made.loader
    assert others(observed(other)) == ([], [])


def test_a_pickled_recorder_has_the_same_facts(private):
    made = private(noise_multiplier=1.0)
    observed(made)
    recorder = observed(prepared_again(made))
    assert others(pickle.loads(pickle.dumps(recorder))) == others(recorder)
