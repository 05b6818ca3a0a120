"""Scenarios in Opacus, each of which restores one of its past faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dpaudit.canaries import Dirac
from dpaudit.observers.opacus import observe  # first: its error message explains how to install Opacus
from dpaudit.recording import Recorder
from dpaudit.zoo._evidence import DELTA, NOISE, Evidence, Scenario, Scores, paper_claim
from dpaudit.zoo._steps import replayed

# isort: split
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

_NORM = 0.1  # well below the Opacus default of 1
_BATCH = 8


@contextmanager
def recorded(optimizer: Any, **options: Any) -> Iterator[Recorder]:
    """Observe the steps of an optimizer under the paper's claim; all canaries are alike."""
    with observe(optimizer, canary=Dirac(), noise_multiplier=NOISE, delta=DELTA, **options) as recorder:
        yield recorder


def flat(optimizer: Any, name: str = "grad") -> Tensor:
    """Return an attribute of all parameters as one vector."""
    return torch.cat([getattr(parameter, name).reshape(-1) for parameter in optimizer.params])


def _optimizer(kind: type[DPOptimizer], model: nn.Module, generator: torch.Generator) -> Any:
    return kind(
        torch.optim.SGD(model.parameters(), lr=0.01),
        noise_multiplier=NOISE,
        max_grad_norm=_NORM,
        expected_batch_size=_BATCH,
        loss_reduction="sum",
        generator=generator,
    )


class _Ghost:
    """A model with ghost clipping, assembled as in ``make_private``; sums are released, not means."""

    def __init__(self, model: nn.Module, *, module_norm: float = _NORM, optimizer: Any = None) -> None:
        self.module = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=module_norm, loss_reduction="sum"
        )
        self.generator = torch.Generator()
        self.optimizer = _optimizer(optimizer or DPOptimizerFastGradientClipping, model, self.generator)
        self.loss = DPLossFastGradientClipping(
            self.module, self.optimizer, nn.MSELoss(reduction="sum"), loss_reduction="sum"
        )

    def backward(self, inputs: Tensor, targets: Tensor) -> None:
        """Run the backward pass of a batch or of a part of it."""
        self.optimizer.zero_grad()
        loss = self.loss(self.module(_with_grad(inputs)), targets)
        loss.loss_per_sample = loss.loss_per_sample.flatten(1).sum(dim=1)  # one per example
        loss.backward()

    def released(self) -> Tensor:
        """Return the noisy sum that the optimizer would use."""
        self.optimizer.pre_step()
        return flat(self.optimizer)


def _with_grad(inputs: Tensor) -> Tensor:
    """Return inputs that require gradients, without which torch warns about backward hooks."""
    return inputs.clone().requires_grad_()


def ghost_default_clip(is_broken: bool, seed: int) -> Evidence:
    """Clip at the default norm of the model instead of the norm that the noise is calibrated to."""
    torch.manual_seed(seed)
    ghost = _Ghost(nn.Linear(8, 8), **({"module_norm": 1.0} if is_broken else {}))
    ghost.generator.manual_seed(seed)
    options = {"sample_rate": 1.0, "num_steps": 200, "seed": seed}
    with recorded(ghost.optimizer, module=ghost.module, **options) as recorder:
        for _ in range(recorder.num_steps):
            ghost.backward(torch.randn(_BATCH, 8), torch.randn(_BATCH, 8))
            ghost.optimizer.step()
    return Evidence(claim=paper_claim(), num_steps=recorder.num_steps, scores=Scores.of(recorder))


def ghost_bias_norm(is_broken: bool, seed: int) -> Evidence:
    """Compute the norm of a bias gradient, a sum over sequence positions, from the norms of its parts."""
    torch.manual_seed(seed)
    ghost = _Ghost(nn.Linear(4, 4))
    inputs, targets = 0.01 * torch.randn(_BATCH, 16, 4), torch.ones(_BATCH, 16, 4)

    def release(count: int) -> Tensor:
        ghost.backward(inputs[:count], targets[:count])
        return ghost.released()

    with _norms_of_parts() if is_broken else nullcontext():
        return _replayed(release, ghost.generator, seed)


