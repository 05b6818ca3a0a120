"""Replays of steps with JAX Privacy: each fault has its name, and correct steps have no finding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax_privacy import clipped_grad, noise_addition
from jax_runs import INPUTS, loss, private, start

import dpaudit
from dpaudit.observers.jax_privacy import replay

pytestmark = pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")
NUM = 8
BATCH = (INPUTS[:NUM], np.arange(NUM, dtype=np.int32) % 2)
ADAM = optax.adam(0.1)


def start_state(privatizer):
    params = start()
    return params, privatizer.init(params), ADAM.init(params)


def update(privatizer, state, gradient):
    params, noise_state, moments = state
    noisy, noise_state = privatizer.update(gradient, noise_state)
    updates, moments = ADAM.update(noisy, moments)
    return optax.apply_updates(params, updates), noise_state, moments


def private_step(grad_fn, privatizer, state, batch):
    return update(privatizer, state, grad_fn(state[0], batch))


def replayed(step, batch=BATCH, *, made=None, state=None, **options):
    grad_fn, privatizer = private() if made is None else made
    state = start_state(privatizer) if state is None else state
    return replay(step, state, batch, grad_fn=grad_fn, privatizer=privatizer, **options)


def names(result):
    return [finding.name for finding in result.findings]


def centered(grad_fn, privatizer, state, batch):
    return private_step(grad_fn, privatizer, state, (batch[0] - batch[0].mean(axis=0), batch[1]))


def two_rows(grad_fn, privatizer, state, batch):
    both = tuple(np.concatenate([part, part]) for part in batch)
    return private_step(grad_fn, privatizer, state, both)


def divided_by_batch(grad_fn, privatizer, state, batch):
    gradient = optax.tree.scale(1 / len(batch[0]), grad_fn(state[0], batch))
    return update(privatizer, state, gradient)


def raw_moments(grad_fn, privatizer, state, batch):
    params, noise_state, _ = private_step(grad_fn, privatizer, state, batch)
    _, moments = ADAM.update(grad_fn(state[0], batch), state[2])
    return params, noise_state, moments


def added_after_noise(grad_fn, privatizer, state, batch):
    params, noise_state, moments = private_step(grad_fn, privatizer, state, batch)
    raw = jax.grad(loss)(state[0], batch)
    return optax.apply_updates(params, optax.tree.scale(-0.01, raw)), noise_state, moments


def added_before_noise(grad_fn, privatizer, state, batch):
    raw = jax.grad(loss)(state[0], (100 * batch[0], batch[1]))
    return update(privatizer, state, optax.tree.add(grad_fn(state[0], batch), raw))


def skips_small(grad_fn, privatizer, state, batch):
    return private_step(grad_fn, privatizer, state, batch) if len(batch[0]) >= NUM else state


def noise_by_size(grad_fn, privatizer, state, batch):
    params, noise_state, moments = state
    gradient = grad_fn(params, batch)
    large, noise_state = privatizer.update(optax.tree.scale(1 / len(batch[0]), gradient), noise_state)
    updates, moments = ADAM.update(optax.tree.scale(len(batch[0]), large), moments)
    return optax.apply_updates(params, updates), noise_state, moments


def sorted_by_length(grad_fn, privatizer, state, batch):
    order = np.argsort(np.linalg.norm(batch[0], axis=1))
    return private_step(grad_fn, privatizer, state, (batch[0][order], batch[1][order]))


FAULTS = {
    centered: "coupled-examples",
    two_rows: "rows-per-example",
    divided_by_batch: "divisor",
    raw_moments: "other-state",
    added_after_noise: "other-state",
    added_before_noise: "sensitivity",
    skips_small: "release-count",
    noise_by_size: "divisor",
}


@pytest.mark.few(3)
@pytest.mark.parametrize(("step", "name"), FAULTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_fault_of_the_step_has_its_name(step, name):
    result = replayed(step)
    assert names(result)[0] == name, str(result)
    assert result.likely_causes()
    with pytest.raises(dpaudit.ViolationError, match=name):
        result.raise_for_violation()


def test_examples_may_be_sorted_by_their_content():
    result = replayed(sorted_by_length)
    assert names(result) == [], str(result)
    assert not any("number of examples" in text for text in result.not_covered)


def test_class_weights_of_the_batch_are_coupled_examples():
    def weighted(params, batch, weights):
        return weights[batch[1]].sum() * loss(params, batch)

    def step(grad_fn, privatizer, state, batch):
        weights = 1 / jnp.maximum(jnp.bincount(batch[1], length=10), 1)
        return update(privatizer, state, grad_fn(state[0], batch, weights))

    assert names(replayed(step, made=private(fun=weighted))) == ["coupled-examples"]


def test_noise_that_depends_on_the_sum_is_named():
    grad_fn, privatizer = private()

    def by_norm(gradient, state, params=None):
        noisy, state = privatizer.update(gradient, state, params)
        noise = optax.tree.sub(noisy, gradient)
        factor = optax.tree.norm(gradient)
        return optax.tree.add(gradient, optax.tree.scale(factor, noise)), state

    made = grad_fn, optax.GradientTransformation(privatizer.init, by_norm)
    assert "batch-dependent-noise" in names(replayed(private_step, made=made))


# ---- correct steps ----


def compiled(grad_fn, privatizer, state, batch):
    return jax.jit(lambda state, batch: private_step(grad_fn, privatizer, state, batch))(state, batch)


def with_loss(grad_fn, privatizer, state, batch):
    return private_step(grad_fn, privatizer, state, batch), loss(state[0], batch)


def flat_with_loss(grad_fn, privatizer, state, batch):
    return (*private_step(grad_fn, privatizer, state, batch), loss(state[0], batch))


def two_halves(grad_fn, privatizer, state, batch):
    halves = [jax.tree.map(lambda leaf, part=part: leaf[part::2], batch) for part in (0, 1)]
    gradients = [grad_fn(state[0], half) for half in halves]
    return update(privatizer, state, optax.tree.scale(0.5, optax.tree.add(*gradients)))


def clipped_before_noise(grad_fn, privatizer, state, batch):
    gradient = grad_fn(state[0], batch)
    factor = jnp.minimum(1.0, 0.1 / optax.tree.norm(gradient))
    return update(privatizer, state, optax.tree.scale(factor, gradient))


def with_dropout(grad_fn, privatizer, state, batch):
    mask = jax.random.bernoulli(jax.random.key(1), 0.5, batch[0].shape[::-1]).T
    return private_step(grad_fn, privatizer, state, (batch[0] * mask, batch[1]))


CORRECT = [private_step, compiled, with_loss, flat_with_loss, two_halves, with_dropout]


@pytest.mark.few(2)
@pytest.mark.parametrize("step", CORRECT, ids=lambda step: step.__name__)
def test_a_correct_step_has_no_finding(step):
    result = replayed(step)
    assert names(result) == [], str(result)
    assert result.non_finite == ()  # gradients that are not finite are removed
    assert result.largest <= 1.001


def test_clipping_of_the_sum_is_no_divisor():
    bound = private()[0].sensitivity()
    assert names(replayed(clipped_before_noise, max_grad_norm=bound)) == []


@pytest.mark.parametrize("options", [{"keep_batch_dim": False}, {"return_values": True}, {"has_aux": True}])
def test_options_of_the_gradient_function_are_supported(options):
    def with_aux(params, batch):
        return loss(params, batch), batch[0].sum()

    def step(grad_fn, privatizer, state, batch):
        result = grad_fn(state[0], batch)
        return update(privatizer, state, result[0] if grad_fn.has_aux else result)

    assert (
        names(replayed(step, made=private(fun=with_aux if "has_aux" in options else loss, **options))) == []
    )


def padded_step(grad_fn, privatizer, state, batch):
    inputs, targets, is_padding = batch
    gradient = grad_fn(state[0], (inputs, targets), is_padding_example=is_padding)
    return update(privatizer, state, gradient)


def test_padding_is_marked_so_that_shapes_stay_the_same():
    batch = (INPUTS[:NUM], BATCH[1], np.arange(NUM) >= 6)
    made = private(microbatch_size=4)
    result = replayed(padded_step, batch, made=made, padding=2)
    assert names(result) == []
    assert sum(check.allowed == 1 and check.distance > 0 for check in result.checks) == 3

    def leaking(grad_fn, privatizer, state, batch):
        return private_step(grad_fn, privatizer, state, batch[:2])  # padding rows are examples

    assert names(replayed(leaking, batch, made=made, padding=2)) != []


def test_shapes_that_the_step_cannot_take_are_not_covered():
    result = replayed(private_step, made=private(microbatch_size=4))
    assert names(result) == []
    assert any("if one example is removed" in text for text in result.not_covered)


def test_a_non_finite_example_is_a_category_of_its_own():
    result = replayed(private_step, made=private(nan_safe=False))
    assert names(result) == []
    assert [finding.name for finding in result.non_finite] == ["non-finite-example"]


def test_what_cannot_be_replayed_is_refused():
    rng = np.random.default_rng(0)

    def impure(grad_fn, privatizer, state, batch):
        return private_step(grad_fn, privatizer, state, (rng.random(batch[0].shape, np.float32), batch[1]))

    with pytest.raises(dpaudit.InputError, match="bit for bit"):
        replayed(impure)
    with pytest.raises(dpaudit.InputError, match="added no noise"):
        replayed(lambda _grad_fn, _privatizer, state, _batch: state)
    with pytest.raises(dpaudit.InputError, match="new state"):
        replayed(lambda *args: private_step(*args)[0])
    with pytest.raises(dpaudit.InputError, match="clipped_grad"):
        replayed(private_step, made=(jax.grad(loss), private()[1]))
    with pytest.raises(dpaudit.InputError, match="abstract values"):
        replayed(
            lambda grad_fn, privatizer, state, batch: jax.eval_shape(
                lambda state: private_step(grad_fn, privatizer, state, batch), state
            )
        )


def test_a_step_that_draws_keys_from_its_state_is_replayed():
    def noisy_loss(params, batch, key):
        return loss(params, (batch[0] * jax.random.bernoulli(key, 0.5, batch[0].shape), batch[1]))

    grad_fn = clipped_grad(noisy_loss, l2_clip_norm=1.0, prng_argnum=2)
    made = grad_fn, noise_addition.gaussian_privatizer(stddev=1.0, prng_key=0)

    def step(grad_fn, privatizer, state, batch):
        own, key = state
        key, mine = jax.random.split(key)
        return update(privatizer, own, grad_fn(own[0], batch, mine)), key

    state = (start_state(made[1]), jax.random.key(3))
    assert names(replayed(step, made=made, state=state)) == []


def test_data_that_a_step_keeps_outside_of_its_state_is_a_finding():
    last = []

    def step(grad_fn, privatizer, state, batch):
        shift = last[-1] if last else batch[0].mean()
        last.append(batch[0].mean())
        return private_step(grad_fn, privatizer, state, (batch[0] - shift, batch[1]))

    result = replayed(step)
    assert "next-release" in names(result)
    assert "it keeps data outside of its state" in str(result)


def test_a_step_that_counts_its_calls_is_told_where_to_keep_the_count():
    calls = []

    def step(grad_fn, privatizer, state, batch):
        calls.append(1)
        return private_step(grad_fn, privatizer, state, (batch[0] * len(calls), batch[1]))

    with pytest.raises(dpaudit.InputError, match=r"keep all that .* carries to the next one in its state"):
        replayed(step)
