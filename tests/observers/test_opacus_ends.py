"""An audit never ends a training with Opacus: it ends itself, and the steps before can be audited."""

import itertools

import pytest
import torch
from opacus_runs import DELTA, OTHER_KINDS, run, small_data, weights
from torch.utils.data import IterableDataset

import dpaudit
from dpaudit.diagnostics import NoiseCheck
from dpaudit.observers.opacus import observe
from dpaudit.observers.opacus._gradient_canaries import GradientCanaries
from dpaudit.observers.opacus._observer import OpacusObserver
from dpaudit.observers.opacus._post_processing import PostProcessing
from dpaudit.observers.opacus._prepared import LoaderBatches
from dpaudit.observers.opacus._sums import SumObserver
from dpaudit.recording import Recorder

STEPS, BEFORE = 9, 5
KINDS = {"hooks": {}} | {name: OTHER_KINDS[name] for name in ("ghost", "per-layer clipping")}
PLACES = [
    (LoaderBatches, "_note"),
    (SumObserver, "_before_adding"),
    (SumObserver, "_after_adding"),
    (SumObserver, "before_noise"),
    (GradientCanaries, "added"),
    (PostProcessing, "note"),
    (PostProcessing, "before"),
    (OpacusObserver, "_observed"),
    (Recorder, "record"),
    (NoiseCheck, "observe"),
]
NOT_FLAGGED = dpaudit.Verdict.NO_VIOLATION, dpaudit.Verdict.UNDERPOWERED


def failing(monkeypatch, place, error):
    """Return a function after which one method of dpaudit raises once."""
    owner, name = place
    original, errors = getattr(owner, name), []

    def method(*args, **options):
        if errors:
            raise errors.pop()
        return original(*args, **options)

    monkeypatch.setattr(owner, name, method)
    return lambda: errors.append(error)


def watched(made, **options):
    usual = {"module": made.model, "loader": made.loader, "delta": DELTA, "seed": 0}
    return observe(made.optimizer, **(usual | options))


def plain_weights(private, change=lambda _: None, **options):
    made = private(noise_multiplier=1.0, **options)
    run(made, BEFORE)
    change(made)
    run(made, STEPS - BEFORE)
    return weights(made.model)


def require_result(recorder, reason, num_done=BEFORE):
    """The result is about the steps before, and the short block says where it ended."""
    assert recorder.num_done == num_done
    result = recorder.audit()
    assert result.verdict in NOT_FLAGGED
    expected = f"steps from step {num_done} on are not audited: {reason}"
    assert result.not_covered[0].startswith(expected)
    assert expected[1:45] in str(result)
    assert f"{num_done} steps" in result.claim.summary


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[1])
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_dpaudit_ends_the_audit_and_the_weights_are_the_same(private, monkeypatch, kind, place):
    expected = plain_weights(private, **KINDS[kind])
    made = private(noise_multiplier=1.0, **KINDS[kind])
    fail = failing(monkeypatch, place, ZeroDivisionError("broken"))
    with watched(made) as recorder:
        run(made, BEFORE)
        fail()
        with pytest.warns(UserWarning, match="The audit ends") as warned:
            run(made, STEPS - BEFORE)
    assert sum(str(warning.message).startswith("The audit ends") for warning in warned) == 1
    torch.testing.assert_close(weights(made.model), expected, rtol=1e-4, atol=1e-5)
    num_done = BEFORE + (place[1] == "observe")  # the scores of that step were recorded before
    require_result(recorder, "ZeroDivisionError in dpaudit: broken", num_done)


@pytest.mark.parametrize("place", PLACES[3:-1], ids=lambda place: place[1])
def test_an_interrupt_passes_and_the_steps_before_can_be_audited(private, monkeypatch, place):
    made = private(noise_multiplier=1.0)
    before = dict(vars(made.optimizer))
    interrupt = failing(monkeypatch, place, KeyboardInterrupt())

    def interrupted():
        run(made, BEFORE)
        interrupt()
        run(made, STEPS)

    with pytest.raises(KeyboardInterrupt), watched(made) as recorder:
        interrupted()
    assert vars(made.optimizer).keys() == before.keys()
    assert not made.optimizer.original_optimizer._optimizer_step_pre_hooks
    assert recorder.audit().verdict in NOT_FLAGGED
    assert recorder.num_done in (BEFORE, BEFORE + 1)
    run(made, 2)


def frozen(made):
    if made.ghost:  # whose model raises for a layer that does not require gradients any more
        made.optimizer.original_optimizer.param_groups[0]["params"][:2] = []
    else:
        made.model._module[0].requires_grad_(False)


