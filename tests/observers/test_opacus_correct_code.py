"""Correct training code of other kinds: subclasses, half precision, other loaders, copies, and a NaN."""

import copy
import itertools
import pickle
import warnings

import pytest
import torch
from opacus.data_loader import DPDataLoader
from opacus_runs import DELTA, run, small_data, train_step
from torch import nn
from torch.utils.data import DataLoader

import dpaudit
from dpaudit.observers.opacus import observe

STEPS = 30
NOT_FLAGGED = dpaudit.Verdict.NO_VIOLATION, dpaudit.Verdict.UNDERPOWERED


class Decayed(torch.optim.SGD):
    """Shrinks weights itself, and then calls its base class."""

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for value in group["params"]:
                    value.mul_(0.999)
                    value.grad = value.grad.clone()
        return super().step(closure)


class TwiceDecayed(Decayed):
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("kind", [Decayed, TwiceDecayed])
def test_a_class_whose_step_calls_that_of_its_base_class_is_observed_once_per_step(train, kind):
    for base in kind.__mro__[1 : kind.__mro__.index(torch.optim.SGD) + 1]:  # then torch calls hooks for each
        base([nn.Parameter(torch.zeros(1))], lr=0.1)
    options = {"optimizer": lambda parameters: kind(parameters, lr=0.5), "num_steps": STEPS}
    made, plain = train(**options), train(observed=False, **options)
    assert made.recorder.num_done == STEPS
    assert made.recorder.audit().verdict in NOT_FLAGGED
    torch.testing.assert_close(made.weights, plain.weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_steps", [0, 2])
def test_an_update_without_noise_is_refused_at_first_and_ends_the_audit_later(private, num_steps):
    made = private(optimizer=lambda parameters: Decayed(parameters, lr=0.5))
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    sentence = r"The optimizer did not call add_noise\(\) before this update, so there is no"
    with observe(made.optimizer, delta=DELTA, seed=0) as recorder:
        run(made, num_steps) if num_steps else None
        with pytest.warns(match=sentence) if num_steps else pytest.raises(dpaudit.InputError, match=sentence):
            made.optimizer.original_optimizer.step()
    assert recorder.num_done == num_steps


class PartlyHalf(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16, dtype=torch.bfloat16), nn.Linear(16, 2)

    def forward(self, inputs):
        return self.second(torch.tanh(self.first(inputs.bfloat16())).float())


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_model_with_some_layers_in_bfloat16_is_observed(train, mode):
    made = train(build=PartlyHalf, num_steps=STEPS, grad_sample_mode=mode)
    assert made.recorder.num_done == STEPS
    assert made.recorder.audit().findings == ()
    score = made.recorder.observations
    assert score.with_canary.mean() - score.without_canary.mean() == pytest.approx(1.0, abs=0.1)


def test_examples_in_bfloat16_can_be_held_out():
    data = [(one.bfloat16(), int(target)) for one, target in small_data(60)]
    rest, held_out = dpaudit.observers.opacus.hold_out(data, 20)
    assert (len(rest), len(held_out)) == (40, 20)


def test_a_run_that_diverges_goes_on_and_is_audited_up_to_there(private):
    made = private(noise_multiplier=1.0)
    with observe(made.optimizer, delta=DELTA, seed=0) as recorder:
        run(made, STEPS)
        with torch.no_grad():
            next(made.model.parameters()).fill_(torch.nan)
        with pytest.warns(UserWarning, match=f"The audit ends: steps from step {STEPS} on are not audited"):
            run(made, 1)
        with warnings.catch_warnings(record=True) as later:
            run(made, 4)
    assert not [one for one in later if "audit" in str(one.message)]
    assert recorder.num_done == STEPS
    result = recorder.audit()
    assert result.verdict in NOT_FLAGGED
    assert result.diagnosis.checks
    assert any(f"from step {STEPS} on are not audited" in gap for gap in result.not_covered)


@pytest.mark.parametrize("sampling", [False, True])
def test_copies_of_a_recorder_give_the_same_result_and_harm_no_optimizer(private, sampling):
    made = private(noise_multiplier=1.0)
    options = {"loader": made.loader, "delta": DELTA, "seed": 0, "num_canaries": 64}
    with observe(made.optimizer, sampling=sampling, **options) as recorder:
        run(made, STEPS)
    copies = [pickle.loads(pickle.dumps(recorder)), copy.deepcopy(recorder)]
    claimed = {"num_steps": STEPS, "noise_multiplier": 1.5}
    original = recorder.audit(**claimed)
    run(made, 2)  # a copy of an optimizer would break all optimizers of its class
    assert [str(one.audit(**claimed)) for one in copies] == 2 * [str(original)]
    assert original.findings[0].name == "noise-multiplier"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"loader": "no"},
            "loader must be the one that make_private returned, which has a sampler, got a str",
        ),
        ({"module": "no"}, "module must be the model that make_private returned, got a str"),
        ({"sampling": "no"}, "sampling must be True or False, got 'no'"),
        ({"tests": "no"}, "tests must be True or False, got 'no'"),
        ({"sample_rate": 2}, "sample_rate must be above 0 and at most 1, got 2"),
        ({"delta": 2}, "delta must be"),
        ({"num_steps": 0.5}, "num_steps must be"),
        ({"callbacks": [print]}, "delta is missing"),
    ],
)
def test_arguments_are_checked_before_the_first_step(private, given, sentence):
    made = private(noise_multiplier=1.0)
    with pytest.raises(dpaudit.InputError, match=sentence), observe(made.optimizer, **given):
        pass


