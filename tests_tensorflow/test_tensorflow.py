"""The observer of TF Privacy is tight on a correct training, sees broken ones and changes nothing."""

import os
from contextlib import nullcontext

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_privacy as tfp
from runs import DELTA, FAULTS, NOISE, OPTIMIZERS, RATE, STEPS, fit, go_on, loop, minimize, private, train
from score_noise import require_normal
from statistical_limits import LEVEL, least_caught, most_flagged
from tensorflow_privacy.privacy.optimizers import dp_optimizer_keras_sparse

import dpaudit
from dpaudit.observers.tensorflow import observe

VIOLATION, NO_VIOLATION = dpaudit.Verdict.VIOLATION, dpaudit.Verdict.NO_VIOLATION
RUNS = 40 if os.environ.get("DPAUDIT_TEST_LONG") else 10


def test_correct_training_is_not_flagged_in_95_percent_of_runs_and_tight_in_most():
    # The graph is made once, which takes longer than its steps: noise and coins of the runs are independent.
    options = {"steps_per_execution": 100}
    observer = {"canary": dpaudit.Dirac()}  # all of them, in all steps, count for the bound
    made = train(num_steps=RUNS * STEPS, observer=observer, how_options=options)
    found = made.recorder.state_dict()
    claim = dpaudit.Claim.dpsgd(noise_multiplier=NOISE, sample_rate=RATE, num_steps=STEPS, delta=DELTA)
    results = []
    for scores, present in zip(*(np.split(found[name], RUNS) for name in ("scores", "present")), strict=True):
        recorder = dpaudit.Recorder(claim=claim, num_steps=STEPS)
        for values, mask in zip(scores, present, strict=True):
            recorder.record(values, mask)
        results.append(recorder.audit())
    flagged = sum(result.verdict is VIOLATION for result in results)
    assert flagged <= most_flagged(RUNS, broken=0.9)  # with 0.9 of the noise nearly all are flagged
    assert claim.epsilon == pytest.approx(8.0, rel=0.01)
    tight = sum(result.bound.epsilon > 0.85 * claim.epsilon for result in results)
    assert tight >= least_caught(RUNS, 0.95, broken=0.1)  # with 1.1 times the noise none is


def test_correct_training_record_by_record_is_not_flagged_and_tight():
    result = train("sgd", num_steps=STEPS).recorder.audit()
    assert result.verdict is NO_VIOLATION
    assert result.bound.epsilon > 0.8 * result.claim.epsilon


@pytest.mark.parametrize("fault", FAULTS, ids=", ".join)
def test_broken_training_is_a_violation_within_300_steps(monkeypatch, fault):
    monkeypatch.setattr(*FAULTS[fault])
    result = train(fault[0], num_steps=STEPS).recorder.audit()
    assert result.verdict is VIOLATION
    with pytest.raises(dpaudit.ViolationError):
        result.raise_for_violation()


def scores_are_normal(recorder, noise=NOISE, signal=1.0):
    require_normal(recorder.observations, noise=noise, signal=signal)


def same_weights(name="vectorized sgd", **options):
    observed, plain = (train(name, observed=is_observed, **options) for is_observed in (True, False))
    np.testing.assert_allclose(observed.weights, plain.weights, rtol=1e-4, atol=1e-5)
    return observed


@pytest.mark.parametrize(
    ("name", "how"), [("sgd", fit), ("adam", loop), ("vectorized sgd", loop), ("vectorized adam", fit)]
)
def test_scores_and_weights_are_right_with_fit_and_with_a_loop(name, how):
    made = same_weights(name, how=how)
    scores_are_normal(made.recorder)
    assert made.recorder.num_done == 60


@pytest.mark.parametrize(("name", "how"), [("sgd", fit), ("vectorized sgd", loop)])
def test_the_noise_of_correct_training_is_what_it_claims(name, how):
    diagnosis = train(name, how=how).recorder.diagnose(confidence=1 - LEVEL)
    assert diagnosis.findings == ()
    assert diagnosis.noise.low < 1 < diagnosis.noise.high


