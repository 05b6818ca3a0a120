"""An ensemble trains the models that the slow and obvious loop trains with the same draws."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from dpaudit.errors import InputError
from dpaudit.training import SGD, Adam, GaussianSum, Seeds, Training, generator, initialize
from dpaudit.training.broken import ClippedAfterMean, NoiseTooSmall, NoNoiseWhenEmpty, Silent, Unclipped
from dpaudit.training.ensemble import Ensemble, log_odds, with_weights
from dpaudit.training.ensemble._ensemble import DrawnBatches, drawn_batches
from dpaudit.training.ensemble._models import joined
from dpaudit.training.gradients import flat_parameters
from dpaudit.training.models import conv_net, logistic_regression, mlp

SEEDS, PRESENT = [3, 2**127 + 5, 4], [True, False, True]


class Opaque(nn.Module):
    """A model of which an ensemble cannot see that it is a chain."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, values: Tensor) -> Tensor:
        return self.inner(values)


def small_conv() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 5, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(5, 4, 2, bias=False, dilation=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(4, 10),
    )


BUILDS = {
    "logistic regression": lambda: logistic_regression(64, 10),
    "deep": lambda: mlp(64, 40, 12, 9, 10),
    "no bias": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8, bias=False), nn.GELU(), nn.Linear(8, 10, bias=False)
    ),
    "in place": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 12), nn.ReLU(inplace=True), nn.Linear(12, 10)
    ),
    "convolutions": small_conv,
    "conv_net": lambda: conv_net(in_channels=1),
}

MECHANISMS = {
    "correct": GaussianSum,
    "noise too small": lambda **terms: NoiseTooSmall(factor=0.3, **terms),
    "not clipped": Unclipped,
    "clipped late": ClippedAfterMean,
    "no noise when empty": NoNoiseWhenEmpty,
    "neither": Silent,
}


def slow_models(ensemble: Ensemble, seeds: list[int], present: list[bool]) -> Tensor:
    """One model after another, each gradient in full."""
    found = []
    for seed, there in zip(map(Seeds.of, seeds), present, strict=True):
        batches = drawn_batches(
            num_examples=len(ensemble.data), present=there, settings=ensemble.settings, seeds=seed
        )
        model = initialize(ensemble.build, seed.initialization)
        noise = generator(seed.noise)
        for batch in batches:
            slow_step(ensemble, model, torch.from_numpy(batch), noise)
        found.append(flat_parameters(model))
    return torch.stack(found)


def slow_step(ensemble: Ensemble, model: nn.Module, batch: Tensor, noise: torch.Generator) -> None:
    inputs = torch.cat([ensemble.data.inputs, ensemble.canary.inputs[None]])[batch]
    targets = torch.cat([ensemble.data.targets, torch.tensor([ensemble.canary.target])])[batch]
    settings = ensemble.settings

    def loss_of_one(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, values, (x[None],)), y[None])

    values = {name: value.detach() for name, value in model.named_parameters()}
    total = torch.zeros_like(flat_parameters(model))
    if len(batch):
        gradients = vmap(grad(loss_of_one), in_dims=(None, 0, 0))(values, inputs, targets)
        rows = torch.cat([part.flatten(1) for part in gradients.values()], dim=1)
        norms = rows.norm(dim=1, keepdim=True)
        total = (rows * (settings.max_grad_norm / norms).clamp(max=1.0)).sum(dim=0)
    total += (
        torch.empty_like(total).normal_(generator=noise) * settings.noise_multiplier * settings.max_grad_norm
    )
    update = total / (settings.sample_rate * len(ensemble.data))
    new = flat_parameters(model) - settings.optimizer.learning_rate * update
    nn.utils.vector_to_parameters(new, model.parameters())


