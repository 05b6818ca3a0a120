"""What is read off the models, and the canaries and weights that make it tell more."""

import pytest
import torch
from torch import nn

from dpaudit.errors import InputError
from dpaudit.training import accuracy, initialize
from dpaudit.training.data import Dataset, digits, random_images
from dpaudit.training.ensemble import (
    Example,
    clip_bkd,
    log_odds,
    negative_loss,
    pretrained_weights,
    with_weights,
)
from dpaudit.training.models import mlp


def small() -> nn.Sequential:
    return mlp(64, 16, 10)


def test_the_log_odds_are_those_of_the_probability() -> None:
    logits = torch.randn(5, 10, generator=torch.Generator().manual_seed(1))
    p = logits.double().softmax(dim=1)[:, 4]
    torch.testing.assert_close(log_odds(logits, 4), torch.log(p / (1 - p)))
    torch.testing.assert_close(negative_loss(logits, 4), torch.log(p))


def test_the_log_odds_of_a_sure_model_are_finite() -> None:
    logits = torch.tensor([[0.0, 3e4, 0.0], [3e4, 0.0, 3e4]])
    assert log_odds(logits, 1).tolist() == pytest.approx([3e4, -3e4], abs=1.0)


def test_scores_are_those_of_the_trained_modules(make) -> None:
    made = make()
    models = made.train([1, 2], [True, False])
    expected = [log_odds(models.module(i)(made.canary.inputs[None]).detach(), 3)[0] for i in range(2)]
    torch.testing.assert_close(made.scores([1, 2], [True, False]), torch.stack(expected))


def test_a_model_that_diverged_has_a_score_that_can_be_ordered(make) -> None:
    broken = make(initial_weights=torch.full((64 * 16 + 16 + 16 * 10 + 10,), float("nan")))
    assert broken.scores([1], [True]).tolist() == [torch.finfo(torch.float64).min]


def test_bytes_are_brought_to_the_range_of_the_models_inputs(make) -> None:
    pixels = random_images(50, shape=(1, 8, 8))
    floats = Dataset(pixels.at(torch.arange(50))[0], pixels.targets, 10)
    white = torch.full((1, 8, 8), 255, dtype=torch.uint8)
    read = make(data=pixels, canary=Example(white, 3)).scores([1], [True])
    assert torch.equal(read, make(data=floats, canary=Example(torch.ones(1, 8, 8), 3)).scores([1], [True]))


def test_pretrained_weights_do_well_on_the_examples_they_come_from() -> None:
    held_out = digits().split(400)[0]
    weights, again = (pretrained_weights(small, held_out, num_steps=300, seed=1) for _ in range(2))
    assert torch.equal(weights, again)
    assert accuracy(with_weights(small, weights), held_out) > 0.85


def test_the_clip_bkd_canary_of_few_examples_does_not_depend_on_their_order(data) -> None:
    few = data.split(20)[0]  # of 64 features
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    turned = Dataset(few.inputs[order], few.targets[order], few.num_classes)
    model = initialize(lambda: mlp(64, 16, 10), 0)
    one, other = (clip_bkd(part, model) for part in (few, turned))
    torch.testing.assert_close(one.inputs, other.inputs, atol=1e-5, rtol=0)
    assert one.target == other.target
    assert float((few.at(torch.arange(20))[0].flatten(1) @ one.inputs.flatten()).abs().max()) < 1e-4


def test_the_clip_bkd_canary_lies_where_the_data_do_not(data) -> None:
    model = with_weights(small, pretrained_weights(small, data, num_steps=100))
    canary = clip_bkd(data, model)
    rows, direction = data.inputs.flatten(1), canary.inputs.flatten() / canary.inputs.norm()
    others = torch.randn(64, 200, generator=torch.Generator().manual_seed(1))
    smallest = ((rows @ (others / others.norm(dim=0))).square().sum(dim=0)).min()
    assert (rows @ direction).square().sum() < 0.01 * smallest
    assert canary.inputs.norm() == pytest.approx(rows.norm(dim=1).min().item(), rel=1e-5)
    assert canary.target == int(model(canary.inputs[None]).argmin())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"canary": Example(torch.zeros(8, 8), 3)}, r"The canary must have shape \(1, 8, 8\), got \(8, 8\)"),
        ({"canary": Example(torch.zeros(1, 8, 8), 10)}, "Classes must be between 0 and 9, got 0 to 10"),
        ({"initial_weights": torch.zeros(3)}, r"vector of length 1,210, got shape \(3,\)"),
        ({"models_at_once": 0}, "models_at_once must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_used_is_named(make, options, sentence) -> None:
    with pytest.raises(InputError, match=sentence):
        make(**options).train([1], [True])


def test_as_many_flags_as_seeds_are_expected(make) -> None:
    with pytest.raises(InputError, match="got 2 and 1"):
        make().train([1, 2], [True])
