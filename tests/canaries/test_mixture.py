"""The mixture: its shapes, lengths and places, and the steps that it leaves without canaries."""

from __future__ import annotations

import numpy as np
import pytest

import dpaudit
from dpaudit.canaries import SHAPES, CanaryPlan, Directions, Mixture, ParameterLayout

SMALL = ParameterLayout(
    ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", "scale"), ((40, 20), (40,), (3, 40), (3,), (1,))
)
FLAT = ParameterLayout.of([1000])


def plans(layout: ParameterLayout, num_canaries: int = 64) -> list[Directions]:
    draws = CanaryPlan(Mixture(), num_canaries, seed=0)
    return [draws.directions(index, layout) for index in range(12)]


@pytest.mark.parametrize("num_canaries", [1, 3, 4, 16, 64, 300, 600, SMALL.num_parameters])
def test_canaries_of_a_step_are_orthogonal_and_as_many_as_asked_for(num_canaries: int) -> None:
    for made in plans(SMALL, num_canaries):
        dense = made.dense()
        assert len(dense) == made.num_canaries == num_canaries
        np.testing.assert_allclose(dense @ dense.T, np.eye(num_canaries), atol=1e-12)


@pytest.mark.parametrize("layout", [SMALL, FLAT])
def test_sparse_forms_equal_the_dense_one(layout: ParameterLayout) -> None:
    rng = np.random.default_rng(0)
    vector, weights = rng.standard_normal(layout.num_parameters), rng.standard_normal(64)
    for made in plans(layout):
        dense, (values, coordinates) = made.dense(), made.padded()
        np.testing.assert_allclose(made.project(vector), dense @ vector)
        np.testing.assert_allclose(made.weighted_sum(weights), weights @ dense)
        np.testing.assert_allclose((values * vector[coordinates]).sum(axis=0), dense @ vector)


def test_every_named_parameter_has_a_canary_in_every_plan() -> None:
    for made in plans(SMALL):
        assert made.labels is not None
        single = made.labels.parameters[made.labels.shapes == SHAPES.index("single")]
        assert set(single) == set(range(5))


def test_few_canaries_reach_every_named_parameter_in_turn() -> None:
    found = {int(one) for made in plans(SMALL, 2) for one in made.labels.parameters}
    assert found == set(range(5))


def test_a_quarter_is_spread_in_one_shape_per_plan() -> None:
    shapes = [np.unique(made.labels.shapes[-16:]).tolist() for made in plans(SMALL)]
    assert shapes == [[1], [2], [3]] * 4
    for made in plans(SMALL):
        assert (np.count_nonzero(made.dense()[:48], axis=1) == 1).all()
        assert (np.count_nonzero(made.dense()[48:], axis=1) > 1).all()


def test_spread_shapes_stay_in_their_parameter_or_row() -> None:
    sizes = SMALL.sizes
    owners = np.repeat(np.arange(5), sizes)
    for made in plans(SMALL):
        for row, shape, parameter in zip(
            made.dense(), made.labels.shapes, made.labels.parameters, strict=True
        ):
            places = np.flatnonzero(row)
            if SHAPES[shape] == "dense":
                # the same length in every parameter that has room
                parts = [np.linalg.norm(row[owners == one]) for one in np.unique(owners[places])]
                np.testing.assert_allclose(parts, parts[0])
                assert len(parts) > 1
            else:
                assert set(owners[places]) == {parameter}
            if SHAPES[shape] == "row":
                width = SMALL.shapes[parameter][1]
                first = (np.cumsum(sizes) - sizes)[parameter]
                assert len(set((places - first) // width)) == 1


def test_lengths_reach_from_half_to_a_million_clipping_norms_for_every_parameter() -> None:
    found = [(made.lengths[i], made.labels.parameters[i]) for made in plans(SMALL) for i in range(48)]
    for parameter in range(5):
        assert {length for length, owner in found if owner == parameter} == {1.5, 10.0, 1e3, 1e6}
    for made in plans(SMALL):
        assert set(made.lengths[-3:]) <= {0.5, 0.95}
        assert (made.lengths[:-3] > 1).all()


def test_lengths_fit_the_data_type() -> None:
    layout = ParameterLayout(SMALL.names, SMALL.shapes, largest=16.0)
    assert max(made.lengths.max() for made in plans(layout)) == 16.0


def test_one_step_of_16_has_no_canary_and_one_only_short_ones() -> None:
    draws = CanaryPlan(Mixture(), 64, seed=0)
    present = np.stack([draws.coins(index) for index in range(3200)])
    counts = present.reshape(200, 16, 64).sum(axis=0)
    assert (counts[7] == 0).all()
    assert (counts[15, :61] == 0).all()
    usual = np.delete(counts, (7, 15), axis=0)
    assert (np.abs(usual - 100) < 60).all()
    assert (np.abs(counts[15, 61:] - 100) < 60).all()
    canary = draws.canary
    assert [index for index in range(16) if not canary.is_counted(index)] == [7, 15]
    found = plans(SMALL)  # where all are short, they have half the norm: 0.95 would not change the noise
    assert {float(found[index % 12].lengths[-1]) for index in range(15, 3200, 16)} == {0.5}
    assert {float(made.lengths[-1]) for made in found} == {0.5, 0.95}


def test_entries_of_a_data_set_are_long_and_may_join_every_step() -> None:
    canary = Mixture(short=False)
    assert canary.num_excluded(64) == 0
    assert all(canary.eligible(index, 64) is None for index in range(16))
    assert (canary.directions(64, 1000, np.random.default_rng(0)).lengths > 1).all()
    assert 10 < CanaryPlan(canary, 64, seed=0).entries().sum() < 54


def test_a_mixture_of_short_canaries_is_refused() -> None:
    with pytest.raises(dpaudit.InputError, match="scale"):
        Mixture(scale=1.0)


def test_a_large_model_needs_few_places() -> None:
    layout = ParameterLayout(
        tuple(map(str, range(100))), tuple((1000, 1000) if i % 2 else (1000,) for i in range(100))
    )
    for variant in range(3):
        made = Mixture().directions(1024, layout, np.random.default_rng(0), variant)
        assert made.shared is not None
        assert made.shared.values.shape == (4096, 64)