@pytest.mark.parametrize("name", BUILDS)
def test_the_models_are_those_of_a_slow_loop(make, name) -> None:
    ensemble = make(build=BUILDS[name])
    assert ensemble.at_once > 1
    found = ensemble.train(SEEDS, PRESENT).weights
    torch.testing.assert_close(found, slow_models(ensemble, SEEDS, PRESENT), atol=1e-5, rtol=1e-4)
    loose = make(build=BUILDS[name], mechanism=Unclipped(noise_multiplier=1.0, max_grad_norm=0.5))
    assert not torch.allclose(found, loose.train(SEEDS, PRESENT).weights)  # the clip matters


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_mechanism_does_to_an_ensemble_what_it_does_to_a_training(make, mechanism) -> None:
    def made(build, rate):
        broken = MECHANISMS[mechanism](noise_multiplier=1.0, max_grad_norm=0.5)
        return make(build=build, mechanism=broken, sample_rate=rate).train(SEEDS, PRESENT).weights

    for rate in (0.1, 0.004):  # with the smaller one, some batches are empty
        together, alone = made(lambda: mlp(64, 16, 10), rate), made(lambda: Opaque(mlp(64, 16, 10)), rate)
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(learning_rate=0.3, momentum=0.9),
        SGD(learning_rate=0.3, momentum=0.5, weight_decay=0.1),
        Adam(learning_rate=0.01, weight_decay=0.1),
    ],
)
def test_momentum_and_weight_decay_are_those_of_torch(make, optimizer) -> None:
    assert make(optimizer=optimizer).at_once > 1
    together = make(optimizer=optimizer).train(SEEDS, PRESENT).weights
    alone = make(optimizer=optimizer, build=lambda: Opaque(mlp(64, 16, 10))).train(SEEDS, PRESENT).weights
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)


class Other(SGD):
    """An optimizer that an ensemble does not know."""


def test_what_is_not_known_is_trained_one_after_another(make) -> None:
    assert make(optimizer=Other(learning_rate=0.1)).at_once == 1
    assert make(build=lambda: Opaque(mlp(64, 10))).at_once == 1
    dropout = make(build=lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10)))
    assert dropout.at_once == 1
    first, again = (dropout.train([1, 2], [True, True]).weights for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.allclose(first[0], first[1])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["deep", "convolutions"])
def test_a_canary_whose_gradient_is_not_finite_adds_nothing(make, name, value) -> None:
    ensemble = make(build=BUILDS[name], sample_rate=0.5)
    broken = make(
        build=BUILDS[name], sample_rate=0.5, canary=type(ensemble.canary)(torch.full((1, 8, 8), value), 3)
    )
    without = ensemble.train(SEEDS, [False] * 3).weights
    torch.testing.assert_close(broken.train(SEEDS, [True] * 3).weights, without, atol=1e-5, rtol=1e-4)


def with_frozen_layer(*, is_random: bool) -> nn.Sequential:
    """Its first layer is not trained."""
    model = mlp(64, 16, 10)
    first = next(layer for layer in model if isinstance(layer, nn.Linear))
    if not is_random:
        nn.init.eye_(first.weight)
        nn.init.constant_(first.bias, 0.25)
    first.requires_grad_(requires_grad=False)
    return model


def test_a_frozen_layer_of_fixed_values_is_there_while_training_and_when_scored(make) -> None:
    ensemble = make(build=partial(with_frozen_layer, is_random=False), num_steps=20)
    found, scores = ensemble.train(SEEDS, PRESENT), ensemble.scores(SEEDS, PRESENT)
    for number, (seed, there) in enumerate(zip(map(Seeds.of, SEEDS), PRESENT, strict=True)):
        model = trained_alone(ensemble, seed, there=there)
        torch.testing.assert_close(found.weights[number], flat_parameters(model))
        logits = model.eval()(ensemble.canary.inputs[None])
        torch.testing.assert_close(scores[number : number + 1], log_odds(logits, ensemble.canary.target))
        torch.testing.assert_close(found.module(number).state_dict(), model.state_dict())


def trained_alone(ensemble: Ensemble, seeds: Seeds, *, there: bool) -> nn.Module:
    """What ``Training`` makes of a model with the same draws."""
    terms = {"settings": ensemble.settings, "seeds": seeds}
    data, size = joined(ensemble.data, ensemble.canary), len(ensemble.data)
    batches = drawn_batches(num_examples=size, present=there, **terms)
    training = Training(
        initialize(ensemble.build, seeds.initialization),
        data,
        sampling=DrawnBatches(batches),
        expected_batch_size=ensemble.expected_batch_size,
        **terms,
    )
    for _ in training.run():
        pass
    return training.model


class RandomBuffer(nn.Module):
    """Random features that are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("features", torch.randn(64, 5))
        self.last = nn.Linear(5, 10)

    def forward(self, values: Tensor) -> Tensor:
        return self.last(values.flatten(1) @ self.features)


@pytest.mark.parametrize(
    ("build", "name"),
    [(partial(with_frozen_layer, is_random=True), r"1\.weight"), (RandomBuffer, "features")],
)
def test_what_is_neither_trained_nor_the_same_in_all_models_is_refused(make, build, name) -> None:
    with pytest.raises(InputError, match=f"'{name}' depends on the seed"):
        make(build=build)
    with pytest.raises(InputError, match="the same in every model that build returns"):
        with_weights(build, flat_parameters(build()))
