"""The paper's models have the sizes they are known by."""

import pytest
import torch
from torch import nn

from dpaudit.errors import InputError
from dpaudit.training.gradients import num_parameters
from dpaudit.training.models import (
    WeightStandardizedConv2d,
    conv_net,
    logistic_regression,
    mlp,
    purchase_mlp,
    wide_resnet,
)


@pytest.mark.parametrize(
    ("model", "shape", "classes", "size"),
    [
        (conv_net(), (3, 32, 32), 10, 131_466),
        (conv_net(in_channels=1), (1, 8, 8), 10, 130_890),
        (purchase_mlp(), (600,), 100, 199_652),
        (logistic_regression(784, 10), (1, 28, 28), 10, 7_850),
        (wide_resnet(), (3, 32, 32), 10, 2_751_146),
        (wide_resnet(40), (3, 32, 32), 10, 8_955_050),
    ],
)
def test_a_model_has_its_known_size(
    model: nn.Module, shape: tuple[int, ...], classes: int, size: int
) -> None:
    assert num_parameters(model) == size
    with torch.no_grad():
        assert model(torch.zeros(2, *shape)).shape == (2, classes)


def test_standardised_filters_do_not_depend_on_their_scale_or_offset() -> None:
    first, second = (WeightStandardizedConv2d(2, 3, 3, bias=False) for _ in range(2))
    with torch.no_grad():
        second.weight.copy_(7 * first.weight + 5)
        inputs = torch.randn(2, 2, 6, 6)
        torch.testing.assert_close(first(inputs), second(inputs), atol=1e-4, rtol=1e-4)


def test_sizes_that_make_no_model_are_refused() -> None:
    with pytest.raises(InputError, match="depth must be 4 more than a multiple of 6, got 17"):
        wide_resnet(17)
    with pytest.raises(InputError, match="those of the input and the output"):
        mlp(5)
