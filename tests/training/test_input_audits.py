"""Audits with input canaries are sound, see broken steps, and score what a slow computation scores."""

from functools import partial

import numpy as np
import pytest
import torch
from digits_training import dpsgd_training, finished
from score_noise import MOST, off, statistics
from statistical_limits import most_flagged, room
from torch import nn

import dpaudit
from dpaudit.training import (
    EndToEnd,
    FlipAndCrop,
    Hook,
    OneRun,
    Training,
    TwoBatches,
    broken,
)
from dpaudit.training.data import Dataset, digits, hold_out, random_images
from dpaudit.training.gradients import flat_parameters

DELTA = 1e-5
VIOLATION, NO_VIOLATION = dpaudit.Verdict.VIOLATION, dpaudit.Verdict.NO_VIOLATION
QUICK = dpaudit.Crafted(num_steps=5)
KINDS = [dpaudit.Blank(), dpaudit.Mislabelled(), dpaudit.Adversarial(num_steps=5), QUICK]
HALF_LONG = [
    pytest.param(canary, marks=[pytest.mark.long] * isinstance(canary, dpaudit.Blank | dpaudit.Adversarial))
    for canary in KINDS
]
REST, HELD = hold_out(digits(), 297)


def make(*hooks, data=REST, **options):
    usual = {"noise_multiplier": 0.7, "sample_rate": 0.03, "num_steps": 60, "learning_rate": 0.2}
    return dpsgd_training(*hooks, data=data, **(usual | options))


def train(*hooks, **options):
    return finished(make(*hooks, **options))


def one_run(canary=QUICK, **options):
    return OneRun(
        **{"delta": DELTA, "canary": canary, "held_out": HELD, "num_canaries": 8, "seed": 0} | options
    )


def paper(canary=QUICK, **options):
    return TwoBatches(**{"delta": DELTA, "canary": canary, "held_out": HELD, "seed": 0} | options)


class Slow(Hook):
    """Scores of the audit beside it, by the most obvious route: one backward pass for each canary."""

    def __init__(self, audit):
        self.audit, self.scores = audit, []

    def attach(self, training):
        self.training = training

    def observe(self, step):
        model, limit = self.training.model, self.training.settings.max_grad_norm
        made = self.audit._inserter.examples(step.index)
        present = self.audit._inserter.draws.coins(step.index)
        clipped = []
        for one, target in zip(made.inputs, made.targets, strict=True):
            loss = nn.functional.cross_entropy(model(one[None]), target[None])
            parts = torch.autograd.grad(loss, list(model.parameters()))
            gradient = torch.cat([part.reshape(-1) for part in parts])
            clipped.append(gradient * min(1.0, limit / float(gradient.norm())))
        self.scores.append([self.score(step, clipped, present, number) for number in range(len(clipped))])

    def score(self, step, clipped, present, number):
        known = step.clipped_sum.clone()
        for other, vector in enumerate(clipped):
            if other != number and present[other]:
                known += vector
        own = clipped[number]
        return float(own @ (step.noisy_sum - known) / own.square().sum())


def convolutions():
    layers = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 10)
    return nn.Sequential(*layers)


@pytest.mark.parametrize(
    ("canary", "options"),
    [*((canary, {}) for canary in KINDS), (dpaudit.Mislabelled(), {"build": convolutions})],
    ids=[*map(str, KINDS), "convolutions"],
)
def test_scores_are_those_of_a_slow_computation(canary, options):
    audit = one_run(canary)
    slow = Slow(audit)
    train(audit, slow, num_steps=8, **options)
    np.testing.assert_allclose(audit.recorder.state_dict()["scores"], slow.scores, rtol=2e-3, atol=2e-3)


@pytest.mark.few(2)
@pytest.mark.parametrize("canary", KINDS, ids=lambda canary: type(canary).__name__)
def test_without_noise_a_score_is_one_where_the_canary_is_and_zero_where_it_is_not(canary):
    audit = one_run(canary)
    train(audit, fault=broken.Noiseless, num_steps=50)
    seen = audit.recorder.observations
    np.testing.assert_allclose(seen.with_canary, 1.0, atol=0.02)
    np.testing.assert_allclose(seen.without_canary, 0.0, atol=0.02)
    assert audit.recorder.audit().verdict is VIOLATION