def test_noise_that_comes_again_is_found(monkeypatch):
    def normal(shape, mean=0.0, stddev=1.0, **options):  # noqa: ARG001
        return mean + stddev * tf.random.stateless_normal(shape, seed=[1, 2], dtype=tf.float32)

    monkeypatch.setattr(tf.random, "normal", normal)
    recorder = train().recorder
    assert recorder.audit().refuted == ("mechanism",)
    assert recorder.diagnose().findings[0].sentence == "Every step has the same noise."


def test_sums_longer_than_their_rows_allow_are_found(monkeypatch):
    monkeypatch.setattr(*FAULTS["vectorized sgd", "no clipping"])
    names = {finding.name for finding in train().recorder.diagnose().findings}
    assert "sum-norm" in names


class Decaying(tfp.VectorizedDPKerasSGDOptimizer):
    """Adds a multiple of the weights to the release, which is public."""

    share = 0.05

    def _compute_gradients(self, loss, var_list, grad_loss=None, tape=None):
        pairs = super()._compute_gradients(loss, var_list, grad_loss, tape)
        return [(gradient + self.share * weights, weights) for gradient, weights in pairs]


def test_a_penalty_of_the_weights_after_the_noise_is_not_taken_for_noise(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "decaying", (Decaying, 0.5))
    diagnosis = train("decaying", num_steps=200).recorder.diagnose(confidence=1 - LEVEL)
    assert diagnosis.findings == ()


def test_rows_are_compared_with_the_batches_that_a_loop_reports():
    model, optimizer = private()
    options = {"num_steps": 20, "sample_rate": RATE, "delta": DELTA, "seed": 0}
    with observe(optimizer, **options) as recorder:
        for step in range(20):
            loop(model, optimizer, 1)
            recorder.observe_batch(np.arange(step, step + 9), 200)  # of 10 rows
    sentences = [finding.sentence for finding in recorder.diagnose().findings]
    assert any("More rows were clipped than examples drawn in 20 of 20 steps" in text for text in sentences)


def test_gradients_that_are_not_finite_end_the_audit_with_a_warning_and_the_rest_is_audited():
    model, optimizer = private()
    with observe(optimizer, num_steps=30, sample_rate=RATE, delta=DELTA, seed=0) as recorder:
        fit(model, optimizer, 10)
        model.trainable_variables[0].assign(tf.fill((40, 2), np.nan))
        with pytest.warns(match="The audit ends: steps from step 10 on are not audited"):
            go_on(model, 5)
    assert recorder.num_done == 10
    assert recorder.audit().verdict is not VIOLATION


def frozen(model):
    model.layers[0].trainable = False
    model.compile(optimizer=model.optimizer, loss=model.loss)


@pytest.mark.parametrize(
    ("how", "change", "reason"),
    [
        (fit, frozen, "Gradients must have 131 entries in every step"),
        (fit, None, "ZeroDivisionError in dpaudit"),
        (minimize, None, "ZeroDivisionError in dpaudit"),
    ],
)
def test_what_goes_wrong_ends_the_audit_and_the_training_goes_on(monkeypatch, how, change, reason):
    def build():
        return tf.keras.Sequential([tf.keras.layers.Dense(3, input_shape=(40,)), tf.keras.layers.Dense(2)])

    weights = []
    for is_observed in (False, True):
        model, optimizer = private(build=build if change else None)
        session = observe(optimizer, sample_rate=RATE, delta=DELTA, seed=0)
        recorder = session.start() if is_observed else None
        how(model, optimizer, 5)
        if change is not None:
            change(model)
        elif is_observed:
            monkeypatch.setattr(dpaudit.Recorder, "record", lambda *_, **__: 1 / 0)
        with pytest.warns(match="The audit ends") if is_observed else nullcontext():
            go_on(model, 5) if how is fit else how(model, optimizer, 5)
        session.stop()
        weights.append(np.concatenate([value.reshape(-1) for value in model.get_weights()]))
    np.testing.assert_allclose(*weights, rtol=1e-4, atol=1e-5)
    assert recorder.audit().not_covered[0].startswith(f"steps from step 5 on are not audited: {reason}")


