"""Examples as canaries in trainings of JAX Privacy: scores, verdicts and weights are right."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax_runs import DELTA, FAULTS, INPUTS, RATE, TARGETS, loss, private, train, whole
from score_noise import MOST, off, statistics
from statistical_limits import most_flagged

import dpaudit
from dpaudit.observers.jax_privacy import Given, hold_out, observe
from dpaudit.observers.jax_privacy._input_observer import InputInsertion, first_examples

VIOLATION = dpaudit.Verdict.VIOLATION
NOISE, STEPS = 0.8563, 300  # of every claim here: its curve is found once
QUICK = dpaudit.Crafted(num_steps=5)
RNG = np.random.default_rng(7)
OTHERS = RNG.standard_normal((120, 12)).astype(np.float32)
CLASSES = (OTHERS[:, 0] > 0).astype(np.int32)
HELD = hold_out(OTHERS, CLASSES, 60, num_classes=10)[1]
GIVEN = Given(HELD.inputs[:8], (HELD.targets[:8] + 3) % 10)
PGD = dpaudit.Adversarial(num_steps=5)
KINDS = [dpaudit.Blank(), dpaudit.Mislabelled(), PGD, QUICK, GIVEN]
MOSTLY_LONG = [kind if kind is QUICK else pytest.param(kind, marks=pytest.mark.long) for kind in KINDS]

# what JAX Privacy 2.0.0 says of itself with a newer optax
pytestmark = pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")


def named(canary):
    return type(canary).__name__


def inputs(canary=QUICK, **more):
    data = {} if isinstance(canary, Given) else {"held_out": HELD, "num_canaries": 8}
    return {"canary": canary, **data, **more}


slow_gradient = jax.jit(jax.grad(loss))


class Slow:
    """Scores by the most obvious route: one gradient for each canary, clipped by hand."""

    def __init__(self, monkeypatch, max_grad_norm=1.0, divisor=10.0):
        self.scores, self.norm, self.divisor = [], max_grad_norm, divisor
        note = InputInsertion._note_inputs

        def noted(insertion, made, *rest):
            self.made = np.asarray(made), insertion._examples[1]
            self.present = np.array(insertion._callbacks._present)
            return note(insertion, made, *rest)

        monkeypatch.setattr(InputInsertion, "_note_inputs", noted)

    def of(self, params, batch_sum, released):
        """The scores of a step, from the weights before it and from what it released."""
        clipped = []
        for one, target in zip(*self.made, strict=True):
            gradient = slow_gradient(params, (one[None], np.asarray(target)[None]))
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


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("canary", "options"),
    [
        *((canary, {}) for canary in (PGD, QUICK)),
        (GIVEN, {"microbatch_size": 4, "rescale_to_unit_norm": True}),
    ],
    ids=["Adversarial", "Crafted", "microbatches"],
)
def test_scores_are_those_of_a_slow_computation(monkeypatch, canary, options):
    slow, seen = Slow(monkeypatch), {}
    grad_fn, privatizer = private(noise_multiplier=0.7, **options)

    def update(updates, state, params=None):
        noisy, state = privatizer.update(updates, state, params)
        seen.setdefault("released", noisy)  # the first of two calls has the canaries
        return noisy, state

    spied = optax.GradientTransformation(privatizer.init, update)
    observed = observe(grad_fn, spied, noise_multiplier=0.7, sample_rate=RATE, seed=0, **inputs(canary))
    params = {"weight": jnp.asarray(RNG.standard_normal((12, 10)) / 3, jnp.float32), "bias": jnp.zeros(10)}
    state = observed.privatizer.init(params)
    joined_sum, plain_sum = jax.jit(observed.grad_fn), jax.jit(grad_fn)
    for number in range(3):
        batch = INPUTS[8 * number : 8 * number + 8], TARGETS[8 * number : 8 * number + 8]
        joined = joined_sum(params, batch)
        noisy, state = observed.privatizer.update(joined, state)
        slow.of(params, vector(plain_sum(params, batch)), vector(seen.pop("released")))
        params = optax.apply_updates(params, optax.tree.scale(-0.5, noisy))
    found = observed.recorder.state_dict()["scores"]
    np.testing.assert_allclose(found, slow.scores, rtol=5e-3, atol=5e-3)


@pytest.fixture(scope="module")
def plain():
    return train(12, observed=False)


@pytest.mark.few(1)
@pytest.mark.parametrize("canary", [GIVEN, dpaudit.Crafted(num_steps=3, every=5, long=True)], ids=named)
def test_weights_are_those_without_an_observer(plain, canary):
    observed = train(12, observer=inputs(canary))
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4),
        observed.params,
        plain.params,
    )


def looked_along(monkeypatch):
    """Keeps what is looked along in every step: directions of length 1, and lengths in clipping norms."""
    directions, lengths, original = [], [], InputInsertion._note_inputs

    def noted(insertion, *given):
        seen = given[-1]
        directions.append(np.array(seen.directions))
        lengths.append(np.array(seen.lengths, np.float64) / insertion._callbacks.norm)
        return original(insertion, *given)

    monkeypatch.setattr(InputInsertion, "_note_inputs", noted)
    return {"directions": directions, "lengths": lengths}


def noise_of(canary, looked, num_steps, **options):
    state = train(num_steps, observer=inputs(canary), noise_multiplier=0.7, **options).recorder.state_dict()
    kept = {name: state[name] for name in ("scores", "present")}
    return statistics(**kept, **looked, noise_multiplier=0.7)


@pytest.mark.parametrize("canary", MOSTLY_LONG, ids=named)
def test_scores_are_presence_and_noise_of_the_canarys_length(monkeypatch, canary):
    assert off(noise_of(canary, looked_along(monkeypatch), 100)) == {}


def test_scores_of_less_noise_than_claimed_are_told_apart(monkeypatch):
    FAULTS["noise times 0.8"](monkeypatch)
    assert noise_of(dpaudit.Mislabelled(), looked_along(monkeypatch), 200)["spread"] < -MOST


@pytest.mark.long
@pytest.mark.parametrize("canary", KINDS, ids=named)
def test_correct_training_is_flagged_in_at_most_5_percent_of_40_seeds(canary):
    """All of them compiled once, each with noise of its own."""
    terms = {"noise_multiplier": 0.8, "sample_rate": RATE, "num_steps": 60, "delta": DELTA}
    *made, recorder = observe(*private(noise_multiplier=0.8), seed=0, **terms, **inputs(canary))
    run = whole(*made, num_steps=60)
    for seed in range(40):
        run(seed)
    state, flagged = recorder.state_dict(), 0
    for part in range(40):
        of_one = dpaudit.Recorder(claim=dpaudit.Claim.dpsgd(**terms), num_steps=60)
        rows = slice(60 * part, 60 * (part + 1))
        of_one.load_state_dict(state | {name: state[name][rows] for name in ("scores", "present")})
        flagged += of_one.audit().verdict is VIOLATION
    assert len(state["scores"]) == 60 * 40
    assert flagged <= most_flagged(40)


def test_a_score_is_one_where_the_canary_is_and_zero_where_it_is_not(monkeypatch):
    looked = looked_along(monkeypatch)
    assert off(noise_of(dpaudit.Mislabelled(), looked, 150, l2_clip_norm=0.5)) == {}
    # a mislabelled canary has a gradient longer than the clipping norm
    np.testing.assert_allclose(looked["lengths"], 1.0, rtol=1e-5)


def test_scores_of_a_step_are_not_counted_as_independent():
    observer = inputs(dpaudit.Blank(), num_steps=STEPS)
    recorder = train(20, observer=observer, noise_multiplier=NOISE).recorder
    with pytest.raises(dpaudit.InputError, match=r"inference must be Betting\(\)"):
        recorder.audit(inference=dpaudit.JointExact())
    assert "Betting" in recorder.audit().bound.method


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", ["no clipping", "noise times 0.8"])
def test_broken_training_is_caught_with_a_crafted_canary(fault, monkeypatch):
    FAULTS[fault](monkeypatch)
    canary = dpaudit.Crafted(long=True, num_steps=10)
    observer = inputs(canary, num_canaries=32, num_steps=STEPS)
    num_steps = 60 if fault == "no clipping" else 250
    recorder = train(num_steps, observer=observer, noise_multiplier=NOISE, l2_clip_norm=0.5).recorder
    assert recorder.audit().verdict is VIOLATION
    if fault == "no clipping":
        assert recorder.observations.with_canary.mean() > 1.5


@pytest.mark.few(1)
@pytest.mark.parametrize("canary", [PGD, QUICK], ids=named)
def test_binary_canaries_stay_binary_in_a_compiled_training(canary, monkeypatch):
    slow = Slow(monkeypatch)
    table = (OTHERS > 0).astype(np.float32)
    held = hold_out(table, CLASSES, 60, num_classes=10)[1]
    train(3, observer=inputs(canary, held_out=held))
    made, classes = slow.made
    assert set(made.ravel()) == {0.0, 1.0}
    chosen = [row for row, one in zip(held.inputs, held.targets, strict=True) if one in classes]
    assert not all(any((one == row).all() for row in chosen) for one in made)  # some were moved


def test_an_adversarial_canary_climbs_the_loss_that_the_library_has(monkeypatch):
    slow, canary = Slow(monkeypatch), dpaudit.Adversarial(num_steps=10, step_size=0.02, radius=0.1)
    params = {"weight": jnp.asarray(RNG.standard_normal((12, 10)) / 3, jnp.float32), "bias": jnp.zeros(10)}
    observed = observe(*private(has_aux=True, fun=lambda *args: (loss(*args), 0)), seed=0, **inputs(canary))
    jax.block_until_ready(jax.jit(observed.grad_fn)(params, (INPUTS[:8], TARGETS[:8])))
    before = first_examples(canary, HELD, 8, dpaudit.canaries.CanaryCoins(8, 0).rng(0, 4))
    worse = [float(loss(params, examples)) for examples in (before, slow.made)]
    assert worse[1] > 1.2 * worse[0]
    reach = 0.1 * (HELD.inputs.max(axis=0) - HELD.inputs.min(axis=0))
    assert (np.abs(slow.made[0] - before[0]) <= reach * 1.001).all()


def test_classes_that_the_model_has_not_are_told_at_the_first_step():
    """With optax's usual loss it is not a number; with one-hot classes the gradient is 0."""
    held = hold_out(OTHERS, CLASSES, 60, num_classes=40)[1]
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"NaN loss for classes \[1\d.*num_classes of hold_out"
    ):
        train(2, observer=inputs(dpaudit.Mislabelled(), held_out=held))

    def one_hot(params, batch):
        logits = batch[0] @ params["weight"] + params["bias"]
        return optax.softmax_cross_entropy(logits, jax.nn.one_hot(batch[1], 10)).mean()

    with pytest.warns(UserWarning, match="have zero gradients and reveal nothing"):
        train(2, observer=inputs(dpaudit.Mislabelled(), held_out=held), fun=one_hot)