class Directions(Hook):
    """What an audit looked along in every step."""

    def __init__(self, audit):
        self.audit, self.directions, self.lengths = audit, [], []

    def attach(self, training):
        self.norm = training.settings.max_grad_norm

    def observe(self, _):
        gradients = self.audit._inserter._gradients.double()
        norms = gradients.norm(dim=1)
        self.directions.append((gradients / norms[:, None]).numpy())
        self.lengths.append((norms.clamp(max=self.norm) / self.norm).numpy())


def noise_of(audit, **options):
    """The statistics of a training's scores; each is standard normal if the training is correct."""
    looked = Directions(audit)
    train(audit, looked, **options)
    kept = audit.recorder.state_dict()
    directions, lengths = looked.directions, looked.lengths
    if isinstance(audit, TwoBatches):  # two scores of one canary, whose noise is drawn anew
        kept |= {name: kept[name].reshape(-1, 1) for name in ("scores", "present")}
        directions, lengths = (np.repeat(each, 2, axis=0) for each in (directions, lengths))
    return statistics(
        scores=kept["scores"],
        present=kept["present"],
        directions=directions,
        lengths=lengths,
        noise_multiplier=0.7,
    )


known = partial(paper, residual=True)
MODES = [pytest.param(one_run, id="one run"), pytest.param(known, id="known batches")]


@pytest.mark.few(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("canary", KINDS, ids=lambda canary: type(canary).__name__)
def test_scores_are_presence_and_noise_of_the_canarys_length(canary, mode):
    assert off(noise_of(mode(canary), num_steps=100)) == {}


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", MODES)
def test_scores_of_less_noise_than_claimed_are_told_apart(mode):
    found = noise_of(mode(dpaudit.Mislabelled()), num_steps=200, fault=broken.NoiseTooSmall)
    assert found["spread"] < -MOST


@pytest.mark.few(1)
@pytest.mark.parametrize("canary", HALF_LONG, ids=lambda canary: type(canary).__name__)
def test_plain_scores_of_two_batches_differ_by_the_canary(canary):
    """The batches have the same mean, whatever it is along the canary."""
    audit = paper(canary)
    train(audit, num_steps=150)
    differences = np.diff(audit.recorder.state_dict()["scores"], axis=1)
    error = differences.std(ddof=1) / np.sqrt(len(differences))
    assert abs(differences.mean() - 1) < room(error)
    assert error < 0.25  # an absent canary would be seen


@pytest.mark.long
@pytest.mark.parametrize("mode", [one_run, paper, known], ids=["one run", "two batches", "known batches"])
@pytest.mark.parametrize("canary", KINDS, ids=lambda canary: type(canary).__name__)
def test_correct_training_is_flagged_in_at_most_5_percent_of_40_seeds(canary, mode):
    flagged = 0
    for seed in range(40):
        audit = mode(canary, seed=seed)
        train(audit, num_steps=50, seed=seed)
        flagged += audit.recorder.audit().verdict is VIOLATION
    assert flagged <= most_flagged(40)


@pytest.mark.long
def test_scores_of_one_run_are_not_counted_as_independent():
    """Blank canaries of one class are the same one: their scores of a step have the same noise."""
    audit, two = one_run(dpaudit.Blank(), num_canaries=64), paper(dpaudit.Blank(), residual=True)
    for each in (audit, two):
        train(each, num_steps=50)
    with pytest.raises(dpaudit.InputError, match=r"inference must be Betting\(\)"):
        audit.recorder.audit(inference=dpaudit.JointExact())
    assert "Betting" in audit.recorder.audit().bound.method
    assert "Betting" in two.recorder.audit().bound.method  # the model depends on the steps before


def test_too_little_noise_is_caught_with_a_crafted_canary():
    audit = one_run(dpaudit.Crafted(long=True), num_canaries=32)
    train(audit, num_steps=200, fault=broken.NoiseTooSmall)
    assert audit.recorder.audit().verdict is VIOLATION


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", [broken.Unclipped, broken.ClippedAfterMean, broken.RawMeanMixed])
def test_a_missing_clip_is_caught_with_a_crafted_canary(fault):
    audit = one_run(dpaudit.Crafted(), num_canaries=16)
    train(audit, num_steps=200, fault=fault)
    assert audit.recorder.audit().verdict is VIOLATION


def test_scores_do_not_depend_on_the_unit_of_the_gradients():
    """A loss times a constant, clipped at the norm times that constant: nothing changes."""

    def scores(scale):
        audit = one_run(dpaudit.Mislabelled())
        training = make(audit, max_grad_norm=scale, num_steps=10)
        training.loss = lambda outputs, targets: (
            scale * nn.functional.cross_entropy(outputs, targets, reduction="none")
        )
        for group in training._optimizer.param_groups:
            group["lr"] /= scale
        finished(training)
        return audit.recorder.state_dict()["scores"]

    np.testing.assert_allclose(scores(1.0), scores(4.0), rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("mode", [one_run, paper])
def test_the_weights_are_those_of_the_same_seed_without_audit(mode):
    def build():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.3), nn.Linear(16, 10))

    kept = []
    for hooks in ((), (mode(dpaudit.Crafted(num_steps=2, every=5)),)):
        torch.manual_seed(0)
        kept.append(flat_parameters(train(*hooks, num_steps=12, build=build).model))
    assert torch.equal(*kept)