@pytest.mark.parametrize("place", [RuntimeError("of the user"), KeyboardInterrupt()], ids=type)
def test_an_error_of_the_user_passes_and_the_steps_before_can_be_audited(place):
    def loop():
        minimize(model, optimizer, 5)
        raise place

    model, optimizer = private()
    observed = observe(optimizer, sample_rate=RATE, delta=DELTA, seed=0)
    with pytest.raises(type(place)), observed as recorder:
        loop()
    assert recorder.num_done == 5
    assert recorder.audit().verdict is not VIOLATION
    assert "_compute_gradients" not in vars(optimizer)


@pytest.mark.parametrize(
    "canary",
    [
        dpaudit.Constant(),
        dpaudit.Mixture(short=False),
        dpaudit.RandomDirection(moving=True),
        dpaudit.Dirac(0.5, moving=True),
    ],
)
def test_scores_are_right_for_every_canary(canary):
    scores_are_normal(train(observer={"canary": canary}).recorder, signal=min(1.0, canary.scale))


@pytest.mark.parametrize("name", ["sgd", "vectorized sgd"])
def test_a_microbatch_of_several_examples_is_clipped_as_one_and_said_not_to_be_covered(name):
    made = same_weights(name, num_microbatches=5)
    scores_are_normal(made.recorder)
    assert any("up to twice the clipping norm" in text for text in made.recorder.not_covered)


def test_the_last_batch_may_be_smaller():
    made = same_weights(how_options={"num_examples": 37}, num_steps=40)
    scores_are_normal(made.recorder)
    assert not made.recorder.not_covered


def test_steps_that_add_up_to_one_update_are_one_step():
    made = same_weights("sgd", gradient_accumulation_steps=4, num_steps=80)
    assert made.recorder.num_done == 20
    scores_are_normal(made.recorder, noise=2 * NOISE)
    assert f"noise multiplier {2 * NOISE:.6g}" in made.recorder.audit().claim.summary
    noise = made.recorder.diagnose(noise_multiplier=2 * NOISE, confidence=1 - LEVEL).noise
    assert noise.low < 1 < noise.high


def test_several_steps_of_one_execution_are_recorded_one_by_one():
    made = same_weights(how_options={"steps_per_execution": 5})
    scores_are_normal(made.recorder)


@pytest.mark.parametrize("name", ["sgd", "vectorized sgd"])
def test_an_eager_loop_with_a_loss_that_is_a_function_is_observed(name):
    made = same_weights(name, how=minimize, num_steps=2, noise=1e-3)
    seen = made.recorder.observations
    assert seen.with_canary == pytest.approx(1.0, abs=0.01)
    assert seen.without_canary == pytest.approx(0.0, abs=0.01)


def two_inputs():
    """A model with an embedding, whose gradients are sparse, and with weights that do not learn."""
    layers = [
        tf.keras.layers.Lambda(lambda values: tf.cast(values[:, :4] > 0, tf.int32), input_shape=(40,)),
        tf.keras.layers.Embedding(2, 16),
        tf.keras.layers.Dense(3, trainable=False),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(4),
    ]
    return tf.keras.Sequential(layers)


def test_embeddings_and_weights_that_do_not_learn_are_no_trouble():
    scores_are_normal(same_weights("sgd", build=two_inputs).recorder)


