"""The observer of JAX Privacy is tight on a correct training, sees broken ones and changes nothing."""

import dataclasses
import math
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax_privacy import batch_selection, clipped_grad, clipping, matrix_factorization, noise_addition
from jax_runs import DELTA, FAULTS, INPUTS, POISSON, RATE, TARGETS, loop, loss, private, start, train, whole
from score_noise import require_normal
from statistical_limits import least_caught, most_flagged, room

import dpaudit
from dpaudit.diagnostics import ObservedStep
from dpaudit.observers.jax_privacy import _clipping, _observe, observe, replay
from dpaudit.observers.jax_privacy._clipping import with_function
from dpaudit.observers.jax_privacy._step_callbacks import PendingSum, SumScale

try:
    from jax_privacy import execution_plan
except ImportError:  # before version 2.1
    from jax_privacy.experimental import execution_plan

VIOLATION = dpaudit.Verdict.VIOLATION
NOISE = 0.8563  # of 300 steps at the sample rate below, for epsilon = 8

# what JAX Privacy 2.0.0 says of itself with a newer optax
pytestmark = pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")


@pytest.fixture(scope="module")
def correct(seeds):
    """The verdicts on correct trainings of 300 steps, all made by one compiled step."""
    usual = {"sample_rate": RATE, "num_steps": 300, "delta": DELTA}
    own = {"canary": dpaudit.Dirac(), "seed": 0}  # recorders without canaries count every step
    *made, recorder = observe(*private(noise_multiplier=NOISE), **own, **usual)
    run = whole(*made)
    for seed in seeds:
        run(seed)
    state = recorder.state_dict()
    results = []
    for part in seeds:
        of_one = dpaudit.Recorder(claim=dpaudit.Claim.dpsgd(noise_multiplier=NOISE, **usual), num_steps=300)
        rows = slice(300 * part, 300 * (part + 1))
        of_one.load_state_dict(state | {name: state[name][rows] for name in ("scores", "present")})
        results.append(of_one.audit())
    return results


def test_correct_training_is_not_flagged_in_95_percent_of_seeds(correct):
    flagged = sum(result.verdict is VIOLATION for result in correct)
    assert flagged <= most_flagged(len(correct), broken=0.9)  # with 0.9 of the noise nearly all are flagged


def test_the_bound_of_correct_training_is_tight(correct):
    assert correct[0].claim.epsilon == pytest.approx(8.0, rel=0.01)
    tight = sum(result.bound.epsilon > 0.85 * result.claim.epsilon for result in correct)
    assert tight >= least_caught(len(correct), 0.95, broken=0.1)  # with 1.1 times the noise none is


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_broken_training_is_a_violation_within_300_steps(fault, monkeypatch):
    FAULTS[fault](monkeypatch)
    num_steps = 300 if fault == "noise times 0.8" else 60
    options = {"observer": {"num_steps": 300}, "noise_multiplier": NOISE}
    result = train(num_steps, **options).recorder.audit()
    assert result.verdict is VIOLATION
    assert result.claim.epsilon == pytest.approx(8.0, rel=0.01)
    with pytest.raises(dpaudit.ViolationError):
        result.raise_for_violation()


@pytest.mark.few(1)
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_sum_that_is_scaled_between_the_clipping_and_the_noise_is_seen(factor):
    observer = {"max_grad_norm": 0.1, "num_steps": 300}
    options = {"observer": observer, "noise_multiplier": NOISE, "step": scaled_by(factor)}
    recorder = same_weights(100, **options)
    require_normal(recorder.observations, noise=NOISE, signal=factor)
    assert (recorder.audit().verdict is VIOLATION) == (factor > 1)


def scaled_by(factor):
    return {"between": lambda gradient: optax.tree.scale(factor, gradient)}


def test_a_clipping_function_or_a_privatizer_that_was_wrapped_is_seen():
    grad_fn, privatizer = private(noise_multiplier=NOISE)
    usual = {"noise_multiplier": NOISE, "sample_rate": RATE, "num_steps": 300, "delta": DELTA, "seed": 0}
    twice = with_function(grad_fn, lambda *args, **options: twofold(grad_fn(*args, **options)))
    *made, recorder = observe(twice, privatizer, **usual)
    loop(*made)(60)
    assert recorder.audit().verdict is VIOLATION

    def silent(gradient, state, params=None):  # noqa: ARG001
        return gradient, state

    *made, recorder = observe(grad_fn, optax.GradientTransformation(privatizer.init, silent), **usual)
    loop(*made)(60)
    assert recorder.audit().verdict is VIOLATION