def test_a_second_batch_is_dropped_out_by_chance_that_no_step_has(monkeypatch):
    states, privatize = [], Training._privatize

    def spied(training, *rest):
        states.append(torch.get_rng_state().numpy().tobytes())
        return privatize(training, *rest)

    monkeypatch.setattr(Training, "_privatize", spied)
    layers = nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 10)
    train(paper(dpaudit.Mislabelled()), num_steps=6, build=lambda: nn.Sequential(*layers))
    assert len(set(states)) == len(states) == 12


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", [one_run, paper])
@pytest.mark.parametrize("every", [None, 4])
def test_an_interrupted_audit_goes_on_with_the_same_canaries_and_scores(mode, every):
    def made():
        audit = mode(dpaudit.Crafted(num_steps=2, every=every))
        return audit, make(audit, num_steps=14)

    for stop_at in (0, 5, 8):
        (whole, straight), (_, stopped), (second, resumed) = made(), made(), made()
        finished(straight)
        for _ in range(stop_at):
            stopped.step()
        resumed.load_state_dict(stopped.state_dict())
        finished(resumed)
        for name in ("scores", "present"):
            np.testing.assert_array_equal(
                second.recorder.state_dict()[name], whole.recorder.state_dict()[name]
            )


def test_canaries_are_crafted_anew_every_so_many_steps_and_others_stay():
    seen = {}
    for name, canary in (("anew", dpaudit.Crafted(num_steps=2, every=3)), ("once", QUICK)):
        audit = one_run(canary)
        seen[name] = []
        training = make(audit, num_steps=7)
        for _ in training.run():
            seen[name].append(audit._inserter._canaries.current.inputs)
    changes = [not torch.equal(*pair) for pair in zip(seen["anew"], seen["anew"][1:], strict=False)]
    assert changes == [False, False, True, False, False, True]
    assert all(torch.equal(one, seen["once"][0]) for one in seen["once"])


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", [one_run, paper])
def test_only_the_first_steps_are_looked_at_and_the_claim_stays_that_of_all(mode):
    audit, whole = mode(first_steps=7), mode()
    train(audit, num_steps=50)
    train(whole, num_steps=50)
    assert audit.recorder.num_done == audit.recorder.num_steps == 7
    assert audit.recorder.claim.summary == whole.recorder.claim.summary
    np.testing.assert_array_equal(
        audit.recorder.state_dict()["scores"], whole.recorder.state_dict()["scores"][:7]
    )
    assert audit.recorder.audit().verdict is not VIOLATION


def test_gradient_canaries_can_be_kept_to_the_first_steps_too():
    audit = OneRun(delta=DELTA, num_canaries=8, seed=0, first_steps=5)
    train(audit, num_steps=9)
    assert audit.recorder.num_done == 5