@pytest.mark.parametrize("kind", ["hooks", "ghost"])
def test_a_layer_that_is_frozen_ends_the_audit_and_the_weights_are_the_same(private, kind):
    expected = plain_weights(private, frozen, **KINDS[kind])
    made = private(noise_multiplier=1.0, **KINDS[kind])
    with watched(made) as recorder:
        run(made, BEFORE)
        frozen(made)
        with pytest.warns(
            UserWarning, match="The audit ends: steps from step 5 on are not audited: The optim"
        ):
            run(made, STEPS - BEFORE)
    torch.testing.assert_close(weights(made.model), expected, rtol=1e-4, atol=1e-5)
    require_result(recorder, "The optimizer must train the same 4 parameter tensors in all observed steps")


class StopError(Exception):
    """What a user raises."""


def test_an_error_of_the_user_passes_unchanged_and_the_steps_before_can_be_audited(private):
    made = private(noise_multiplier=1.0)

    def loop():
        run(made, BEFORE)
        made.optimizer.attach_step_hook(fail)
        run(made, 1)

    def fail(_):
        raise StopError("mine")

    with pytest.raises(StopError, match=r"^mine$"), watched(made) as recorder:
        loop()
    assert recorder.num_done == BEFORE
    assert recorder.audit().verdict in NOT_FLAGGED
    assert not any("not audited" in text for text in recorder.audit().not_covered)


def test_a_callback_still_ends_the_training_on_purpose(private):
    def stop(live):
        if live.num_done == BEFORE:
            raise StopError

    made = private(noise_multiplier=1.0)
    with pytest.raises(StopError), watched(made, callbacks=[stop], every=1) as recorder:
        run(made, STEPS)
    assert recorder.num_done == BEFORE
    assert recorder.ended == ()


def test_a_step_with_a_closure_is_observed(private):
    made = private(noise_multiplier=1.0)
    batches = itertools.chain.from_iterable(itertools.repeat(made.loader))

    def closure():
        made.optimizer.zero_grad()
        inputs, targets = next(batches)
        made.criterion(made.model(inputs), targets).backward()

    with watched(made) as recorder:
        for _ in range(STEPS):
            made.optimizer.step(closure)
    expected = private(noise_multiplier=1.0)
    run(expected, STEPS)
    torch.testing.assert_close(weights(made.model), weights(expected.model), rtol=1e-4, atol=1e-5)
    assert recorder.num_done == STEPS


class Twice(torch.optim.SGD):
    """Updates once more with the same gradient, as an optimizer with a line search does."""

    def step(self, closure=None):
        super().step(closure)
        if self.param_groups[0]["lr"] < 0.5:
            super().step(closure)


def test_an_optimizer_that_begins_to_update_twice_with_one_release_is_observed_once_per_step(private):
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # then torch calls hooks of both classes
    options = {"optimizer": lambda parameters: Twice(parameters, lr=0.5)}

    def change(made):
        made.optimizer.original_optimizer.param_groups[0]["lr"] = 0.25

    expected = plain_weights(private, change, **options)
    made = private(noise_multiplier=1.0, **options)
    with watched(made) as recorder:
        run(made, BEFORE)
        change(made)
        run(made, STEPS - BEFORE)
    torch.testing.assert_close(weights(made.model), expected, rtol=1e-4, atol=1e-5)
    assert recorder.num_done == STEPS
    assert recorder.audit().verdict in NOT_FLAGGED


def test_steps_without_noise_in_the_middle_end_the_audit(private):
    def step_without_noise(made):
        inputs, targets = next(iter(made.loader))
        made.optimizer.zero_grad()
        made.criterion(made.model(inputs), targets).backward()
        for value in made.optimizer.params:
            value.grad = value.grad_sample.mean(dim=0)
        made.optimizer.original_optimizer.step()

    expected = plain_weights(private, step_without_noise)
    made = private(noise_multiplier=1.0)
    with watched(made) as recorder:
        run(made, BEFORE)
        with pytest.warns(match="The audit ends"):
            step_without_noise(made)
        run(made, STEPS - BEFORE)
    torch.testing.assert_close(weights(made.model), expected, rtol=1e-4, atol=1e-5)
    require_result(recorder, "The optimizer did not call add_noise() before this update")


class Stream(IterableDataset):
    """Examples without indices."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)

    def __len__(self):
        return len(self.data)


def test_a_training_on_an_iterable_data_set_is_audited(private):
    options = {"data": lambda count: Stream(small_data(count)), "poisson_sampling": False}
    made = private(noise_multiplier=1.0, **options)
    with watched(made, sample_rate=0.05) as recorder:
        run(made, STEPS)
    result = recorder.audit()
    assert result.verdict in NOT_FLAGGED or result.findings[0].name == "batch-sampler"
    assert recorder.num_done == STEPS