def test_the_weights_are_the_same_if_a_wrapped_privatizer_scales_the_sum():
    found = []
    for observed in (True, False):
        grad_fn, privatizer = private()

        def doubled(gradient, state, params=None, inner=privatizer):
            return inner.update(twofold(gradient), state, params)

        privatizer = optax.GradientTransformation(privatizer.init, doubled)
        if observed:
            grad_fn, privatizer, recorder = observe(grad_fn, privatizer, **SHORT)
        found.append(loop(grad_fn, privatizer)(20)["weight"])
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)
    seen = recorder.observations.with_canary  # the doubled sum of the batch adds to their spread
    assert seen.mean() == pytest.approx(2.0, abs=room(seen.std() / math.sqrt(seen.size)))


def twofold(gradient):
    return optax.tree.scale(2.0, gradient)


@cache
def plain_training(num_steps):
    return train(num_steps, observed=False)


def same_weights(num_steps=60, tolerance=1e-5, **options):
    observed = train(num_steps, **options)
    is_plain = options.keys() <= {"observer"}
    plain = plain_training(num_steps) if is_plain else train(num_steps, observed=False, **options)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=tolerance),
        observed.params,
        plain.params,
    )
    return observed.recorder


CANARIES = [
    pytest.param(dpaudit.Dirac(), marks=pytest.mark.long),  # that of all other tests
    dpaudit.Dirac(moving=True),
    dpaudit.Constant(),
    dpaudit.RandomDirection(moving=True),
]


@pytest.mark.parametrize("canary", CANARIES, ids=str)
def test_scores_and_weights_are_right_for_every_canary(canary):
    require_normal(same_weights(observer={"canary": canary}).observations, noise=0.5)


def with_aux(params, batch):
    return loss(params, batch), {"mean": batch[0].mean()}


def with_dropout(params, batch, key):
    inputs, targets = batch
    return loss(params, (inputs * jax.random.bernoulli(key, 0.8, inputs.shape), targets))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "options",
    [
        {"normalize_by": 1.0, "l2_clip_norm": 0.1},
        {"rescale_to_unit_norm": True, "l2_clip_norm": 0.1},
        {"microbatch_size": 8, "return_values": True, "return_grad_norms": True},
        {"fun": with_aux, "has_aux": True, "keep_batch_dim": False},
        {"fun": with_dropout, "prng_argnum": 2, "step": {"fed": (jax.random.key(3),)}},
        {"step": {"optimizer": optax.adam(0.01)}, "sampling_prob": 1e-9},
    ],
    ids=["sum", "unit norm", "microbatches", "auxiliary", "dropout", "empty batches"],
)
def test_scores_and_weights_are_right_whatever_the_training_is(options):
    require_normal(same_weights(**options).observations, noise=0.5)


def halves(dtype):
    return lambda gradient: jax.tree.map(lambda leaf: (leaf / 2).astype(dtype), gradient)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scores_and_weights_are_right_if_the_loop_divides_the_sum(dtype):
    options = {"normalize_by": 5.0, "noise_multiplier": 0.25, "step": {"between": halves(dtype)}}
    tolerance = {jnp.float32: 1e-5, jnp.bfloat16: 0.02}[dtype]
    recorder = same_weights(observer={"max_grad_norm": 0.1}, tolerance=tolerance, **options)
    require_normal(recorder.observations, noise=0.5)
    assert "noise multiplier 0.5" in recorder.claim.summary


def test_a_sum_that_is_scaled_is_refused_if_nobody_said_so():
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"times 0.5: if this is intended, pass max_grad_norm=0.05"
    ):
        train(2, step=scaled_by(0.5))


def test_in_a_with_block_a_refusal_is_a_sentence_instead_of_a_traceback(caplog):
    observed = observe(*private(), **SHORT)
    with pytest.raises(dpaudit.InputError, match="pass max_grad_norm=") as refused, observed as parts:
        loop(*parts[:2], **scaled_by(0.5))(2)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__
    assert caplog.text == ""
    with pytest.raises(ValueError, match="of the user"), observe(*private(), **SHORT):
        raise ValueError("of the user")
    with (
        pytest.raises(dpaudit.InputError, match=r"was already used in a with block"),
        observed,
    ):
        pass