def steps(made, batches, num_steps):
    for inputs, targets in itertools.islice(batches, num_steps):
        train_step(made, inputs, targets)


def forever(loader):
    return itertools.chain.from_iterable(itertools.repeat(loader))


def loader_used(recorder):
    return [one.sentence for one in recorder.audit().findings if one.name in {"loader-used", "rows-drawn"}]


def test_a_loop_over_another_loader_than_the_given_one_is_found(private):
    made = private(noise_multiplier=1.0)
    original = DataLoader(made.loader.dataset, batch_size=10, shuffle=True)
    with observe(made.optimizer, loader=made.loader, delta=DELTA, seed=0) as recorder:
        steps(made, forever(original), STEPS)
    (found,) = loader_used(recorder)
    assert found.startswith(f"loader= drew batches for none of {STEPS} steps. Every batch has the same size")


def test_another_loader_with_poisson_sampling_at_the_claimed_rate_is_not_flagged(private):
    made = private(noise_multiplier=1.0)
    data, rate = made.loader.dataset, made.loader.sample_rate
    for other, is_found in ((rate, False), (2 * rate, True)):
        with observe(made.optimizer, loader=made.loader, delta=DELTA, seed=0) as recorder:
            steps(made, forever(DPDataLoader(data, sample_rate=other)), STEPS)
        assert bool(loader_used(recorder)) == is_found


def test_a_look_at_the_given_loader_does_not_hide_that_another_one_is_used(private):
    made = private(noise_multiplier=1.0)
    original = DataLoader(made.loader.dataset, batch_size=10)
    with observe(made.optimizer, loader=made.loader, delta=DELTA, seed=0) as recorder:
        next(iter(made.loader))
        steps(made, forever(original), STEPS)
    assert any(
        f"loader= drew batches for 1 of {STEPS} steps" in sentence for sentence in loader_used(recorder)
    )


def with_evaluation(made, loader):
    other = DataLoader(made.loader.dataset, batch_size=10)
    for _ in range(3):
        steps(made, iter(loader), 10)  # leaves the epoch in the middle
        made.model.eval()
        with torch.no_grad():
            for inputs, _targets in other:
                made.model(inputs)
        made.model.train()


def started_before(made, _):
    steps(made, made.batches, STEPS)


def prefetched(made, loader):
    batches = forever(loader)
    queue = list(itertools.islice(batches, 3))

    def ahead():
        for batch in batches:
            queue.append(batch)
            yield queue.pop(0)

    steps(made, ahead(), STEPS)


def with_other_batches_in_between(made, loader):
    other = forever(DataLoader(made.loader.dataset, batch_size=10))
    for batch in itertools.islice(forever(loader), STEPS):
        next(other)
        steps(made, [batch], 1)


@pytest.mark.parametrize("loop", [with_evaluation, started_before, prefetched, with_other_batches_in_between])
def test_a_loop_over_the_given_loader_is_not_said_to_use_another(private, loop):
    made = private(noise_multiplier=1.0)
    made.batches = forever(made.loader)
    if loop is started_before:
        next(made.batches)
    with observe(made.optimizer, loader=made.loader, delta=DELTA, seed=0) as recorder:
        loop(made, made.loader)
    assert loader_used(recorder) == []