@contextmanager
def _norms_of_parts() -> Iterator[None]:
    """Sum the squares of a bias gradient by position, as if each position had its own bias."""
    samplers = GradSampleModuleFastGradientClipping.NORM_SAMPLERS
    correct = samplers[nn.Linear]

    def broken(layer: nn.Linear, activations: list[Tensor], backprops: Tensor) -> dict[Any, Tensor]:
        return {**correct(layer, activations, backprops), layer.bias: backprops.flatten(1).norm(dim=1)}

    samplers[nn.Linear] = broken
    try:
        yield
    finally:
        samplers[nn.Linear] = correct


def ghost_accumulate(is_broken: bool, seed: int) -> Evidence:
    """Process a batch in two parts, the second of which overwrites the sum of the first."""
    torch.manual_seed(seed)
    ghost = _Ghost(nn.Linear(8, 8), optimizer=_Aliasing if is_broken else None)
    inputs, targets = torch.randn(_BATCH, 8), torch.randn(_BATCH, 8)
    half = _BATCH // 2

    def release(count: int) -> Tensor:
        ghost.optimizer.signal_skip_step(do_skip=True)
        ghost.backward(inputs[:half], targets[:half])
        ghost.optimizer.pre_step()
        ghost.optimizer.signal_skip_step(do_skip=False)
        ghost.backward(inputs[half:count], targets[half:count])
        return ghost.released()

    return _replayed(release, ghost.generator, seed)


class _Aliasing(DPOptimizerFastGradientClipping):  # type: ignore[misc]
    """Optimizer whose sum aliases the first gradient, so that the next gradient overwrites it."""

    def accumulate(self) -> None:
        for parameter in self.params:
            if parameter.summed_grad is None:
                parameter.summed_grad = parameter.grad.data
            else:
                parameter.summed_grad.add_(parameter.grad.data)


class _Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(6, 6, bias=False) for _ in range(2))
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.first(inputs) + self.second(inputs)  # type: ignore[no-any-return]


class _RowForEachUse(GradSampleModule):  # type: ignore[misc]
    """Module in which each use of a weight gives the example another row, clipped separately."""

    def capture_backprops_hook(self, module: nn.Module, *arguments: Any, **options: Any) -> None:
        for parameter in module.parameters():
            parameter._forward_counter = 1  # type: ignore[attr-defined]  # as if it were the last use
        super().capture_backprops_hook(module, *arguments, **options)


def tied_weights(is_broken: bool, seed: int) -> Evidence:
    """Clip the two gradients that one example has for a shared weight separately."""
    torch.manual_seed(seed)
    model = _Tied()
    kind = _RowForEachUse if is_broken else GradSampleModule
    module, generator = kind(model, loss_reduction="sum"), torch.Generator()
    optimizer = _optimizer(DPOptimizer, model, generator)
    inputs, targets = torch.randn(_BATCH, 6), torch.randn(_BATCH, 6)

    def release(count: int) -> Tensor:
        optimizer.zero_grad()
        outputs = module(_with_grad(inputs[:count]))
        loss = nn.functional.mse_loss(outputs, targets[:count], reduction="sum")
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.pre_step()
        return flat(optimizer)

    return _replayed(release, generator, seed)


def _replayed(release: Callable[[int], Tensor], generator: torch.Generator, seed: int) -> Evidence:
    """Replay a batch with and without its last example."""
    return replayed(
        release,
        _BATCH,
        [_BATCH - 1],
        reseed=lambda: generator.manual_seed(seed),
        max_grad_norm=_NORM,
    )


SCENARIOS: Mapping[str, Scenario] = {
    "ghost-default-clip": ghost_default_clip,
    "ghost-bias-norm": ghost_bias_norm,
    "ghost-accumulate": ghost_accumulate,
    "tied-weights": tied_weights,
}