def of_norm_one(gradient):
    return optax.tree.scale(1 / optax.tree.norm(gradient), gradient)


def with_regulariser(gradient):
    return jax.tree.map(lambda leaf: leaf + 0.01, gradient)


def one_layer(gradient):
    return gradient | {"weight": jnp.zeros_like(gradient["weight"])}


def negative(gradient):
    return optax.tree.scale(-1.0, gradient)


@pytest.mark.few(2)
@pytest.mark.parametrize("between", [with_regulariser, one_layer, negative])
def test_a_loop_whose_canaries_cannot_be_told_from_the_rest_is_refused(between):
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="InputError: The input of the privatizer must be the sum"
    ):
        train(3, observer={"max_grad_norm": 1.0}, step={"between": between})


def test_a_factor_that_varies_ends_the_audit_after_the_first_step():
    with pytest.warns(match="steps from step 1 on are not audited: The input of the privatizer must be the"):
        train(3, observer={"max_grad_norm": 1.0}, step={"between": of_norm_one}).recorder.state_dict()


def test_a_gradient_that_is_not_for_the_update_is_refused_and_the_next_step_is_right():
    plain = private(noise_multiplier=1e-6)
    expected = jax.jit(plain[0])(start(), BATCH)["weight"]
    grad_fn, privatizer, recorder = observe(*plain, **SHORT)
    grad_fn, update = jax.jit(grad_fn), jax.jit(privatizer.update)
    state = privatizer.init(start())
    for used in (0, 1):  # the one with canaries, and then the one without
        both = [grad_fn(start(), BATCH) for _ in range(2)]
        with pytest.raises(jax.errors.JaxRuntimeError, match="for logging, or a warm-up call"):
            jax.block_until_ready(update(both[used], state))
    released, _ = update(grad_fn(start(), BATCH), state)
    np.testing.assert_allclose(released["weight"], expected, atol=1e-5)
    assert recorder.num_done == 1


def test_the_factor_of_a_sum_is_one_for_the_whole_training():
    scale = SumScale()
    scale.free = True
    batch, canaries = np.array([3.0, 0.0]), np.array([0.0, 1.0])
    alone, joined = (PendingSum(batch, total, ObservedStep()) for total in (batch, batch + canaries))
    assert scale.of(alone, 0.5 * batch, 1.0, 1e-4) == 0.5  # no canary is in it: nothing is decided yet
    assert scale.of(joined, 0.25 * joined.joined, 1.0, 1e-4) == 0.25
    for pending in (alone, joined):
        with pytest.raises(dpaudit.InputError, match="the same multiple of it in every step"):
            scale.of(pending, 0.5 * pending.joined, 1.0, 1e-4)
    nothing = PendingSum(np.zeros(2), np.zeros(2), ObservedStep())
    assert scale.of(nothing, np.zeros(2), 1.0, 1e-4) == 0.25
    assert SumScale().of(nothing, np.zeros(2), 1.0, 1e-4) == 1.0
    with pytest.raises(
        dpaudit.InputError,
        match="The input of the privatizer must be the sum of all gradients since its last",
    ):
        SumScale().of(nothing, np.ones(2), 1.0, 1e-4)


def test_a_gradient_function_that_adds_something_of_its_own_is_refused():
    grad_fn, privatizer = private()
    wrapped = with_function(grad_fn, lambda *args, **_: with_regulariser(grad_fn(*args)))
    observed, *_ = observe(wrapped, privatizer)
    with pytest.raises(jax.errors.JaxRuntimeError, match="but it also adds other terms"):
        jax.block_until_ready(jax.jit(observed)(start(), BATCH))


@pytest.mark.filterwarnings("default:The audit ends")
def test_a_gradient_that_is_not_finite_ends_the_audit_and_earlier_steps_can_be_audited():
    plain = private()
    grad_fn, privatizer, recorder = observe(*plain, **SHORT)
    update, state = jax.jit(privatizer.update), privatizer.init(start())
    for factor in (1.0, 1.0, jnp.nan, 1.0):
        gradient, before = optax.tree.scale(factor, grad_fn(start(), BATCH)), state
        with pytest.warns(match="The audit ends: steps from step 2 on") if factor != 1 else nullcontext():
            released, state = jax.block_until_ready(update(gradient, state))
            jax.effects_barrier()
    assert recorder.num_done == 2
    result = recorder.audit()
    assert result.not_covered[0].startswith("steps from step 2 on are not audited: its gradients are not")
    assert result.verdict is not VIOLATION
    expected, _ = plain[1].update(plain[0](start(), BATCH), before)
    np.testing.assert_allclose(released["weight"], expected["weight"], atol=1e-6)  # without canaries


