"""Canary gradients are unit vectors that never meet, drawn from the seed, and held without their zeros."""

import jax
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from statistical_limits import room

import dpaudit
from dpaudit._torch import CanaryVectors
from dpaudit.canaries import GradientCanary
from dpaudit.observers.jax_privacy._canaries import JaxCanaryVectors

KINDS = [dpaudit.Dirac, dpaudit.Constant, dpaudit.Mixture, dpaudit.RandomDirection]


def directions(canary, num_canaries, num_parameters, seed=0):
    return canary.directions(num_canaries, num_parameters, np.random.default_rng(seed))


@pytest.mark.parametrize("kind", KINDS)
@given(size=st.integers(1, 60), share=st.floats(0.0, 1.0), seed=st.integers(0, 99))
def test_canaries_of_a_step_are_orthonormal(kind, size, share, seed):
    count = 1 + int(share * (size - 1))
    dense = directions(kind(), count, size, seed).dense()
    assert dense.shape == (count, size)
    np.testing.assert_allclose(dense @ dense.T, np.eye(count), atol=1e-6)
    assert kind is dpaudit.Mixture or ((dense != 0).sum(axis=0) <= 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_canaries_and_another_one_others(kind):
    first, again, other = (directions(kind(), 20, 1000, seed).dense() for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("kind", KINDS)
def test_many_canaries_take_no_more_numbers_than_the_model_has(kind):
    found = directions(kind(), 1000, 100_000)
    assert found.values.size <= 100_000


def test_a_constant_canary_alone_is_the_papers():
    dense = directions(dpaudit.Constant(), 1, 16).dense()
    np.testing.assert_allclose(np.abs(dense), 0.25)
    assert len(np.unique(dense)) == 1


def test_several_constant_canaries_all_reach_into_every_layer():
    dense = directions(dpaudit.Constant(), 4, 400).dense()
    for part in np.split(dense, 10, axis=1):  # ten layers of forty parameters
        assert (part != 0).any(axis=1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_every_library_has_the_same_canaries(kind):
    found, vector = directions(kind(), 6, 31), np.random.default_rng(1).standard_normal(31)
    weights, numbers = np.arange(1.0, 7.0), np.array([0, 2, 5])
    in_torch = CanaryVectors.of(found, torch.zeros(31, dtype=torch.float64))
    in_jax = JaxCanaryVectors.of(found)
    dense = found.dense()
    for projected in (in_torch.project(torch.as_tensor(vector)), in_jax.project(jax.numpy.asarray(vector))):
        np.testing.assert_allclose(projected, dense @ vector, atol=1e-5)
    moved = torch.zeros(31, dtype=torch.float64)
    in_torch.add_some(torch.as_tensor(numbers), torch.as_tensor(weights[numbers]), moved)
    np.testing.assert_allclose(moved, weights[numbers] @ dense[numbers], atol=1e-6)
    np.testing.assert_allclose(found.weighted_sum(weights), weights @ dense, atol=1e-6)
    np.testing.assert_allclose(in_jax.weighted_sum(jax.numpy.asarray(weights)), weights @ dense, atol=1e-5)


def test_a_random_direction_prefers_no_coordinate():
    total = sum(directions(dpaudit.RandomDirection(), 1, 10, seed).dense()[0] ** 2 for seed in range(2000))
    spread = np.sqrt(2 * 9 / (100 * 12))  # of the squared coordinate of a direction, a Beta(1/2, 9/2) number
    np.testing.assert_allclose(total / 2000, 0.1, atol=room(spread / np.sqrt(2000), comparisons=10))


def test_diracs_reach_every_coordinate():
    dense = directions(dpaudit.Dirac(), 50, 50).dense()
    np.testing.assert_array_equal(np.sort(dense.argmax(axis=1)), np.arange(50))


@pytest.mark.parametrize("kind", KINDS)
def test_more_canaries_than_parameters_are_refused(kind):
    with pytest.raises(dpaudit.InputError, match=r"num_canaries must be at most 10, .*, got 11"):
        directions(kind(), 11, 10)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), "ten"])
def test_a_scale_that_is_no_length_is_refused(scale):
    with pytest.raises(dpaudit.InputError, match="scale must be "):
        dpaudit.Dirac(scale=scale)


def test_canaries_are_frozen_values():
    assert dpaudit.Dirac(scale=2.0) == dpaudit.Dirac(scale=2.0) != dpaudit.Dirac()
    assert issubclass(dpaudit.Dirac, GradientCanary)
    with pytest.raises(AttributeError):
        dpaudit.Dirac().scale = 3.0


def test_threat_models_are_called_as_in_configurations():
    assert [model.value for model in dpaudit.ThreatModel] == ["gradient", "input", "black-box"]