def test_gradients_that_are_added_up_have_canaries_once():
    grad_fn, privatizer = private(noise_multiplier=0.01)
    observed = observe(grad_fn, privatizer, noise_multiplier=0.01, sample_rate=RATE, seed=0, **inputs(GIVEN))
    params = {"weight": jnp.zeros((12, 10)), "bias": jnp.zeros(10)}
    state = observed.privatizer.init(params)
    halves = [(INPUTS[:8], TARGETS[:8]), (INPUTS[8:16], TARGETS[8:16])]
    both = jax.tree.map(jnp.add, *(observed.grad_fn(params, half) for half in halves))
    observed.privatizer.update(both, state)
    found = observed.recorder.state_dict()
    np.testing.assert_allclose(found["scores"], found["present"], atol=0.1)


def test_what_cannot_be_is_refused_in_a_sentence():
    def refused(match, **options):
        with pytest.raises(dpaudit.InputError, match=match):
            observe(*private(), **({"canary": QUICK, "held_out": HELD} | options))

    refused("needs held_out", held_out=None)
    refused("got tuple", held_out=(OTHERS, CLASSES))
    refused(
        r"canary must be Blank\(\), Mislabelled\(\), Adversarial\(\), Crafted\(\) or",
        canary=dpaudit.canaries.InputCanary(),
    )
    whole_numbers = hold_out((100 * OTHERS).astype(np.int32), CLASSES, 20)[1]
    refused("Adversarial.* floating-point inputs", canary=PGD, held_out=whole_numbers)
    refused("is not made from examples", canary=dpaudit.Dirac())
    refused("contains its own examples", canary=GIVEN)
    refused("must be 8, the number of given examples", canary=GIVEN, held_out=None, num_canaries=3)
    with pytest.raises(dpaudit.InputError, match="Inputs must have one class each"):
        Given(OTHERS, CLASSES[:3])


def test_batches_that_are_not_like_the_canaries_are_refused():
    other = Given(np.zeros((3, 5), np.float32), np.zeros(3, np.int32))
    observed = observe(*private(), canary=other, sample_rate=RATE)
    with pytest.raises(dpaudit.InputError, match="Batches must be inputs of shape"):
        observed.grad_fn({"weight": jnp.zeros((12, 10)), "bias": jnp.zeros(10)}, (INPUTS[:8], TARGETS[:8]))


def test_hold_out_splits_arrays_and_leaves_duplicates_out():
    twice = np.repeat(np.arange(20.0), 2)[:, None]
    (kept, classes), held = hold_out(twice, np.arange(40) % 3, 20, seed=1)
    assert len(kept) == len(classes) == 20
    assert set(kept.ravel()).isdisjoint(held.inputs.ravel())
    assert 0 < len(held) < 20
    assert held.num_classes == 3
    with pytest.raises(dpaudit.InputError, match="split off by hold_out"):
        type(held)(held.inputs, held.targets, 3)
