"""Examples as canaries in trainings of JAX Privacy: scores, verdicts and weights are right."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax_runs import FAULTS, INPUTS, RATE, TARGETS, loss, private, train

import dpaudit
from dpaudit.observers.jax_privacy import Given, hold_out, observe
from dpaudit.observers.jax_privacy._input_host import InputHost

VIOLATION = dpaudit.Verdict.VIOLATION
QUICK = dpaudit.Crafted(num_steps=5)
RNG = np.random.default_rng(7)
OTHERS = RNG.standard_normal((120, 12)).astype(np.float32)
CLASSES = (OTHERS[:, 0] > 0).astype(np.int32)
HELD = hold_out(OTHERS, CLASSES, 60, num_classes=10)[1]
GIVEN = Given(HELD.inputs[:8], (HELD.targets[:8] + 3) % 10)
KINDS = [dpaudit.Blank(), dpaudit.Mislabelled(), QUICK, GIVEN]

# what JAX Privacy 2.0.0 says of itself with a newer optax
pytestmark = pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")


def named(canary):
    return type(canary).__name__


def inputs(canary=QUICK, **more):
    data = {} if isinstance(canary, Given) else {"held_out": HELD, "num_canaries": 8}
    return {"canary": canary, **data, **more}


class Slow:
    """Scores by the most obvious route: one gradient for each canary, clipped by hand."""

    def __init__(self, monkeypatch, max_grad_norm=1.0, divisor=10.0):
        self.scores, self.norm, self.divisor = [], max_grad_norm, divisor
        note = InputHost._note_inputs

        def noted(host, made, *rest):
            self.made = np.asarray(made), host._examples[1]
            self.present = np.array(host._present)
            return note(host, made, *rest)

        monkeypatch.setattr(InputHost, "_note_inputs", noted)

    def of(self, params, batch_sum, released):
        """The scores of a step, from the weights before it and from what it released."""
        clipped = []
        for one, target in zip(*self.made, strict=True):
            gradient = jax.grad(loss)(params, (one[None], np.asarray(target)[None]))
            vector = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gradient)]).astype(np.float64)
            clipped.append(vector * min(1.0, self.norm / np.linalg.norm(vector)) / self.divisor)
        found = []
        for number, own in enumerate(clipped):
            there = [
                vector for other, vector in enumerate(clipped) if other != number and self.present[other]
            ]
            found.append(own @ (released - batch_sum - sum(there)) / (own @ own))
        self.scores.append(found)


def vector(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]).astype(np.float64)


@pytest.mark.parametrize("canary", KINDS, ids=named)
@pytest.mark.parametrize("microbatch_size", [None, 4])
def test_scores_are_those_of_a_slow_computation(monkeypatch, canary, microbatch_size):
    slow, seen = Slow(monkeypatch), {}
    grad_fn, privatizer = private(noise_multiplier=0.7, microbatch_size=microbatch_size)

    def update(updates, state, params=None):
        noisy, state = privatizer.update(updates, state, params)
        seen.setdefault("released", noisy)  # the first of two calls has the canaries
        return noisy, state

    spied = optax.GradientTransformation(privatizer.init, update)
    observed = observe(grad_fn, spied, noise_multiplier=0.7, sample_rate=RATE, seed=0, **inputs(canary))
    params = {"weight": jnp.asarray(RNG.standard_normal((12, 10)) / 3, jnp.float32), "bias": jnp.zeros(10)}
    state = observed.privatizer.init(params)
    for number in range(4):
        batch = INPUTS[8 * number : 8 * number + 8], TARGETS[8 * number : 8 * number + 8]
        joined = observed.grad_fn(params, batch)
        noisy, state = observed.privatizer.update(joined, state)
        slow.of(params, vector(grad_fn(params, batch)), vector(seen.pop("released")))
        params = optax.apply_updates(params, optax.tree.scale(-0.5, noisy))
    found = observed.recorder.state_dict()["scores"]
    np.testing.assert_allclose(found, slow.scores, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("canary", [*KINDS, dpaudit.Crafted(num_steps=3, every=5, long=True)], ids=named)
def test_weights_are_those_without_an_observer(canary):
    plain = train(20, observed=False)
    observed = train(20, observer=inputs(canary))
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4),
        observed.params,
        plain.params,
    )


@pytest.mark.parametrize("canary", KINDS, ids=named)
def test_correct_training_is_not_flagged(canary):
    flagged = 0
    for seed in range(3):
        recorder = train(60, noise_multiplier=0.8, seed=seed, observer=inputs(canary, seed=seed)).recorder
        flagged += recorder.audit().verdict is VIOLATION
    assert flagged <= 1


def test_a_score_is_one_where_the_canary_is_and_zero_where_it_is_not():
    options = {"noise_multiplier": 0.7, "l2_clip_norm": 0.5}
    recorder = train(150, observer=inputs(dpaudit.Mislabelled(), num_canaries=16), **options).recorder
    seen = recorder.observations
    assert seen.with_canary.mean() == pytest.approx(1.0, abs=0.1)
    assert seen.without_canary.mean() == pytest.approx(0.0, abs=0.1)
    for side in (seen.with_canary, seen.without_canary):
        assert side.std() == pytest.approx(0.7, rel=0.1)  # mislabelled: longer than the clipping norm


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_training_is_caught_with_a_crafted_canary(fault, monkeypatch):
    FAULTS[fault](monkeypatch)
    canary = dpaudit.Crafted(long=True, num_steps=10)
    options = {"noise_multiplier": 0.8, "l2_clip_norm": 0.5}
    recorder = train(250, observer=inputs(canary, num_canaries=32), **options).recorder
    assert recorder.audit().verdict is VIOLATION
    if fault == "no clipping":
        assert recorder.observations.with_canary.mean() > 1.5
