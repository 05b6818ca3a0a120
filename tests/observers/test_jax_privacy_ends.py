"""An audit never ends a training with JAX Privacy: it ends itself, and the steps before can be audited."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax_runs import DELTA, RATE, batches, private, start

import dpaudit
from dpaudit.diagnostics import NoiseCheck
from dpaudit.observers._session import AuditedSteps
from dpaudit.observers.jax_privacy import observe
from dpaudit.observers.jax_privacy._clipping import JaxClip
from dpaudit.observers.jax_privacy._step_callbacks import StepCallbacks
from dpaudit.recording import Recorder

pytestmark = pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")

STEPS, BEFORE = 8, 4
NOT_FLAGGED = dpaudit.Verdict.NO_VIOLATION, dpaudit.Verdict.UNDERPOWERED
PLACES = [
    (StepCallbacks, "_presence"),
    (StepCallbacks, "_seen"),
    (StepCallbacks, "finish_release"),
    (Recorder, "record"),
    (NoiseCheck, "observe"),
]


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


class Loop:
    """A training in two parts, whose functions are looked up in each step; it changes in between."""

    def __init__(self, grad_fn, privatizer, *, compiled=True):
        self.grad_fn, self.privatizer, self.between = grad_fn, privatizer, lambda gradient: gradient
        self.params, self.batches = start(), batches(STEPS)
        self.state = privatizer.init(self.params)
        self.compile = jax.jit if compiled else lambda step: step

    def _step(self, params, state, batch, is_padding):
        gradient = self.between(self.grad_fn(params, batch, is_padding_example=is_padding))
        noisy, state = self.privatizer.update(gradient, state)
        return {**params, **{name: params[name] - 0.5 * noisy[name] for name in noisy}}, state

    def run(self, num_steps):
        step = self.compile(self._step)
        for _ in range(num_steps):
            self.params, self.state = step(self.params, self.state, *next(self.batches))
        return jax.block_until_ready(self.params)


def twice(change, **options):
    """The weights of a training that changes in the middle, and an observed one with its recorder."""
    usual = {"sample_rate": RATE, "delta": DELTA, "seed": 0}
    results = []
    for is_observed in (False, True):
        functions = private()
        if is_observed:
            *functions, recorder = observe(*functions, **usual)
        loop = Loop(*functions, **options)
        loop.run(BEFORE)
        if not is_observed:
            change(loop, is_observed=False)
            results.append(loop.run(STEPS - BEFORE))
            continue
        assert recorder.num_done == BEFORE
        change(loop, is_observed=True)
        with pytest.warns(match="The audit ends: steps from step") as warned:
            results.append(loop.run(STEPS - BEFORE))
        assert sum("The audit ends" in str(warning.message) for warning in warned) == 1
    return *results, recorder


def require_same(plain, observed, **tolerance):
    for name in plain:
        np.testing.assert_allclose(observed[name], plain[name], **({"rtol": 1e-4, "atol": 1e-5} | tolerance))


def require_result(recorder, reason, num_done=BEFORE):
    assert recorder.num_done == num_done
    result = recorder.audit()
    assert result.verdict in NOT_FLAGGED
    expected = f"steps from step {num_done} on are not audited: {reason}"
    assert result.not_covered[0].startswith(expected)
    assert expected[1:45] in str(result)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[1])
def test_an_error_in_a_callback_ends_the_audit_and_the_weights_are_the_same(monkeypatch, place):
    fail = failing(monkeypatch, place, ZeroDivisionError("broken"))
    *both, recorder = twice(lambda _, *, is_observed: fail() if is_observed else None)
    require_same(*both)
    require_result(recorder, "ZeroDivisionError in dpaudit: broken", BEFORE + (place[1] == "observe"))


@pytest.mark.parametrize(
    "place", [(JaxClip, "measured"), (AuditedSteps, "lay_out")], ids=["gradient", "layout"]
)
def test_an_error_while_a_step_is_compiled_again_ends_the_audit(monkeypatch, place):
    fail = failing(monkeypatch, place, ZeroDivisionError("broken"))
    *both, recorder = twice(lambda _, *, is_observed: fail() if is_observed else None)
    require_same(*both)
    require_result(recorder, "ZeroDivisionError in dpaudit: broken")


def masked(gradient):
    return gradient | {"weight": jnp.zeros_like(gradient["weight"])}


def frozen_in_the_sum(loop, **_):
    loop.between = masked


def left_out_of_the_sum(loop, **_):
    loop.between = lambda gradient: {"bias": gradient["bias"]}


def test_a_layer_that_is_masked_in_the_sum_ends_the_audit():
    *both, recorder = twice(frozen_in_the_sum)
    require_same(*both)
    require_result(recorder, "The input of the privatizer must be the sum of all gradients")


def test_a_layer_that_is_left_out_of_the_sum_ends_the_audit():
    *both, recorder = twice(left_out_of_the_sum)
    require_same(*both)
    require_result(recorder, "The gradient must have shapes")


def test_a_gradient_that_is_nan_ends_the_audit_and_the_rest_is_the_same():
    def spoil(loop, **_):
        loop.between = lambda gradient: optax.tree.scale(jnp.nan, gradient)

    *both, recorder = twice(spoil)
    for params in both:
        assert np.isnan(params["weight"]).all()
    require_result(recorder, "its gradients are not finite")


def test_an_interrupt_passes_and_the_steps_before_can_be_audited():
    def interrupt(loop):
        loop.run(BEFORE)
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        observe(*private(), sample_rate=RATE, delta=DELTA, seed=0) as (grad_fn, privatizer, recorder),
    ):
        interrupt(Loop(grad_fn, privatizer))
    assert recorder.num_done == BEFORE
    assert recorder.audit().verdict in NOT_FLAGGED