def test_what_is_observed_already_is_refused():
    grad_fn, privatizer, _ = observe(*private())
    plain = private()
    wrapped = with_function(plain[0], lambda *args: twofold(grad_fn(*args)))
    for again in (grad_fn, jax.jit(grad_fn), wrapped):
        with pytest.raises(dpaudit.InputError, match="This gradient function is already observed"):
            observe(again, plain[1])
    for update in (privatizer.update, jax.jit(privatizer.update), partial(privatizer.update)):
        with pytest.raises(dpaudit.InputError, match="This privatizer is already observed"):
            observe(plain[0], privatizer._replace(update=update))


def test_a_privatizer_that_somebody_wrote_may_use_any_names():
    grad_fn, privatizer = private()
    stddev = 0.05

    def update(gradient, state, params=None):
        noise, state = privatizer.update(jax.tree.map(jnp.zeros_like, gradient), state, params)
        return jax.tree.map(lambda leaf, one: leaf + one * stddev / 0.05, gradient, noise), state

    *_, recorder = observe(
        grad_fn, optax.GradientTransformation(privatizer.init, update), num_steps=1, **SHORT
    )
    with pytest.raises(dpaudit.InputError, match="noise_multiplier is missing"):
        recorder.claim  # noqa: B018


def test_canaries_in_many_chunks_are_the_same_canaries(monkeypatch):
    monkeypatch.setattr("dpaudit.observers.jax_privacy._clipping.JaxClip.needs_full_rows", True)
    at_once = train(20).recorder
    monkeypatch.setattr("dpaudit.observers.jax_privacy._canaries._CHUNK_ENTRIES", 3 * 130)
    in_chunks = train(20).recorder
    both = [recorder.observations.with_canary for recorder in (at_once, in_chunks)]
    np.testing.assert_allclose(*both, atol=1e-5)


BATCH = (INPUTS[:10], TARGETS[:10])
SHORT = {"sample_rate": RATE, "delta": DELTA, "seed": 0}


def test_a_step_may_be_compiled_in_two_parts_and_have_gradients_of_several_batches():
    found = []
    for observed in (True, False):
        made = private()
        if observed:
            *made, recorder = observe(*made, **SHORT)
        gradient, update = jax.jit(made[0]), jax.jit(made[1].update)
        state, params = made[1].init(start()), start()
        for _ in range(40):
            total = jax.tree.map(jnp.add, gradient(params, BATCH), gradient(params, BATCH))
            noisy, state = update(noise_state=state, sum_of_clipped_grads=total)
            params = optax.apply_updates(params, optax.tree.scale(-0.1, noisy))
        found.append(params["weight"])
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)
    assert recorder.num_done == 40
    require_normal(recorder.observations, noise=0.5)


def test_a_loop_may_be_compiled_as_a_whole_with_the_privatizer_in_a_chain():
    found = []
    for observed in (True, False):
        grad_fn, privatizer = private()
        if observed:
            grad_fn, privatizer, recorder = observe(jax.jit(grad_fn), privatizer, **SHORT)
        optimizer = optax.chain(privatizer, optax.adam(0.01))

        def step(carried, _, grad_fn=grad_fn, optimizer=optimizer):
            params, state = carried
            updates, state = optimizer.update(grad_fn(params, BATCH), state)
            return (optax.apply_updates(params, updates), state), None

        first = start(), optimizer.init(start())
        (params, _), _ = jax.lax.scan(step, first, length=60)
        found.append(params["weight"])
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)
    assert recorder.num_done == 60
    require_normal(recorder.observations, noise=0.5)


def test_the_claim_is_that_of_the_privatizer_and_of_the_sampling():
    *made, recorder = observe(*private(noise_multiplier=0.7), sampling=POISSON, delta=DELTA)
    loop(*made)(25)
    expected = dpaudit.Claim.dpsgd(noise_multiplier=0.7, sample_rate=RATE, num_steps=25, delta=DELTA)
    assert recorder.claim.summary == expected.summary
    *_, given = observe(
        *private(), noise_multiplier=0.6, sample_rate=0.5, num_steps=100, sampling=POISSON, delta=DELTA
    )
    assert "noise multiplier 0.6, sample rate 0.5, 100 steps" in given.claim.summary