def test_the_claim_is_read_from_the_optimizer_and_can_be_given():
    recorder = train(num_steps=3, observer={"num_steps": None}).recorder
    claim = recorder.audit().claim
    assert claim.summary.startswith(f"DP-SGD, noise multiplier {NOISE:.6g}, sample rate 0.05, 3 steps")
    other = recorder.audit(noise_multiplier=2.0, sample_rate=0.1, num_steps=9).claim
    assert other.summary.startswith("DP-SGD, noise multiplier 2, sample rate 0.1, 9 steps")
    whole = dpaudit.Claim.dpsgd(noise_multiplier=2.0, sample_rate=0.1, num_steps=50, delta=1e-6)
    with observe(private()[1], claim=whole) as recorder:
        assert recorder.claim.summary == whole.summary


class Stop(Exception):  # noqa: N818
    pass


def test_a_callback_sees_the_live_bound_and_may_end_the_training():
    seen = []

    def callback(live):
        seen.append(live)
        if live.num_done == 4:
            raise Stop

    with pytest.raises(Stop):
        train(observer={"callbacks": [callback], "every": 2})
    assert [live.num_done for live in seen] == [2, 4]


def test_a_graph_that_outlives_its_observer_gets_no_more_canaries():
    found = []
    for observed in (True, False):
        made = train(num_steps=20, observed=observed)
        assert "_compute_gradients" not in vars(made.optimizer)
        go_on(made.model, 6)
        assert made.recorder is None or made.recorder.num_done == 20
        found.append(made.model.get_weights()[0])
    np.testing.assert_allclose(*found, atol=1e-5)


def test_a_graph_that_was_made_before_is_not_observed():
    model, optimizer = private()
    fit(model, optimizer, 3)
    observed = observe(optimizer, sample_rate=RATE, delta=DELTA)
    recorder = observed.start()
    go_on(model, 4)
    with pytest.warns(match=r"only 0 of 4 updates were observed, .* call model\.compile"):
        observed.stop()
    with pytest.raises(dpaudit.InputError, match=r"No step was recorded.*only 0 of 4 updates were observed"):
        recorder.audit()


def test_an_optimizer_that_is_not_private_is_refused():
    for kind in (tf.keras.optimizers.SGD, tf.keras.optimizers.legacy.SGD):
        with pytest.raises(dpaudit.InputError, match="A SGD is not private"), observe(kind()):
            pass


def test_a_private_optimizer_that_is_not_dp_sgd_is_refused():
    model, _ = private()
    options = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0}
    tree = tfp.DPFTRLTreeAggregationOptimizer(var_list_or_model=model, **options)
    with (
        pytest.raises(dpaudit.InputError, match="GaussianSumQuery, got a TreeResidualSumQuery"),
        observe(tree),
    ):
        pass
    sparse = dp_optimizer_keras_sparse.DPSparseKerasSGDOptimizer(**options)
    with pytest.raises(dpaudit.InputError, match="private SGD adds its noise during"), observe(sparse):
        pass


def test_what_is_missing_of_the_claim_is_named():
    recorder = train(num_steps=2, observer={"sample_rate": None}).recorder
    with pytest.raises(dpaudit.InputError, match=r"sample_rate is missing \(the probability that"):
        recorder.audit()


def test_a_loss_that_is_not_of_each_example_is_refused():
    mean = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with pytest.raises(
        dpaudit.InputError, match=r"^The loss must have one number per example, .* got their mean"
    ):
        train(how_options={"loss": mean})


def test_several_devices_are_refused():
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model, optimizer = private()
        with (
            pytest.raises(dpaudit.InputError, match=r"^A strategy with 2 replicas cannot be observed"),
            observe(optimizer),
        ):
            fit(model, optimizer, 2)


@pytest.mark.parametrize("how", [fit, loop])
def test_a_phase_that_is_seeded_like_an_earlier_one_is_found(how):
    model, optimizer = private()
    found = []
    for seed in (1, 1, 2):
        tf.random.set_seed(seed)
        with observe(optimizer, num_steps=20, sample_rate=RATE, delta=DELTA, seed=0) as recorder:
            how(model, optimizer, 20)
        found.append("earlier-noise" in {finding.name for finding in recorder.diagnose().findings})
    assert found == [False, True, False]
