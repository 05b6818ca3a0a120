"""Examples as canaries in trainings of Opacus: scores, verdicts and weights are right."""

import numpy as np
import pytest
import torch
from opacus.grad_sample import GradSampleHooksFastGradientClipping
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus_runs import (
    DELTA,
    OTHER_KINDS,
    run,
    small_data,
    small_model,
    weights,
    with_less_noise,
    without_clipping,
)
from score_noise import MOST, off, statistics
from statistical_limits import LEVEL, most_flagged
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpaudit
from dpaudit._torch._crafting import Examples
from dpaudit.observers.opacus import _input_canaries, hold_out, observe
from dpaudit.observers.opacus._clipping import flat, summed
from dpaudit.observers.opacus._observer import OpacusObserver

VIOLATION = dpaudit.Verdict.VIOLATION
PLANNED = {
    "num_steps": 250
}  # of every claim here, also where fewer steps are enough: its curve is found once
QUICK = dpaudit.Crafted(num_steps=5)
KINDS = [dpaudit.Blank(), dpaudit.Mislabelled(), dpaudit.Adversarial(num_steps=5), QUICK]
MOSTLY_LONG = [kind if kind is QUICK else pytest.param(kind, marks=pytest.mark.long) for kind in KINDS]


@pytest.fixture
def held():
    torch.manual_seed(99)
    return hold_out(small_data(300), 60)[1]


def examples(made, held):
    return {"canary": QUICK, "held_out": held, "module": made.model, "loader": made.loader}


@pytest.fixture
def audited(private, held):
    """Train with examples as canaries, or with no observer; what was made, its recorder and its weights."""

    def go(canary=QUICK, *, observed=True, num_steps=60, seed=0, observer=None, **options):
        made = private(num_steps=num_steps, seed=seed, **({"noise_multiplier": 0.7} | options))
        usual = {"canary": canary, "held_out": held, "module": made.model, "loader": made.loader}
        usual |= {"num_canaries": 8, "num_steps": num_steps, "delta": DELTA, "criterion": made.criterion}
        usual |= {"seed": seed} | (observer or {})
        if observed:
            with observe(made.optimizer, **usual) as made.recorder:
                run(made, num_steps)
        else:
            run(made, num_steps)
        made.weights = weights(made.model)
        return made

    return go


class Slow:
    """Scores by the most obvious route: a backward pass for each canary, by a copy of the model."""

    def __init__(self, monkeypatch, build):
        self.build, self.scores = build, []
        original_add, original_update = (
            _input_canaries.InputCanaries.added,
            OpacusObserver._before_update,
        )

        def added(canaries, index, members, *rest, **options):
            result = original_add(canaries, index, members, *rest, **options)
            self._note(canaries, index, members)
            return result

        def update(observer, *rest):
            self._score(observer)
            return original_update(observer, *rest)

        monkeypatch.setattr(_input_canaries.InputCanaries, "added", added)
        monkeypatch.setattr(OpacusObserver, "_before_update", update)

    @torch.enable_grad()
    def _note(self, canaries, index, numbers):
        optimizer, made = canaries._optimizer, canaries._canaries.at(index, canaries._craft)
        copy = self.build()
        with torch.no_grad():
            for new, old in zip(copy.parameters(), optimizer.params, strict=True):
                new.copy_(old)
        norms = getattr(optimizer, "max_grad_norms", None)
        self._clipped = []
        for one, target in zip(made.inputs, made.targets, strict=True):
            loss = nn.functional.cross_entropy(copy(one[None]), target[None])
            parts = torch.autograd.grad(loss, list(copy.parameters()))
            whole = torch.cat([part.reshape(-1) for part in parts]).norm()
            limits = [optimizer.max_grad_norm / float(whole)] * len(parts)
            if norms is not None:
                limits = [norm / float(part.norm()) for norm, part in zip(norms, parts, strict=True)]
            shorter = [min(1.0, limit) * part.reshape(-1) for limit, part in zip(limits, parts, strict=True)]
            self._clipped.append(torch.cat(shorter))
        self._present = set(numbers.tolist())

    @torch.no_grad()
    def _score(self, observer):
        optimizer = observer._optimizer
        released = torch.cat([value.grad.reshape(-1) for value in optimizer.params]) * observer._divisor()
        batch = observer._step.before
        found = []
        for number, own in enumerate(self._clipped):
            others = [vector for other, vector in enumerate(self._clipped) if other != number]
            there = [other in self._present for other in range(len(self._clipped)) if other != number]
            known = batch + sum(vector for vector, ok in zip(others, there, strict=True) if ok)
            found.append(float(own @ (released - known) / own.square().sum()))
        self.scores.append(found)


