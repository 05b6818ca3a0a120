"""All chance of a model comes from its own seed, and its batches are what the accounting assumes."""

import numpy as np
import pytest
import torch
from statistical_limits import count_range, room, size_variance_room

from dpaudit.training import DPSGD, SGD, Seeds
from dpaudit.training.ensemble._ensemble import drawn_batches
from dpaudit.training.models import mlp


def batches(
    seed: int, *, present: bool = True, num_examples: int = 40, sample_rate: float = 0.1, num_steps=500
):
    settings = DPSGD(
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=sample_rate,
        num_steps=num_steps,
        optimizer=SGD(learning_rate=0.1),
    )
    return drawn_batches(num_examples=num_examples, present=present, settings=settings, seeds=Seeds.of(seed))


def drawn(found, num_examples: int = 41) -> np.ndarray:
    table = np.zeros((len(found), num_examples))
    for row, batch in zip(table, found, strict=True):
        row[batch] += 1
    return table


def test_every_example_and_the_canary_are_drawn_by_fair_coins_of_their_own() -> None:
    table = drawn([batch for seed in range(10) for batch in batches(seed)])
    assert set(np.unique(table)) == {0.0, 1.0}
    fewest, most = count_range(len(table), 0.1, comparisons=3 * 41)
    assert fewest <= table.sum(axis=0).min()
    assert table.sum(axis=0).max() <= most
    correlations = np.corrcoef(table.T)[np.triu_indices(41, k=1)]
    assert np.abs(correlations).max() < room(1 / np.sqrt(len(table)), comparisons=3 * correlations.size)
    allowed = size_variance_room(41, 0.1, len(table), comparisons=3)
    assert table.sum(axis=1).var(ddof=1) == pytest.approx(41 * 0.09, abs=allowed)


def test_steps_do_not_depend_on_each_other() -> None:
    table = drawn(batches(1, num_steps=4000))
    before, after = table[:-1] - 0.1, table[1:] - 0.1
    assert abs((before * after).sum()) < room(0.09 * np.sqrt(before.size))


def test_the_rest_of_a_batch_does_not_depend_on_the_canary() -> None:
    for there, absent in zip(batches(7), batches(7, present=False), strict=True):
        assert np.array_equal(there[there < 40], absent)


def test_a_rate_of_one_takes_everybody_and_a_tiny_one_hardly_anybody() -> None:
    everybody = batches(1, sample_rate=1.0, num_steps=3)
    assert all(np.array_equal(batch, np.arange(41)) for batch in everybody)
    few = batches(1, sample_rate=1e-6, num_steps=3)
    assert len(few) == 3
    assert sum(map(len, few)) == 0


def test_a_model_does_not_depend_on_those_that_are_trained_beside_it(make) -> None:
    alone = make().train([8], [True]).weights[0]
    beside = make(models_at_once=2).train([1, 8, 5], [False, True, False]).weights[1]
    torch.testing.assert_close(alone, beside, atol=1e-6, rtol=1e-5)


def test_another_seed_gives_other_weights_and_the_same_seed_the_same(make) -> None:
    first, again, other = (make().train([seed], [True]).weights for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_given_weights_are_where_all_models_start(make) -> None:
    weights = torch.linspace(-0.1, 0.1, 64 * 16 + 16 + 16 * 10 + 10)
    still = make(initial_weights=weights, noise_multiplier=0.0, sample_rate=1e-9)
    assert torch.equal(still.train([1, 2], [True, False]).weights, weights.expand(2, -1))


def test_the_canary_counts_once_and_the_divisor_does_not_know_it(make) -> None:
    """The two models of a step on all data differ by the canary's clipped gradient over the same number."""
    weights = torch.zeros(64 * 10 + 10)
    made = make(
        build=lambda: mlp(64, 10), initial_weights=weights, noise_multiplier=0.0, sample_rate=1.0, num_steps=1
    )
    there, absent = made.train([1, 1], [True, False]).weights
    assert float((there - absent).norm()) == pytest.approx(0.5 * 0.5 / len(made.data), rel=1e-3)
