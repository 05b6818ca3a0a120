"""Canaries that JAX Privacy clips on their own coordinates only score the same as canaries in full rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_privacy import clipping
from jax_runs import FAULTS, INPUTS, TARGETS, private, start, train

import dpaudit
from dpaudit.canaries import CanaryPlan
from dpaudit.observers import _session
from dpaudit.observers.jax_privacy import _canaries, observe
from dpaudit.observers.jax_privacy._clipping import JaxClip, function_of

pytestmark = pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")
KINDS = [dpaudit.Dirac, dpaudit.Constant, dpaudit.Mixture, dpaudit.RandomDirection]
BATCH = (INPUTS[:10], TARGETS[:10])


def scores(monkeypatch, *, full, num_steps=3, **options):
    monkeypatch.setattr(JaxClip, "needs_full_rows", full)
    made = train(num_steps, **options)
    return made.recorder.state_dict()["scores"], made.params["weight"]


def require_equal(monkeypatch, **options):
    both = [scores(monkeypatch, full=full, **options) for full in (False, True)]
    for compact, full in zip(*both, strict=True):
        np.testing.assert_allclose(compact, full, atol=2e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
def test_compact_canaries_score_like_full_rows(monkeypatch, kind):
    monkeypatch.setattr(_canaries, "_COMPACT_CHUNK", 7)  # several chunks, the last not full
    require_equal(monkeypatch, observer={"canary": kind(), "num_canaries": 24})


SETTINGS = {
    "microbatches": {"microbatch_size": 4},
    "unit norm": {"rescale_to_unit_norm": True, "l2_clip_norm": 0.3},
    "not compiled": {"step": {"compiled": False}, "num_steps": 1},
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "setting", ["microbatches", "unit norm", pytest.param("not compiled", marks=pytest.mark.long)]
)
def test_compact_canaries_score_like_full_rows_in_every_setting(monkeypatch, setting):
    monkeypatch.setattr(_canaries, "_COMPACT_CHUNK", 12)
    require_equal(monkeypatch, observer={"num_canaries": 24}, **SETTINGS[setting])


def test_leaves_of_any_shape_get_their_canaries(monkeypatch):
    params = {"cube": jnp.ones((2, 3, 4)), "scale": jnp.ones(()), "vector": jnp.ones(5)}

    def loss(params, batch):
        return sum(leaf.sum() for leaf in jax.tree.leaves(params)) * batch.mean()

    found = []
    for full in (False, True):
        monkeypatch.setattr(JaxClip, "needs_full_rows", full)
        made = observe(*private(fun=loss), num_canaries=30, seed=0)
        step, state = jax.jit(made.grad_fn), made.privatizer.init(params)
        for _ in range(3):
            _, state = made.privatizer.update(step(params, jnp.ones(8)), state)
        found.append(made.recorder.state_dict()["scores"])
    np.testing.assert_allclose(*found, atol=2e-5)


def clipped_to_twice_the_norm(monkeypatch):
    own = clipping.clip_pytree
    monkeypatch.setattr(
        clipping, "clip_pytree", lambda tree, clip_norm, **options: own(tree, 2 * clip_norm, **options)
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [*FAULTS, "twice the norm"])
def test_faults_are_detected_with_compact_canaries_too(monkeypatch, name):
    (FAULTS | {"twice the norm": clipped_to_twice_the_norm})[name](monkeypatch)
    monkeypatch.setattr(JaxClip, "needs_full_rows", False)
    assert train(150).recorder.audit().verdict is dpaudit.Verdict.VIOLATION


def test_only_the_code_of_the_library_itself_gets_compact_rows(monkeypatch):
    grad_fn = private()[0]
    assert not JaxClip(grad_fn).needs_full_rows
    assert not JaxClip(jax.jit(grad_fn)).needs_full_rows

    @functools.wraps(function_of(grad_fn))
    def halved(*args, **options):
        return jax.tree.map(lambda leaf: leaf / 2, grad_fn(*args, **options))

    own = clipping.BoundedSensitivityCallable(halved, 0.05, False)
    assert JaxClip(own).needs_full_rows
    monkeypatch.setattr(clipping, "clip_pytree", functools.wraps(clipping.clip_pytree)(lambda *_, **__: None))
    assert JaxClip(grad_fn).needs_full_rows


def test_there_are_as_many_canaries_as_parameters_up_to_1024_and_64_if_they_need_full_rows(monkeypatch):
    drawn = []
    monkeypatch.setattr(_session, "CanaryPlan", lambda *args: drawn.append(args[1]) or CanaryPlan(*args))

    def number(**observer):
        jax.eval_shape(observe(*private(), seed=0, **observer).grad_fn, start(), BATCH)
        return drawn[-1]

    assert number() == 65
    assert number(canary=dpaudit.Dirac()) == 130
    assert number(num_canaries=5) == 5
    assert number(canary=dpaudit.Dirac(moving=True)) == 64
    with pytest.raises(dpaudit.InputError, match="canary must not move"):
        number(canary=dpaudit.Mixture(moving=True))
    monkeypatch.setattr(_canaries, "_NUM_CANARIES", 50)
    assert number() == 50
    monkeypatch.setattr(_canaries, "_NUM_FULL_ROWS", 40)
    monkeypatch.setattr(JaxClip, "needs_full_rows", True)
    assert number() == 40


def test_the_cost_does_not_grow_with_canaries_times_parameters(monkeypatch):
    """Rows that the library clips have as many columns as a chunk has canaries."""
    shapes, own = [], JaxClip.total

    def noting(clip, args, rows):
        shapes.append([leaf.shape for leaf in jax.tree.leaves(rows)])
        return own(clip, args, rows)

    monkeypatch.setattr(JaxClip, "total", noting)
    made = observe(*private(), seed=0, num_canaries=130)
    monkeypatch.setattr(_canaries, "_COMPACT_CHUNK", 13)
    jax.eval_shape(made.grad_fn, start(), BATCH)
    assert len(shapes) == 1  # one shape for all chunks
    assert shapes[0][0][0] == shapes[0][1][0] == 13
    assert all(shape[1] <= 13 for shape in shapes[0])
