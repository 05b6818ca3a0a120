"""Parts of black-box audits besides training: trained models, initial weights, canaries and scores.

Initial weights may be worst-case (Annamalai and De Cristofaro 2024, arXiv:2405.14106). ``clip_bkd`` is the
canary least affected by clipping (Jagielski et al. 2020, arXiv:2006.07709). A score measures how strongly a
model's outputs suggest that it was trained on an example.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpaudit import _validate
from dpaudit.errors import InputError
from dpaudit.training._settings import Seeds, generator, initialize
from dpaudit.training.data import Dataset
from dpaudit.training.gradients import Loss, cross_entropy, flat_parameters, trainable

Score = Callable[[Tensor, int], Tensor]
"""Function from logits (models x classes) and a class to one number per model; larger means "present"."""


@dataclass(frozen=True, eq=False)
class TrainedModels:
    """Models of one architecture; ``weights`` has a flat row each, in the order of ``named_parameters()``."""

    weights: Tensor
    pattern: nn.Module

    def __len__(self) -> int:
        return len(self.weights)

    def logits(self, inputs: Tensor) -> Tensor:
        """Return the outputs of all models for the same inputs, with shape models x inputs x classes."""
        pattern = copy.deepcopy(self.pattern).to(self.weights.device).eval()
        with torch.inference_mode():
            outputs = [functional_call(pattern, named(pattern, row), (inputs,)) for row in self.weights]
        return torch.stack(outputs)

    def module(self, number: int) -> nn.Module:
        """Return one of the models as a new module."""
        model = copy.deepcopy(self.pattern).to(self.weights.device)
        with torch.no_grad():
            for name, value in named(model, self.weights[number]).items():
                model.get_parameter(name).copy_(value)
        return model


def named(model: nn.Module, flat: Tensor) -> dict[str, Tensor]:
    """Return the parts of a flat vector, keyed by parameter name."""
    parameters = trainable(model)
    pieces = torch.split_with_sizes(flat, [value.numel() for value in parameters.values()])
    return {
        name: piece.view_as(value) for (name, value), piece in zip(parameters.items(), pieces, strict=True)
    }


def with_weights(build: Callable[[], nn.Module], flat: Tensor) -> nn.Module:
    """Return a new model with these weights."""
    return TrainedModels(flat[None], pattern_of(build)).module(0)


def pattern_of(build: Callable[[], nn.Module]) -> nn.Module:
    """Return a model that can take the weights of any other model.

    Only the trained weights of a model are kept. All other values must be the same in every model, which is
    checked with a second model, built with another seed.
    """
    pattern, other = (initialize(build, seed) for seed in (0, 1))
    first, second = _not_trained(pattern), _not_trained(other)
    for name, value in first.items():
        if name not in second or not torch.equal(value, second[name]):
            raise InputError(
                "Frozen parameters and buffers must be the same in every model that build returns, but "
                f"{name!r} depends on the seed; make it trainable or set fixed values."
            )
    return pattern


def _not_trained(model: nn.Module) -> dict[str, Tensor]:
    frozen = {name: value for name, value in model.named_parameters() if not value.requires_grad}
    return frozen | dict(model.named_buffers())


def pretrained_weights(
    build: Callable[[], nn.Module],
    held_out: Dataset,
    *,
    num_steps: int = 1_000,
    batch_size: int = 64,
    learning_rate: float = 0.1,
    seed: int = 0,
    loss: Loss = cross_entropy,
) -> Tensor:
    """Return the flat weights of a model trained on ``held_out`` by SGD without privacy.

    Near a minimum the gradients of ordinary examples are small, and that of the canary stands out. The
    examples must not be in the private training data: the claim does not cover pre-training.
    """
    _validate.integer("num_steps", num_steps)
    size = min(_validate.integer("batch_size", batch_size), len(held_out))
    _validate.positive("learning_rate", learning_rate)
    seeds = Seeds.of(seed)
    model, rng = initialize(build, seeds.initialization), generator(seeds.sampling)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for _ in range(num_steps):
        inputs, targets = held_out.at(torch.randint(len(held_out), (size,), generator=rng))
        optimizer.zero_grad()
        loss(model(inputs), targets).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return flat_parameters(model)


@dataclass(frozen=True, eq=False)
class Example:
    """Input in the format of the data, and its class."""

    inputs: Tensor
    target: int

    def __post_init__(self) -> None:
        _validate.integer("target", self.target, low=0)


def joined(data: Dataset, example: Example) -> Dataset:
    """Return the data as model inputs, with the example appended."""
    if tuple(example.inputs.shape) != data.shape:
        raise InputError(f"The canary must have shape {data.shape}, got {tuple(example.inputs.shape)}.")
    return data.followed_by(example.inputs[None], torch.tensor([example.target]))


def clip_bkd(data: Dataset, model: nn.Module) -> Example:
    """Return an example in the direction of least variance, with the class that ``model`` finds least likely.

    Its input is the right singular vector of the data with the smallest singular value, scaled to the norm of
    the shortest nonzero example. If several directions have the same singular value, as happens with fewer
    examples than features, the one closest to the vector of ones is chosen. No other example is informative
    about its class, so a model's prediction for it reflects the canary. Its values may be outside the range
    of the data.
    """
    inputs, _ = data.at(torch.arange(len(data)))
    rows = inputs.flatten(1)
    squares, vectors = torch.linalg.eigh(rows.T.double() @ rows.double())  # by increasing singular value
    rounding = 1e-9 * squares[-1]  # smaller differences of squared singular values are rounding
    direction = _canonical_direction(vectors[:, squares <= squares[0] + rounding])
    norms = rows.norm(dim=1)
    length = norms[norms > 0].min() if bool((norms > 0).any()) else torch.tensor(1.0)
    inputs_of_canary = (direction.to(rows.dtype) * length).view(data.shape)
    model.eval()
    with torch.inference_mode():
        target = int(model(inputs_of_canary[None])[0].argmin())
    return Example(inputs_of_canary, target)


def _canonical_direction(space: Tensor) -> Tensor:
    """Return a direction in a space, independent of its basis: the projection of a fixed vector on it."""
    fixed = torch.ones(len(space), dtype=space.dtype)
    vectors = fixed, *torch.eye(len(space), dtype=space.dtype)
    projections = (space @ (space.T @ vector) for vector in vectors)
    long_enough = (projection for projection in projections if projection.norm() > 1e-3)
    return nn.functional.normalize(next(long_enough), dim=0)


def log_odds(logits: Tensor, target: int) -> Tensor:
    """Return log(p / (1 - p)) of the class: its logit minus the logsumexp of the others.

    Its distribution is approximately normal (Carlini et al. 2022, arXiv:2112.03570). It is not computed from
    p, which rounds to 1 if a model is confident.

    >>> log_odds(torch.tensor([[100.0, 0.0], [0.0, 0.0]]), target=0)
    tensor([100.,   0.], dtype=torch.float64)
    """
    others = logits.double()
    logit = others[:, target].clone()
    rest = torch.cat([others[:, :target], others[:, target + 1 :]], dim=1)
    return logit - rest.logsumexp(dim=1)


def negative_loss(logits: Tensor, target: int) -> Tensor:
    """Return the negative cross-entropy, which is the log-probability of the class."""
    return logits.double().log_softmax(dim=1)[:, target]
