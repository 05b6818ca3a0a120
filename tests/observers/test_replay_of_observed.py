"""A step of an observed training is replayed in one line, and what it shows is part of the result."""

import pickle

import numpy as np
import optax
import pytest
import torch
from jax_runs import DELTA as JAX_DELTA
from jax_runs import INPUTS, RATE, TARGETS, start
from jax_runs import private as private_functions
from opacus_runs import DELTA, run, train_step
from torch.utils.data import default_collate

import dpaudit
from dpaudit.observers.jax_privacy import observe as observe_jax
from dpaudit.observers.opacus import observe

STEPS = 6
pytestmark = [
    pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
]


def observed(private, after=lambda _: None, **options):
    made = private(noise_multiplier=1.0, **options)

    def step(batch):
        train_step(made, *batch)
        after(made)

    session = observe(made.optimizer, module=made.model, loader=made.loader, delta=DELTA, seed=0)
    with session as recorder:
        for _ in range(3):  # a change in a step whose weights are not read has them read from then on
            run(made, STEPS)
            after(made)
    return made, recorder, step


def decayed(made):
    with torch.no_grad():
        for value in made.model.parameters():
            value.mul_(0.999)


def leaking(made):
    with torch.no_grad():
        value = next(made.model.parameters())
        value.add_(value.grad_sample.sum(dim=0), alpha=1e-3)


def test_a_correct_step_leaves_the_verdict_and_the_weights_as_they_are(private):
    made, recorder, step = observed(private)
    before = [value.clone() for value in made.model.parameters()]
    assert recorder.replay(step).findings == ()
    assert recorder.audit().verdict is not dpaudit.Verdict.VIOLATION
    assert not any("use replay()" in text for text in recorder.audit().not_covered)
    assert all(map(torch.equal, before, made.model.parameters()))
    assert pickle.loads(pickle.dumps(recorder)).audit().not_covered == recorder.audit().not_covered


def test_weights_that_decay_by_hand_are_to_check_until_the_step_is_replayed(private):
    _, recorder, step = observed(private, decayed)
    assert [fact.name for fact in recorder.audit().to_check] == ["outside-update"]
    assert recorder.replay(step).findings == ()
    result = recorder.audit()
    assert result.to_check == ()
    assert any("decided by the replay, if its step does it" in note for note in result.diagnosis.notes)


def test_an_update_with_gradients_without_noise_becomes_a_violation(private):
    _, recorder, step = observed(private, leaking)
    assert recorder.audit().verdict is not dpaudit.Verdict.VIOLATION
    recorder.replay(step)
    result = recorder.audit()
    assert result.verdict is dpaudit.Verdict.VIOLATION
    assert "weights" in [finding.name for finding in result.findings]


def normalized(examples):
    inputs, targets = default_collate(examples)
    return (inputs - inputs.mean(dim=0)) / (inputs.std(dim=0) + 1e-3), targets


def test_a_collate_function_that_couples_the_examples_is_replayed_too(private):
    _, recorder, step = observed(private, loading={"collate_fn": normalized})
    assert "coupled-examples" in [finding.name for finding in recorder.replay(step).findings]


def test_observe_replays_a_step_at_the_end_of_its_block(private):
    made = private(noise_multiplier=1.0)
    options = {"module": made.model, "loader": made.loader, "delta": DELTA, "seed": 0}
    with observe(made.optimizer, **options, replay=lambda batch: train_step(made, *batch)) as recorder:
        run(made, STEPS)
        with pytest.raises(dpaudit.InputError, match="after the with block of its observer"):
            recorder.replay(lambda batch: train_step(made, *batch))
    assert any("one batch and neighbors of it were replayed" in text for text in recorder.audit().not_covered)


def test_a_step_that_cannot_be_replayed_is_noted(private):
    made = private(noise_multiplier=1.0)
    with observe(made.optimizer, loader=made.loader, delta=DELTA, replay=lambda _: None) as recorder:
        run(made, STEPS)
    expected = "the step was not replayed: step(batch) added no noise"
    assert any(text.startswith(expected) for text in recorder.audit().not_covered)


def test_a_step_without_a_loader_needs_a_batch(private):
    made = private(noise_multiplier=1.0)
    with observe(made.optimizer, delta=DELTA) as recorder:
        run(made, STEPS)
    with pytest.raises(dpaudit.InputError, match="takes its examples from the loader: pass loader="):
        recorder.replay(lambda batch: train_step(made, *batch))
    batch = default_collate([made.loader.dataset[index] for index in range(8)])
    assert recorder.replay(lambda batch: train_step(made, *batch), batch).findings == ()


def test_a_step_of_jax_is_replayed_with_the_functions_that_were_observed():
    grad_fn, privatizer = private_functions()

    def step(grad_fn, privatizer, state, batch):
        params, noise_state = state
        noisy, noise_state = privatizer.update(grad_fn(params, batch), noise_state)
        count = np.float32(batch[0].sum() > 0)  # a learning rate that follows the batch
        return optax.apply_updates(params, optax.tree.scale(-0.5 - count, noisy)), noise_state

    recorder = observe_jax(grad_fn, privatizer, sample_rate=RATE, delta=JAX_DELTA).recorder
    params = start()
    state = params, privatizer.init(params)
    result = recorder.replay(step, state, (INPUTS[:8], TARGETS[:8]))
    assert "other-state" in [finding.name for finding in result.findings]


def test_recorders_without_a_training_run_name_what_can_be_replayed():
    recorder = dpaudit.Recorder(claim=dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5), num_steps=3)
    with pytest.raises(dpaudit.InputError, match=r"use dpaudit\.observers\.step\.replay\(\)"):
        recorder.replay(lambda batch: batch)