def test_an_execution_plan_of_one_band_is_read():
    usual = {"iterations": 20, "strategy": np.ones(1), "noise_multiplier": 0.9}
    if hasattr(execution_plan, "BandMFConfig"):
        plan = execution_plan.BandMFConfig(expected_participations=2.0, **usual).make()
    else:
        none = {"epsilon": None, "delta": None}
        plan = execution_plan.BandMFExecutionPlanConfig(sampling_prob=0.1, **none, **usual).plan
    *_, recorder = observe(
        plan.clipped_grad(loss),
        plan.noise_addition_transform,
        sampling=plan.batch_selection_strategy,
        num_steps=20,
        delta=DELTA,
    )
    assert "noise multiplier 0.9, sample rate 0.1, 20 steps" in recorder.claim.summary


@dataclasses.dataclass(frozen=True)
class RenamedCallable:
    """The function that states its sensitivity, as in version 2.3 of JAX Privacy."""

    bounded_sensitivity_fun: Any
    l2_norm_bound: float
    has_aux: bool

    def __call__(self, *args, is_padding_example=None, **options):
        return self.bounded_sensitivity_fun(*args, is_padding_example=is_padding_example, **options)

    def sensitivity(self):
        return self.l2_norm_bound


def test_gradient_functions_of_a_newer_version_are_observed_and_replayed(monkeypatch):
    for module in (clipping, _clipping, _observe):
        monkeypatch.setattr(module, "BoundedSensitivityCallable", RenamedCallable)
    grad_fn, privatizer = private(noise_multiplier=0.7)
    *made, recorder = observe(grad_fn, privatizer, sampling=POISSON, delta=DELTA)
    loop(*made)(25)
    require_normal(recorder.observations, noise=0.7)

    def step(grad_fn, privatizer, state, batch):
        noisy, noise_state = privatizer.update(grad_fn(state[0], batch), state[1])
        return optax.apply_updates(state[0], noisy), noise_state

    state = start(), privatizer.init(start())
    assert replay(step, state, BATCH, grad_fn=grad_fn, privatizer=privatizer).findings == ()


def test_a_callback_may_end_a_training_that_leaks(monkeypatch):
    class FoundError(Exception):
        pass

    def stop(live):
        if live.is_violation:
            raise FoundError

    FAULTS["noise times 0.8"](monkeypatch)
    usual = {"sample_rate": RATE, "num_steps": 300, "delta": DELTA, "seed": 0, "callbacks": [stop]}
    *made, recorder = observe(*private(noise_multiplier=NOISE), **usual)
    with pytest.raises(jax.errors.JaxRuntimeError, match="FoundError"):
        loop(*made)(300)
    assert 10 < recorder.num_done < 300
    assert recorder.audit().verdict is VIOLATION


def test_a_function_that_does_not_clip_is_refused():
    _, privatizer = private()
    with pytest.raises(dpaudit.InputError, match="loss is not private; pass the gradient function that"):
        observe(loss, privatizer)
    made_by_hand = clipping.BoundedSensitivityCallable(jax.grad(loss), 1.0, False)
    with pytest.raises(dpaudit.InputError, match="does not contain its clipping and its loss"):
        observe(made_by_hand, privatizer)
    with pytest.raises(
        dpaudit.InputError, match="The clipping norm must be finite, got inf; pass max_grad_norm"
    ):
        observe(clipped_grad(loss, l2_clip_norm=math.inf), privatizer)


def test_a_clipping_norm_that_is_not_the_claimed_one_is_a_violation():
    for norm in (2.0, math.inf):
        grad_fn = clipped_grad(loss, l2_clip_norm=norm)
        privatizer = noise_addition.gaussian_privatizer(stddev=NOISE, prng_key=0)
        for canary in (dpaudit.Dirac(), dpaudit.Mixture()):
            options = {"canary": canary, "max_grad_norm": 1.0, "num_steps": 300, **SHORT}
            *made, recorder = observe(grad_fn, privatizer, **options)
            loop(*made)(60)
            assert recorder.audit().verdict is VIOLATION
            if isinstance(canary, dpaudit.Dirac):
                require_normal(recorder.observations, noise=NOISE, signal=min(norm, 10.0))