def scores(made):
    return made.recorder.state_dict()["scores"]


@pytest.mark.parametrize("canary", KINDS, ids=lambda canary: type(canary).__name__)
def test_scores_are_those_of_a_slow_computation(audited, monkeypatch, canary):
    slow = Slow(monkeypatch, small_model)
    made = audited(canary, num_steps=10)
    np.testing.assert_allclose(scores(made), slow.scores, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("kind", ["functorch", "ew", "ghost", "per-layer clipping"])
def test_scores_are_those_of_a_slow_computation_in_every_mode(audited, monkeypatch, kind):
    slow = Slow(monkeypatch, small_model)
    made = audited(dpaudit.Mislabelled(), num_steps=10, **OTHER_KINDS[kind])
    np.testing.assert_allclose(scores(made), slow.scores, rtol=5e-3, atol=5e-3)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", [None, *(kind for kind in OTHER_KINDS if kind != "adaptive clipping")])
def test_weights_are_those_without_an_observer(audited, kind):
    options = {"canary": dpaudit.Crafted(num_steps=3, every=10), "num_steps": 30, **OTHER_KINDS.get(kind, {})}
    observed, plain = (audited(observed=is_observed, **options) for is_observed in (True, False))
    torch.testing.assert_close(observed.weights, plain.weights, rtol=1e-4, atol=1e-5)


def projections(monkeypatch):
    """Keep what scores are projected on in every step: unit directions, and lengths in clipping norms."""
    directions, lengths, original = [], [], _input_canaries.InputCanaries.added

    def added(*args, **options):
        projection, after = original(*args, **options)
        columns = [projection.project(unit) for unit in torch.eye(len(projection.index))]
        directions.append(nn.functional.normalize(torch.stack(columns, dim=1).double()).numpy())
        lengths.append(projection.lengths)
        return projection, after

    monkeypatch.setattr(_input_canaries.InputCanaries, "added", added)
    return {"directions": directions, "lengths": lengths}


def noise_of(made, projected):
    state = made.recorder.state_dict()
    kept = {name: state[name] for name in ("scores", "present")}
    return statistics(**kept, **projected, noise_multiplier=0.7)


@pytest.mark.parametrize("canary", MOSTLY_LONG, ids=lambda canary: type(canary).__name__)
def test_scores_are_presence_and_noise_of_the_canarys_length(audited, monkeypatch, canary):
    projected = projections(monkeypatch)
    assert off(noise_of(audited(canary, num_steps=100), projected)) == {}


def test_a_score_is_one_where_the_canary_is_and_zero_where_it_is_not(audited, monkeypatch):
    projected = projections(monkeypatch)
    made = audited(dpaudit.Mislabelled(), num_steps=150, observer={"num_canaries": 16}, max_grad_norm=0.3)
    assert off(noise_of(made, projected)) == {}
    # a mislabelled canary has a gradient longer than the clipping norm
    np.testing.assert_allclose(projected["lengths"], 1.0, rtol=1e-5)


def test_scores_of_less_noise_than_claimed_are_told_apart(audited, monkeypatch):
    monkeypatch.setattr(DPOptimizer, "add_noise", with_less_noise)
    projected = projections(monkeypatch)
    assert noise_of(audited(dpaudit.Mislabelled(), num_steps=200), projected)["spread"] < -MOST


@pytest.mark.long
@pytest.mark.parametrize("canary", KINDS, ids=lambda canary: type(canary).__name__)
def test_correct_training_is_flagged_in_at_most_5_percent_of_40_seeds(audited, canary):
    options = {"num_steps": 40, "max_grad_norm": 0.3}
    found = [audited(canary, seed=seed, **options).recorder.audit() for seed in range(40)]
    assert sum(result.verdict is VIOLATION for result in found) <= most_flagged(40)


def test_scores_of_a_step_are_not_counted_as_independent(audited):
    made = audited(dpaudit.Blank(), num_steps=20, observer=PLANNED)
    with pytest.raises(dpaudit.InputError, match=r"inference must be Betting\(\)"):
        made.recorder.audit(inference=dpaudit.JointExact())
    assert "Betting" in made.recorder.audit().bound.method


@pytest.mark.long
def test_too_little_noise_is_caught_with_a_crafted_canary(audited, monkeypatch):
    monkeypatch.setattr(DPOptimizer, "add_noise", with_less_noise)
    options = {"max_grad_norm": 0.3, "observer": {"num_canaries": 32} | PLANNED}
    made = audited(dpaudit.Crafted(long=True, num_steps=20), num_steps=250, **options)
    assert made.recorder.audit().verdict is VIOLATION


def test_a_missing_clip_is_caught_with_a_crafted_canary(audited, monkeypatch):
    monkeypatch.setattr(DPOptimizer, "clip_and_accumulate", without_clipping)
    made = audited(dpaudit.Crafted(), num_steps=60, max_grad_norm=0.1, observer=PLANNED)
    assert made.recorder.observations.with_canary.mean() > 2
    assert made.recorder.audit().verdict is VIOLATION


def test_a_wrong_norm_of_ghost_clipping_is_caught_which_scores_of_gradients_do_not_show(
    audited, train, monkeypatch
):
    samplers = GradSampleHooksFastGradientClipping.NORM_SAMPLERS
    right = samplers[nn.Linear]

    def halved(*args):
        return {parameter: norms / 2 for parameter, norms in right(*args).items()}

    monkeypatch.setitem(samplers, nn.Linear, halved)
    options = {"num_steps": 60, "max_grad_norm": 0.2, "grad_sample_mode": "ghost", "noise_multiplier": 0.7}
    options["observer"] = PLANNED
    made = audited(dpaudit.Mislabelled(), **options)
    assert made.recorder.audit().verdict is VIOLATION
    assert made.recorder.not_covered == ()
    gradients = train(**options).recorder.audit(confidence=1 - LEVEL)
    assert gradients.bound.parameter < 1 / 0.7
    assert {finding.name for finding in gradients.findings} - {"sum-norm"} == {"ghost-norm"}


def test_canaries_that_do_not_depend_on_the_optimizers_clip_are_told_together(audited, monkeypatch):
    def of_the_sum(optimizer):
        """Clips the sum of the batch instead of each example."""
        rows = [optimizer._get_flat_grad_sample(value).sum(0) for value in optimizer.params]
        norm = torch.cat([row.reshape(-1) for row in rows]).norm()
        for value, row in zip(optimizer.params, rows, strict=True):
            part = row * min(1.0, optimizer.max_grad_norm / float(norm + 1e-6))
            value.summed_grad = part if value.summed_grad is None else value.summed_grad + part

    monkeypatch.setattr(DPOptimizer, "clip_and_accumulate", of_the_sum)
    with pytest.raises(dpaudit.InputError, match="Examples are not clipped separately"):
        audited(dpaudit.Mislabelled(), num_steps=5, max_grad_norm=0.3)


def test_a_logical_step_of_several_batches_has_canaries_once(private, held):
    made = private(num_steps=40, noise_multiplier=0.01, batch_size=20)
    with (
        BatchMemoryManager(
            data_loader=made.loader, max_physical_batch_size=6, optimizer=made.optimizer
        ) as part,
        observe(made.optimizer, **examples(made, held), seed=0) as recorder,
    ):
        run(made, 40, loader=part)
    seen = recorder.observations
    assert recorder.num_done == 40
    np.testing.assert_allclose(np.median(seen.with_canary), 1.0, atol=0.05)
    np.testing.assert_allclose(np.median(seen.without_canary), 0.0, atol=0.05)


def test_crafting_and_canaries_leave_chance_and_hooks_as_they_are(private, held):
    def build():
        return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.0), nn.Tanh(), nn.Linear(16, 2))

    plain = private(num_steps=20, noise_multiplier=0.7, build=build)
    run(plain, 10)
    run(plain, 10)
    made = private(num_steps=20, noise_multiplier=0.7, build=build)
    with observe(made.optimizer, **examples(made, held), seed=0):
        run(made, 10)
    run(made, 10)
    torch.testing.assert_close(weights(made.model), weights(plain.model), rtol=1e-4, atol=1e-5)


