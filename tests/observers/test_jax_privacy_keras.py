"""The observer of JAX Privacy's Keras API: fit() is audited, and trains as if it were not."""

import os
from contextlib import nullcontext

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is loaded

import jax_privacy
import keras
import numpy as np
import pytest
from jax_privacy import keras_api
from jax_runs import DELTA, FAULTS, INPUTS, NUM_EXAMPLES, TARGETS
from jax_runs import private as private_functions
from score_noise import require_normal

import dpaudit
from dpaudit.observers.jax_privacy import observe, observe_model

VIOLATION = dpaudit.Verdict.VIOLATION
EPOCH = 20  # steps

pytestmark = [
    # what JAX Privacy 2.0.0 says of itself with a newer optax, and Keras with a newer numpy
    pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]


def private(*, noise_multiplier=0.8563, gradient_accumulation_steps=1, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(10)])
    config = keras_api.DPKerasConfig(
        epsilon=100.0,  # only an upper limit, if the noise is given
        delta=DELTA,
        clipping_norm=1.0,
        batch_size=10,
        gradient_accumulation_steps=gradient_accumulation_steps,
        train_steps=1000,
        train_size=NUM_EXAMPLES,
        noise_multiplier=noise_multiplier,
        seed=0,
        **options,
    )
    model = keras_api.make_private(model, config)
    accumulated = gradient_accumulation_steps if gradient_accumulation_steps > 1 else None
    model.compile(
        optimizer=keras.optimizers.SGD(0.5, gradient_accumulation_steps=accumulated),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def fit(model, num_steps):
    epochs = num_steps // EPOCH
    return model.fit(INPUTS, TARGETS, batch_size=10, epochs=epochs, verbose=0).history["loss"]


def same_weights(num_steps, **options):
    plain = private(**options)
    expected = fit(plain, num_steps)
    model = private(**options)
    with observe_model(model, seed=0) as recorder:
        found = fit(model, num_steps)
    assert found == pytest.approx(expected, rel=1e-4)
    for one, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    return recorder


def test_correct_training_is_tight_and_unchanged():
    recorder = same_weights(300)
    result = recorder.audit()
    expected = "DP-SGD, noise multiplier 0.8563, sample rate 0.05, 300 steps"
    assert result.claim.summary.startswith(expected)
    assert result.claim.epsilon == pytest.approx(8.0, rel=0.01)
    assert 0.85 * result.claim.epsilon < result.bound.epsilon < result.claim.epsilon
    gap = "which examples are in a batch (the claim assumes Poisson sampling, but fit() uses the given"
    assert any(text.startswith(gap) for text in result.not_covered)
    assert not any(
        text.startswith("how batches are drawn") for text in result.not_covered
    )  # sizes are tested


def test_a_whole_claim_takes_the_place_of_what_is_read():
    claim = dpaudit.Claim.dpsgd(noise_multiplier=2.0, sample_rate=0.1, num_steps=50, delta=1e-6)
    with observe_model(private(), claim=claim) as recorder:
        assert recorder.claim.summary == claim.summary
    assert observe(*private_functions(), claim=claim).recorder.claim.summary == claim.summary
    with pytest.raises(dpaudit.InputError, match="or delta="):
        observe(*private_functions(), claim=claim, delta=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_broken_training_is_a_violation_within_300_steps(fault, monkeypatch):
    FAULTS[fault](monkeypatch)
    model = private()
    with observe_model(model, num_steps=300, seed=0) as recorder:
        fit(model, 300 if fault == "noise times 0.8" else 60)
    assert recorder.audit().verdict is VIOLATION


@pytest.mark.long
def test_noise_that_is_spread_over_several_batches_counts_as_a_whole():
    options = {"gradient_accumulation_steps": 2, "poisson_sampling_in_fit": True, "noise_multiplier": 0.5}
    recorder = same_weights(120, **options)
    seen = recorder.observations
    assert recorder.num_done == 60
    require_normal(seen, noise=0.5)
    assert "noise multiplier 0.5, sample rate 0.1, 60 steps" in recorder.claim.summary
    gaps = recorder.audit().not_covered
    assert any("(poisson_sampling_in_fit=True is set)" in text for text in gaps)


def frozen(model):
    model.layers[-1].bias.trainable = False
    model.compile(optimizer=keras.optimizers.SGD(0.5), loss=model.loss)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (frozen, "Gradients must have 130 entries in every step, in the same 2 arrays, got 120 in 1"),
        (None, "ZeroDivisionError in dpaudit"),
    ],
)
def test_what_goes_wrong_ends_the_audit_and_the_training_goes_on(monkeypatch, change, reason):
    weights = []
    for is_observed in (False, True):
        model = private()
        session = observe_model(model, seed=0)
        recorder = session.start() if is_observed else None
        fit(model, EPOCH)
        if change is not None:
            change(model)
        elif is_observed:
            monkeypatch.setattr(dpaudit.Recorder, "record", lambda *_, **__: 1 / 0)
        with pytest.warns(match="The audit ends") if is_observed else nullcontext():
            fit(model, EPOCH)
            session.stop()
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    gap = f"steps from step {EPOCH} on are not audited: {reason}"
    assert recorder.audit().not_covered[0].startswith(gap)