class Constant(nn.Module):
    """Outputs that do not depend on the input nor, as soon as its weight is zero, on the weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, inputs):
        return (self.weight**2).sum() * torch.ones(len(inputs), 10)


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", [one_run, paper])
def test_a_gradient_of_no_length_gives_a_finite_score_and_no_violation(mode):
    for canary in (dpaudit.Blank(), QUICK):
        audit = mode(canary)
        train(audit, num_steps=50, build=Constant)
        scores = audit.recorder.state_dict()["scores"]
        assert np.isfinite(scores).all()
        assert audit.recorder.audit().verdict is not VIOLATION


def test_augmented_canaries_are_scored_by_the_mean_gradient_of_their_augmentations():
    data, held = hold_out(random_images(120, shape=(1, 8, 8)), 40)
    audit = OneRun(delta=DELTA, canary=dpaudit.Mislabelled(), held_out=held, num_canaries=6, seed=0)
    options = {"multiplicity": 3, "augmentation": FlipAndCrop(padding=2)}
    train(audit, data=data, num_steps=10, fault=broken.Noiseless, **options)
    seen = audit.recorder.observations
    np.testing.assert_allclose(seen.with_canary, 1.0, atol=0.02)
    np.testing.assert_allclose(seen.without_canary, 0.0, atol=0.02)


def test_a_canary_drawn_with_a_rate_is_in_so_many_second_batches():
    audit = paper(dpaudit.Mislabelled(), canary_rate=0.25, residual=True)
    train(audit, num_steps=200)
    assert audit.recorder.audit().bound.tradeoff == dpaudit.SubsampledGaussian(0.25, 1)
    scores = audit.recorder.observations.with_canary
    assert scores.mean() == pytest.approx(0.25, abs=room(scores.std() / np.sqrt(200)))


def test_an_audit_with_held_out_examples_crafts_by_default_and_tells_how_far_it_is():
    told = []
    audit = OneRun(delta=DELTA, held_out=HELD, seed=0, notify=lambda *steps: told.append(steps))
    assert audit.canary == dpaudit.Crafted()
    train(audit, num_steps=1)
    assert audit.num_canaries == 16
    assert told == [(step, 50) for step in range(1, 51)]


@pytest.mark.parametrize(
    ("make_audit", "sentence"),
    [
        (
            lambda: OneRun(delta=DELTA, canary=QUICK),
            r"needs held_out=..., the examples that hold_out\(\) splits",
        ),
        (lambda: OneRun(delta=DELTA, canary=QUICK, held_out=REST), "got Dataset"),
        (
            lambda: OneRun(delta=DELTA, canary=dpaudit.Dirac(), held_out=HELD),
            r"Dirac\(.* is not made from examples",
        ),
        (
            lambda: EndToEnd(delta=DELTA, canary=QUICK, held_out=HELD),
            r"canary must be a gradient canary such as Dirac\(\) with EndToEnd",
        ),
        (lambda: one_run(first_steps=0), "first_steps must be at least 1, got 0"),
        (lambda: paper(num_canaries=2), "num_canaries must be 1 with TwoBatches, got 2"),
        (
            lambda: make(one_run(first_steps=61)),
            "first_steps must be at most 60, the number of training steps, got 61",
        ),
    ],
)
def test_an_audit_that_cannot_be_gets_a_sentence(make_audit, sentence):
    with pytest.raises(dpaudit.InputError, match=sentence):
        make_audit()


@pytest.mark.parametrize("mode", [one_run, paper])
def test_held_out_examples_that_the_training_sees_are_refused(mode):
    with pytest.raises(
        dpaudit.InputError, match="held_out and the training data must be disjoint, but 297 of 297 held-out"
    ):
        make(mode(), data=digits())
    held = hold_out(digits(), 10)[1]
    with pytest.raises(dpaudit.InputError, match="held_out and the training data must be disjoint"):
        make(mode(held_out=held), data=digits().split(1700)[0])


@pytest.mark.parametrize(
    ("shape", "num_classes", "reason"),
    [((30,), 10, "shape .30,. with 10 classes raise RuntimeError"), ((1, 8, 8), 12, "12 classes raise")],
)
def test_held_out_examples_that_the_model_does_not_take_are_told_before_the_training(
    shape, num_classes, reason
):
    others = Dataset(torch.rand(50, *shape), torch.arange(50) % num_classes, num_classes)
    with pytest.raises(dpaudit.InputError, match=f"do not accept the held-out examples: .*{reason}"):
        make(one_run(held_out=hold_out(others, 20)[1]))


def test_batch_norm_is_refused_before_anything_is_crafted():
    def build():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))

    with pytest.raises(
        dpaudit.InputError,
        match=r"The model mixes the examples of a batch: 2 is a BatchNorm1d\. Use GroupNorm",
    ):
        make(one_run(), build=build)
