"""Canaries of one description are the same with torch and with JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax_runs import loss, start
from torch import nn

import dpaudit
from dpaudit._torch import HeldOutData
from dpaudit._torch._crafting import Crafting
from dpaudit._torch._crafting import mean_gradient as torch_mean_gradient
from dpaudit.observers.jax_privacy import hold_out
from dpaudit.observers.jax_privacy._input_observer import JaxCrafting, first_examples, mean_gradient

NORM = 0.8
RNG = np.random.default_rng(3)
TABLE = RNG.standard_normal((250, 12)).astype(np.float32)
CLASSES = RNG.integers(0, 10, 250).astype(np.int64)
SIGNS = np.where(TABLE > 0, 1.0, -1.0).astype(np.float32)
INPUTS = {
    "table": TABLE,
    "far from zero": TABLE + 9,
    "below zero": TABLE - 9,
    "bits": (TABLE > 0).astype(np.float32),
    "signs": SIGNS,
    "negative and positive": np.where(TABLE > 0, 1.0, -3.0).astype(np.float32),
    "images of signs": SIGNS.reshape(250, 3, 4),
}
# what is nearest to zero; halfway, the smaller value
BLANKS = {"bits": 0.0, "signs": -1.0, "negative and positive": 1.0, "images of signs": -1.0}


def held(name):
    """The same held-out examples for both; 67 are not a multiple of any size of chunks."""
    arrays = hold_out(INPUTS[name], CLASSES, 67, num_classes=10)[1]
    tensors = HeldOutData.split_off(torch.from_numpy(arrays.inputs), torch.from_numpy(arrays.targets), 10)
    return arrays, tensors


def model():
    """The model of ``loss``, with the same weights."""
    made, params = nn.Linear(12, 10), start()
    with torch.no_grad():
        made.weight.copy_(torch.from_numpy(np.array(params["weight"])).T)
        made.bias.copy_(torch.from_numpy(np.array(params["bias"])))
    return made


@jax.jit
def gradient(one, target):
    found = jax.grad(loss)(start(), (one[None], target[None]))
    return jnp.concatenate([found["weight"].T.ravel(), found["bias"]])  # in the order of torch


def crafting(tensors):
    each = nn.CrossEntropyLoss(reduction="none")
    return Crafting(model=model(), loss=each, data=tensors, max_grad_norm=NORM)


@pytest.mark.parametrize("canary", [dpaudit.Blank(), dpaudit.Mislabelled()], ids=repr)
@pytest.mark.parametrize("name", INPUTS)
def test_canaries_that_no_weights_make_are_the_same(canary, name):
    arrays, tensors = held(name)
    inputs, targets = first_examples(canary, arrays, 9, np.random.default_rng(5))
    made = crafting(tensors)(canary, 9, np.random.default_rng(5))
    np.testing.assert_array_equal(inputs, made.inputs.numpy())
    np.testing.assert_array_equal(targets, made.targets.numpy())
    if isinstance(canary, dpaudit.Blank) and name in BLANKS:
        assert set(inputs.ravel().tolist()) == {BLANKS[name]}


def test_the_mean_gradient_is_of_all_held_out_examples():
    arrays, tensors = held("table")
    each = nn.CrossEntropyLoss(reduction="none")
    found = torch.cat([part.reshape(-1) for part in torch_mean_gradient(model(), each, tensors).values()])
    one_by_one = np.mean(
        [gradient(*pair) for pair in zip(arrays.inputs, arrays.targets, strict=True)], axis=0
    )
    np.testing.assert_allclose(mean_gradient(arrays, gradient), one_by_one, atol=1e-6)
    np.testing.assert_allclose(found.numpy(), one_by_one, atol=1e-6)


def loss_of_one(one, target):
    return loss(start(), (one[None], target[None]))


MOVED = [
    dpaudit.Crafted(num_steps=8, step_size=0.05),
    dpaudit.Crafted(num_steps=8, step_size=0.25, long=True),
    dpaudit.Adversarial(num_steps=8, step_size=0.02, radius=0.05),
    dpaudit.Adversarial(num_steps=8, step_size=0.3, radius=0.3),
]


@pytest.mark.few(4)
@pytest.mark.parametrize("canary", MOVED, ids=repr)
@pytest.mark.parametrize("name", ["table", "bits", "negative and positive"])
def test_canaries_that_are_moved_are_the_same(canary, name):
    arrays, tensors = held(name)
    inputs, targets = first_examples(canary, arrays, 6, np.random.default_rng(5))
    move = JaxCrafting(data=arrays, loss=loss_of_one, gradient=gradient, max_grad_norm=NORM)
    found = np.asarray(move(canary, jnp.asarray(inputs), jnp.asarray(targets)))
    made = crafting(tensors)(canary, 6, np.random.default_rng(5))
    assert np.abs(found - inputs).max() > 0.1  # it moved
    np.testing.assert_allclose(found, made.inputs.numpy(), atol=1e-4)
    if name != "table":
        assert set(found.ravel()) <= set(arrays.inputs.ravel())