def refused(made, held, match, **options):
    usual = examples(made, held) | options
    with pytest.raises(dpaudit.InputError, match=match), observe(made.optimizer, **usual):
        pass


def attributes(made):
    """Return those of the optimizer and of the model that a pass might change."""
    found = {**vars(made.optimizer), **vars(made.model)}
    found = {name: one.tolist() if isinstance(one, torch.Tensor) else one for name, one in found.items()}
    return {
        name: one for name, one in found.items() if one is None or isinstance(one, bool | int | float | list)
    }


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_the_pass_of_the_canaries_changes_only_the_sum(private, held, mode):
    made = private(num_steps=1, seed=0, noise_multiplier=0.7, grad_sample_mode=mode)
    made.criterion(made.model(held.inputs[:4]), held.targets[:4]).backward()
    (made.optimizer.accumulate if made.ghost else made.optimizer.clip_and_accumulate)()
    names = "grad", "grad_sample", "_norm_sample"
    before = [[getattr(one, name, None) for name in names] for one in made.optimizer.params]
    counters = attributes(made)
    batch = flat(summed(made.optimizer)).clone()
    make = _input_canaries.GhostBackward if made.ghost else _input_canaries.PerSampleBackward
    canaries = Examples(held.inputs[4:8], held.targets[4:8])
    each = make(made.optimizer, made.model, made.criterion).add_to_sum(canaries)
    for one, own in zip(made.optimizer.params, before, strict=True):
        assert all(getattr(one, name, None) is value for name, value in zip(names, own, strict=True))
    assert attributes(made) == counters
    torch.testing.assert_close(flat(summed(made.optimizer)), batch + each.sum(dim=0))


