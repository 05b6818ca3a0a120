"""Every way to the clipped sum gives what clipping each example's own gradient gives."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils.parametrizations import weight_norm

from dpaudit.errors import InputError
from dpaudit.training import Batch, cross_entropy, initialize
from dpaudit.training.gradients import (
    LinearRows,
    Loss,
    add_clipped,
    flat_zeros,
    is_plain_linear,
    num_parameters,
    per_example,
)
from dpaudit.training.models import conv_net, logistic_regression, mlp, wide_resnet


class Scaled(nn.Module):
    """A module with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 12))
        self.linear = nn.Linear(12, 3)

    def forward(self, values: Tensor) -> Tensor:
        return self.linear(values * self.scale)


class Bag(nn.Module):
    """An embedding, averaged over the words of an example."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.linear = nn.Linear(6, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.linear(self.embedding(words).mean(dim=1))


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
    model[2].weight = model[0].weight
    return model


def frozen() -> nn.Sequential:
    model = mlp(12, 8, 8, 3)
    model[1].requires_grad_(False)
    model[3].weight.requires_grad_(False)
    return model


def hooked() -> nn.Sequential:
    model = mlp(12, 8, 3)
    model[1].register_forward_hook(lambda _module, _inputs, output: 2 * output.tanh())
    return model


def sequence() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(15, 3))


MODELS = {
    "mlp": (lambda: mlp(12, 8, 5, 3), (12,), True),
    "mlp on images": (lambda: mlp(12, 8, 3), (3, 2, 2), True),
    "no bias": (lambda: nn.Sequential(nn.Linear(12, 4, bias=False), nn.GELU(), nn.Linear(4, 3)), (12,), True),
    "nested": (lambda: nn.Sequential(mlp(12, 8), nn.Sequential(nn.SiLU(), nn.Linear(8, 3))), (12,), True),
    "frozen": (frozen, (12,), True),
    "logistic regression": (lambda: logistic_regression(12, 3), (12,), True),
    "a linear layer alone": (lambda: nn.Linear(12, 3), (12,), True),
    "changed by a hook": (hooked, (12,), False),
    "in place": (
        lambda: nn.Sequential(nn.Linear(12, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)),
        (12,),
        False,
    ),
    "weight norm": (lambda: nn.Sequential(weight_norm(nn.Linear(12, 3))), (12,), False),
    "linear on sequences": (sequence, (3, 4), False),
    "conv_net": (lambda: conv_net(in_channels=1, num_classes=3), (1, 8, 8), False),
    "wide_resnet": (lambda: wide_resnet(10, 1, num_classes=3), (3, 8, 8), False),
    "custom parameter": (Scaled, (12,), False),
    "layer norm": (lambda: nn.Sequential(nn.Linear(12, 6), nn.LayerNorm(6), nn.Linear(6, 3)), (12,), False),
    "embedding": (Bag, (5,), False),
    "tied weights": (tied, (12,), False),
}


def made(name: str, num_examples: int = 37, multiplicity: int = 1) -> tuple[nn.Module, Batch]:
    build, shape, _ = MODELS[name]
    rng = torch.Generator().manual_seed(3)
    rows = num_examples * multiplicity
    if name == "embedding":
        inputs = torch.randint(20, (rows, *shape), generator=rng)
    else:
        inputs = torch.randn(rows, *shape, generator=rng)
    targets = torch.randint(3, (num_examples,), generator=rng)
    return initialize(build, seed=1), Batch(inputs, targets, multiplicity)


def oracle(model: nn.Module, batch: Batch, max_grad_norm: float) -> Tensor:
    """Each gradient in full, averaged over augmentations, clipped, added: slow and obvious."""
    parameters = {k: v.detach() for k, v in model.named_parameters() if v.requires_grad}

    def loss_of_one(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, values, (x[None],)), y[None])

    targets = batch.targets.repeat_interleave(batch.multiplicity)
    gradients = vmap(grad(loss_of_one), in_dims=(None, 0, 0))(parameters, batch.inputs, targets)
    rows = torch.cat([part.flatten(1) for part in gradients.values()], dim=1)
    rows = rows.view(len(batch), batch.multiplicity, -1).mean(dim=1)
    norms = rows.norm(dim=1, keepdim=True)
    return (rows * (max_grad_norm / norms).clamp(max=1.0)).sum(dim=0)


def clipped_sum(model: nn.Module, loss: Loss, batch: Batch, max_grad_norm: float) -> tuple[Tensor, Tensor]:
    """The sum of the clipped gradients, and their norms before."""
    vector = flat_zeros(model)
    return vector, add_clipped(per_example(model, loss, batch), max_grad_norm, vector)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("multiplicity", [1, 3])
def test_the_clipped_sum_is_that_of_every_examples_own_gradient(name: str, multiplicity: int) -> None:
    model, batch = made(name, multiplicity=multiplicity)
    found, norms = clipped_sum(model, cross_entropy, batch, 0.7)
    torch.testing.assert_close(found, oracle(model, batch, 0.7), atol=1e-5, rtol=1e-5)
    assert len(norms) == 37
    assert (norms > 0.7).any()


@pytest.mark.parametrize("name", ["mlp", "conv_net"])
def test_the_clipped_sum_of_several_chunks_is_that_of_their_examples(name: str) -> None:
    model, batch = made(name)
    parts = [
        Batch(batch.inputs[part], batch.targets[part]) for part in (slice(20), slice(20, 30), slice(30, 37))
    ]
    chunks = [rows for part in parts for rows in per_example(model, cross_entropy, part)]
    out = torch.zeros(num_parameters(model))
    norms = add_clipped(chunks, 0.7, out)
    torch.testing.assert_close(out, oracle(model, batch, 0.7), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(norms, clipped_sum(model, cross_entropy, batch, 0.7)[1])


@pytest.mark.parametrize("name", MODELS)
def test_book_keeping_is_chosen_for_linear_layers_and_nothing_else(name: str) -> None:
    model, batch = made(name, num_examples=2)
    (rows,) = per_example(model, cross_entropy, batch)
    assert isinstance(rows, LinearRows) == MODELS[name][2]


@pytest.mark.parametrize("name", ["mlp", "conv_net"])
def test_the_sum_of_an_empty_batch_is_zero(name: str) -> None:
    model, batch = made(name, num_examples=0)
    found, norms = clipped_sum(model, cross_entropy, batch, 1.0)
    assert len(norms) == 0
    torch.testing.assert_close(found, torch.zeros(num_parameters(model)))


@pytest.mark.parametrize("name", ["mlp", "conv_net", "layer norm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_example_whose_gradient_is_not_finite_adds_nothing(name: str, value: float) -> None:
    model, batch = made(name, num_examples=40)
    inputs = batch.inputs.clone()
    inputs[0] = value
    poisoned, _ = clipped_sum(model, cross_entropy, Batch(inputs, batch.targets), 0.7)
    without, _ = clipped_sum(model, cross_entropy, Batch(inputs[1:], batch.targets[1:]), 0.7)
    torch.testing.assert_close(poisoned, without, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["mlp", "conv_net"])
def test_one_example_adds_at_most_the_clipping_norm(name: str) -> None:
    model, batch = made(name, num_examples=1)
    huge = Batch(batch.inputs * 1e4, batch.targets)
    found, norms = clipped_sum(model, cross_entropy, huge, 0.1)
    assert norms.item() > 0.1
    assert found.norm().item() == pytest.approx(0.1, rel=1e-5)


@pytest.mark.parametrize("name", ["mlp", "conv_net"])
def test_gradients_and_parameters_of_the_model_stay_as_they_were(name: str) -> None:
    model, batch = made(name)
    before = [value.clone() for value in model.parameters()]
    clipped_sum(model, cross_entropy, batch, 1.0)
    assert all(value.grad is None for value in model.parameters())
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("name", ["mlp", "conv_net"])
def test_a_loss_that_was_averaged_is_refused(name: str) -> None:
    model, batch = made(name)
    with pytest.raises(InputError, match="one number per example"):
        clipped_sum(model, nn.functional.cross_entropy, batch, 1.0)


def test_batch_normalisation_is_refused() -> None:
    model = nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(
        InputError, match=r"The model mixes the examples of a batch: 1 is a BatchNorm1d\. Use GroupNorm"
    ):
        clipped_sum(model, cross_entropy, made("mlp")[1], 1.0)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(InputError, match="has no parameter that requires a gradient"):
        clipped_sum(mlp(12, 3).requires_grad_(False), cross_entropy, made("mlp")[1], 1.0)


def test_a_flatten_that_mixes_examples_is_not_book_kept() -> None:
    assert not is_plain_linear(nn.Sequential(nn.Flatten(0), nn.Linear(12, 3)))


def test_inputs_must_be_as_many_as_targets_times_augmentations() -> None:
    with pytest.raises(InputError, match="Each target needs 2 inputs, got 3 inputs and 2 targets"):
        Batch(torch.zeros(3, 1), torch.zeros(2), multiplicity=2)


def test_dropout_is_drawn_for_each_example_apart() -> None:
    model = nn.Sequential(nn.Unflatten(1, (1, 12)), nn.Flatten(), nn.Dropout(0.5), nn.Linear(12, 3))
    same = Batch(torch.ones(8, 12), torch.zeros(8, dtype=torch.long))
    _, norms = clipped_sum(model, cross_entropy, same, 1.0)
    assert len(set(norms.tolist())) > 1
