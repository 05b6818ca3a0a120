"""A step that finds gradients itself can be audited, with jax and with torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax_privacy import clipped_grad
from score_noise import require_normal
from torch.func import grad, vmap

import dpaudit
from dpaudit.observers.step import observe_loss_step

CLAIM = dpaudit.Claim.gaussian(noise_multiplier=0.8, delta=1e-5)
NORM, NOISE = 0.5, 0.8
VIOLATION = dpaudit.Verdict.VIOLATION
RNG = np.random.default_rng(5)
INPUTS = RNG.standard_normal((12, 9)).astype(np.float32)
TARGETS = RNG.standard_normal((12, 8)).astype(np.float32)

# what JAX Privacy 2.0.0 says of itself with a newer optax
pytestmark = pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")


def loss(params, example):
    inputs, targets = example
    return ((inputs @ params["weight"] + params["bias"] - targets) ** 2).sum()


def torch_step(noise=NOISE, clip=True, seed=0, of_size=None):
    of_size = (lambda _: noise) if of_size is None else of_size
    generator = torch.Generator().manual_seed(seed)

    def step(loss, params, batch):
        rows = vmap(grad(loss), in_dims=(None, 0))(params, batch)
        noise = of_size(len(batch[0][0]))
        norms = torch.stack([row.flatten(1).norm(dim=1) for row in rows.values()]).norm(dim=0)
        weights = (NORM / norms).clamp(max=1.0) if clip else torch.ones_like(norms)
        return {
            name: torch.einsum("n,n...->...", weights, row)
            + noise * NORM * torch.randn(row.shape[1:], generator=generator)
            for name, row in rows.items()
        }

    return step


def jax_step(noise=NOISE, normalize_by=1.0):
    keys = iter(jax.random.split(jax.random.key(0), 1000))

    def step(loss, params, batch):
        clipped = clipped_grad(loss, l2_clip_norm=NORM, normalize_by=normalize_by, keep_batch_dim=False)
        total = clipped(params, batch)
        stddev = noise * clipped.sensitivity()
        return jax.tree.map(lambda leaf: leaf + stddev * jax.random.normal(next(keys), leaf.shape), total)

    return step


def watch(step, library, batch=(INPUTS, TARGETS), **options):
    make = torch.as_tensor if library == "torch" else jnp.asarray
    params = {"weight": make(np.ones((9, 8), np.float32)), "bias": make(np.zeros(8, np.float32))}
    usual = {"claim": CLAIM, "max_grad_norm": NORM, "seed": 0}
    return observe_loss_step(step, loss, params, tuple(map(make, batch)), **(usual | options))


def test_a_correct_step_of_torch_is_not_flagged_and_tight():
    recorder = watch(torch_step(), "torch")
    result = recorder.audit()
    assert result.verdict is not VIOLATION
    assert result.bound.epsilon > 0.85 * CLAIM.epsilon
    require_normal(recorder.observations, noise=NOISE)


@pytest.mark.few(2)
@pytest.mark.parametrize("broken", [{"noise": 0.8 * NOISE}, {"noise": 0.0}, {"clip": False}], ids=str)
def test_a_broken_step_of_torch_is_a_violation(broken):
    assert watch(torch_step(**broken), "torch").audit().verdict is VIOLATION


@pytest.mark.parametrize("is_by_size", [False, True])
def test_noise_that_depends_on_the_number_of_examples_is_found(is_by_size):
    sizes = []

    def of_size(size):
        sizes.append(size)
        return NOISE * (size / 40) ** 0.5 if is_by_size else NOISE

    diagnosis = watch(torch_step(of_size=of_size), "torch").diagnose(confidence=0.999)
    assert [finding.name for finding in diagnosis.findings][:1] == (["noise-by-batch"] if is_by_size else [])
    assert 2 <= len(set(sizes)) <= 3  # a compiled step is compiled for each size


@pytest.mark.long
def test_a_step_of_jax_that_returns_a_mean_is_scored():
    seen = watch(jax_step(normalize_by=12.0), "jax", batch_size=12, num_steps=40).observations
    require_normal(seen, noise=NOISE)


def test_a_step_of_jax_without_noise_is_a_violation():
    assert watch(jax_step(noise=0.0), "jax", num_steps=40).audit().verdict is VIOLATION


def test_a_step_that_uses_a_loss_of_its_own_gets_no_verdict():
    step = torch_step(noise=0.0)
    recorder = watch(
        lambda _, params, batch: step(lambda p, example: loss(p, example[0]), params, batch), "torch"
    )
    with pytest.raises(dpaudit.InputError, match="Scores must increase by 1 where a canary is present"):
        recorder.audit()


def test_what_has_no_gradient_or_the_wrong_one_is_refused():
    with pytest.raises(
        dpaudit.InputError, match="Parameters must be of JAX or torch, which compute gradients, got a ndarray"
    ):
        observe_loss_step(torch_step(), loss, np.zeros(3), INPUTS, claim=CLAIM, max_grad_norm=1.0)
    with pytest.raises(dpaudit.InputError, match="like the parameters, got"):
        watch(lambda _, params, __: params["bias"], "torch")
    with pytest.raises(dpaudit.InputError, match=r"same, nonzero number of examples, got \[3, 12\]"):
        watch(torch_step(), "torch", (INPUTS, TARGETS[:3]))
    with pytest.raises(dpaudit.InputError, match="like the parameters, got"):  # its order is not known
        watch(lambda _, params, __: torch.cat([params["bias"], params["weight"].reshape(-1)]), "torch")
    with pytest.raises(dpaudit.InputError, match="There are no parameters"):
        observe_loss_step(torch_step(), loss, {}, INPUTS, claim=CLAIM, max_grad_norm=1.0)
    with pytest.raises(dpaudit.InputError, match="must contain arrays, got a str"):
        observe_loss_step(torch_step(), loss, {"a": "b"}, INPUTS, claim=CLAIM, max_grad_norm=1.0)