def test_what_cannot_be_is_refused_in_a_sentence(private, held):
    made = private()
    refused(made, held, "needs held_out=..., the examples", held_out=None)
    refused(made, held, "got a? ?tuple", held_out=(held.inputs, held.targets))
    refused(made, held, "need module=", module=None)
    refused(made, held, "module must be the model that the optimizer trains", module=small_model())
    refused(made, held, "with sampling=True", sampling=True, loader=made.loader)
    plain = DataLoader(made.loader.dataset, batch_size=10)
    refused(made, held, "The claim assumes Poisson sampling", loader=plain)
    refused(made, held, "is not made from examples", canary=dpaudit.Dirac())
    refused(made, held, "such as Dirac", canary="crafted")
    ghost = private(grad_sample_mode="ghost")
    refused(ghost, held, "needs criterion=", criterion=nn.CrossEntropyLoss())


def test_held_out_examples_that_the_loader_draws_are_refused(private, held):
    both = TensorDataset(held.inputs, held.targets)
    made = private(num_examples=len(both), batch_size=6, data=lambda _: both)
    refused(
        made,
        held,
        "held_out and the data of loader must be disjoint, but 60 of 60 held-out",
        loader=made.loader,
    )
    other = private()
    with observe(other.optimizer, **examples(other, held)):
        run(other, 2)


def test_a_batch_of_the_training_cannot_be_held_out(private):
    made = private()
    batch = next(iter(made.loader))
    of_batch = hold_out(TensorDataset(*batch), len(batch[0]) // 2, num_classes=2)[1]
    refused(made, of_batch, f"{len(of_batch)} of {len(of_batch)} held-out examples are in both")
    refused(made, of_batch, "loader=..., the one", loader=None)


def test_hold_out_splits_a_data_set_and_leaves_duplicates_out():
    inputs = torch.arange(20.0).repeat_interleave(2)[:, None]
    rest, held = hold_out(TensorDataset(inputs, torch.arange(40) % 3), 20, seed=1)
    assert len(rest) == 20
    kept = {float(rest[place][0]) for place in range(len(rest))}
    assert kept.isdisjoint(held.inputs.view(-1).tolist())
    assert 0 < len(held) < 20
    assert held.num_classes == 3
    with pytest.raises(dpaudit.InputError, match="num_held_out must be between 1 and 39, got 40"):
        hold_out(TensorDataset(inputs, torch.arange(40)), 40)


def test_data_without_classes_have_nothing_to_hold_out():
    inputs = torch.rand(40, 3)
    with pytest.raises(dpaudit.InputError, match="The data must be pairs of an input and its class"):
        hold_out(TensorDataset(inputs), 20)
    with pytest.raises(dpaudit.InputError, match="Classes must be whole numbers"):
        hold_out(TensorDataset(inputs, inputs[:, :1]), 20)


def test_held_out_examples_that_the_model_does_not_take_are_told(private):
    others = hold_out(TensorDataset(torch.rand(60, 5), torch.arange(60) % 2), 20)[1]
    more = hold_out(TensorDataset(small_data(60).tensors[0] + 1, torch.arange(60) % 9), 20)[1]
    for held in (others, more):
        refused(private(), held, "The model and its loss do not accept the held-out examples")