def test_a_callback_may_end_a_training_that_leaks_and_all_is_as_before(monkeypatch):
    class FoundError(Exception):
        pass

    def stop(live):
        if live.is_violation:
            raise FoundError

    FAULTS["no noise"](monkeypatch)
    model = private()
    train_step = model.train_step
    with pytest.raises(FoundError), observe_model(model, num_steps=300, callbacks=[stop]) as recorder:
        fit(model, 300)
    assert recorder.num_done < 300
    assert model.train_step == train_step


def test_the_library_is_not_changed_while_the_step_of_a_model_is_compiled():
    functions = [(jax_privacy, "clipped_grad"), (jax_privacy.noise_addition, "gaussian_privatizer")]
    before, seen, model = [getattr(*function) for function in functions], [], private()

    def loss(targets, logits):
        seen.append([getattr(*function) for function in functions])
        return keras.losses.sparse_categorical_crossentropy(targets, logits, from_logits=True)

    model.compile(optimizer=keras.optimizers.SGD(0.5), loss=loss)
    with observe_model(model, seed=0) as recorder:
        fit(model, EPOCH)
    assert recorder.num_done == EPOCH
    assert seen
    assert all(during == before for during in seen)


def test_a_model_that_is_not_private_or_has_a_step_of_its_own_is_refused():
    plain, model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(10)]), private()
    with pytest.raises(dpaudit.InputError, match="A Sequential is not private"):
        observe_model(plain).__enter__()
    model.train_step = lambda *args, step=model.train_step: step(*args)
    with pytest.raises(
        dpaudit.InputError, match=r"train_step is not the one that keras_api\.make_private gave"
    ):
        observe_model(model).__enter__()


def test_a_model_that_is_observed_already_is_refused():
    model = private()
    with (
        observe_model(model),
        pytest.raises(dpaudit.InputError, match="This model is already observed"),
        observe_model(model),
    ):
        pass
    with observe_model(model) as recorder:  # once more is not twice at once
        pass
    assert recorder.num_done == 0


def test_a_phase_whose_key_is_that_of_an_earlier_phase_is_found():
    model, found = private(noise_multiplier=1.0), []
    key = np.asarray(model.non_trainable_variables[0])
    for is_reset in (False, True, False):
        if is_reset:
            model.non_trainable_variables[0].assign(key)
        with observe_model(model, seed=0) as recorder:
            fit(model, EPOCH)
        found.append("earlier-noise" in {finding.name for finding in recorder.diagnose().findings})
    assert found == [False, True, False]