def test_a_privatizer_of_another_kind_is_refused():
    grad_fn, privatizer = private()
    with pytest.raises(dpaudit.InputError, match="got a function"):
        observe(grad_fn, loss)
    with pytest.raises(dpaudit.InputError, match="must be the privatizer alone"):
        observe(grad_fn, optax.chain(privatizer, optax.sgd(0.1)))
    matrix = matrix_factorization.toeplitz.inverse_as_streaming_matrix(np.array([1.0, 0.5]))
    correlated = noise_addition.matrix_factorization_privatizer(matrix, stddev=1.0, prng_key=0)
    with pytest.raises(dpaudit.InputError, match="noise from a matrix factorization"):
        observe(grad_fn, correlated)


@pytest.mark.parametrize(
    "sampling",
    [
        batch_selection.CyclicPoissonSampling(sampling_prob=0.1, iterations=9, cycle_length=2),
        batch_selection.CyclicPoissonSampling(sampling_prob=0.1, iterations=9, truncated_batch_size=30),
        batch_selection.BMinSepSampling(sampling_prob=0.1, iterations=9, min_sep=2),
        batch_selection.BallsInBinsSampling(iterations=9, cycle_length=3),
    ],
    ids=["cyclic", "truncated", "separated", "bins"],
)
def test_sampling_without_a_single_rate_is_refused_without_advice_to_claim_a_rate(sampling):
    with pytest.raises(dpaudit.InputError, match=r"There is no claim for .* yet") as refusal:
        observe(*private(), sampling=sampling)
    assert "sample_rate" not in str(refusal.value)


def test_steps_of_a_sampler_without_a_claim_can_be_audited_alone():
    *made, recorder = observe(*private(noise_multiplier=0.5), seed=0)
    loop(*made)(60)
    claim = dpaudit.Claim.gaussian(noise_multiplier=0.5, delta=DELTA)
    assert dpaudit.audit(recorder.observations, claim=claim).verdict is not VIOLATION
    assert recorder.diagnose(noise_multiplier=0.5).findings == ()
    quieter = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=DELTA)
    assert dpaudit.audit(recorder.observations, claim=quieter).verdict is VIOLATION


def test_gradients_of_the_wrong_shape_are_refused():
    grad_fn, privatizer, _ = observe(*private())
    state = privatizer.init(start())
    with pytest.raises(
        dpaudit.InputError, match=r"The privatizer was updated before the gradient function that observe\(\)"
    ):
        privatizer.update(start(), state)
    gradient = grad_fn(start(), BATCH)
    with pytest.raises(dpaudit.InputError, match=r"shapes \[\(10,\), \(12, 10\)\].*got \[\(10,\)\]"):
        privatizer.update({"bias": gradient["bias"]}, state)
    expected = r"Gradients must have 130 entries .* the same 2 arrays, got 130 in 3 arrays. Were layers"
    with pytest.raises(dpaudit.InputError, match=expected):
        grad_fn({**start(), "empty": jnp.zeros(0)}, BATCH)


def test_a_gradient_that_was_made_without_the_observer_ends_the_audit():
    plain = private()
    grad_fn, privatizer, recorder = observe(*plain)
    gradient, state = grad_fn(start(), BATCH), privatizer.init(start())
    _, state = privatizer.update(gradient, state)
    with pytest.warns(match="from step 1 on are not audited: The privatizer was updated before the gradient"):
        released, _ = jax.block_until_ready(privatizer.update(gradient, state))
    assert recorder.num_done == 1
    expected, _ = plain[1].update(gradient, state)
    np.testing.assert_array_equal(released["weight"], expected["weight"])


def test_a_resumed_training_has_as_many_canaries_as_before():
    state = train(2, observer={"num_canaries": 8}).recorder.state_dict()
    given = {"sample_rate": RATE, "num_steps": 4, "delta": DELTA, "seed": 0}
    *made, recorder = observe(*private(), **given)
    recorder.load_state_dict(state)
    loop(*made)(2)
    assert recorder.state_dict()["scores"].shape == (4, 8)
    assert not any("of the first 2 steps are not tested" in text for text in recorder.diagnose().not_covered)
    *_, other = observe(*private(), num_canaries=16, **given)
    with pytest.raises(
        dpaudit.InputError, match="The state has 8 canaries, but this observer has 16; pass num_canaries=8 to"
    ):
        other.load_state_dict(state)
