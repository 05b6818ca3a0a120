"""Training with Opacus, how it is judged, and scenarios that restore past faults of Opacus itself.

Loops are observed. Other scenarios are not run at all, because their settings show the fault, or they are
replayed: one step, on batches that differ in one example.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpaudit.canaries import Dirac
from dpaudit.diagnostics import Finding
from dpaudit.observers.opacus import check, observe, replay  # first: its error explains how to install Opacus
from dpaudit.recording import Recorder
from dpaudit.zoo._evidence import DELTA, NOISE, Evidence, Scenario, Scores, paper_claim
from dpaudit.zoo._steps import replayed

# isort: split
from opacus import PrivacyEngine
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizerFastGradientClipping

FEATURES, CLASSES = 8, 2
NUM_EXAMPLES, BATCH = 400, 20
NUM_REPLAYED = 8
GHOST, _SUM = {"grad_sample_mode": "ghost"}, {"loss_reduction": "sum"}
_NUM_STEPS = 120
Batch = tuple[Tensor, Tensor]


@dataclass
class Private:
    """A training run that ``make_private`` prepared."""

    model: Any
    optimizer: Any
    loader: Any
    criterion: Any
    published: list[nn.Module] = field(default_factory=list)
    """What is released besides the model."""
    batches: Any = None
    """What the loop iterates over, by default the loader."""
    begin_phase: Callable[[], object] = lambda: None
    """What happens at the start of each phase of several."""

    def step(self, batch: Batch, loss: Callable[..., Tensor] | None = None) -> None:
        """Run one step, by default a correct one."""
        self.backward(batch, loss)
        self.optimizer.step()

    def backward(self, batch: Batch, loss: Callable[..., Tensor] | None = None) -> None:
        """Run the backward pass of a batch or of a part of it."""
        inputs, targets = batch
        self.optimizer.zero_grad()
        (loss or self.criterion)(self.model(inputs), targets).backward()


_Step = Callable[[Batch], None]


def small_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def examples() -> TensorDataset:
    inputs = torch.randn(NUM_EXAMPLES, FEATURES)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def _private(
    seed: int,
    *,
    data: Callable[[], Dataset[Any]] = examples,
    model: Callable[[], nn.Module] = small_model,
    batch_size: int = BATCH,
    max_grad_norm: float = 1.0,
    loss_reduction: str = "mean",
    engine: Callable[[], PrivacyEngine] = PrivacyEngine,
    optimizer: type[torch.optim.SGD] = torch.optim.SGD,
    **options: Any,
) -> Private:
    """Prepare a small training run."""
    torch.manual_seed(seed)
    network, criterion = model(), nn.CrossEntropyLoss(reduction=loss_reduction)
    wrapped, private_optimizer, *criteria, loader = engine().make_private(
        module=network,
        optimizer=optimizer(network.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=batch_size),
        criterion=criterion,
        noise_multiplier=NOISE,
        max_grad_norm=max_grad_norm,
        loss_reduction=loss_reduction,
        **options,
    )
    # ghost clipping adds a criterion
    return Private(wrapped, private_optimizer, loader, criteria[0] if criteria else criterion)


@dataclass(frozen=True, kw_only=True)
class PrivateTraining:
    """A small training run, and what is wrong with it.

    The broken run has the options of ``broken``, too. Then ``fault`` changes it, or ``fix`` its twin. A
    ``step`` is the broken step.
    """

    judge: Callable[[Private, int, _Step], Evidence]
    options: Mapping[str, Any] = field(default_factory=dict)
    broken: Mapping[str, Any] = field(default_factory=dict)
    fault: Callable[[Private], None] = lambda _: None
    fix: Callable[[Private], None] = lambda _: None
    step: Callable[[Private, Batch], None] | None = None

    def __call__(self, is_broken: bool, seed: int) -> Evidence:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of Opacus and torch that every user sees
            private = _private(seed, **{**self.options, **(self.broken if is_broken else {})})
            (self.fault if is_broken else self.fix)(private)
            broken = None if self.step is None or not is_broken else partial(self.step, private)
            return self.judge(private, seed, broken or private.step)


def assign(path: str, value: Any) -> Callable[[Private], None]:
    """Return a change of one attribute of a run, such as ``optimizer.generator``."""
    *owners, name = path.split(".")
    return lambda private: setattr(reduce(getattr, owners, private), name, value)


# how runs are judged


recorded = partial(observe, noise_multiplier=NOISE, delta=DELTA)
"""Observe the steps of an optimizer under the paper's claim."""


def _run_loop(private: Private, seed: int, step: _Step, num_steps: int, **options: Any) -> Recorder:
    options |= {"loader": private.loader, "module": private.model, "seed": seed}
    rate = 1 / len(private.loader)
    with recorded(private.optimizer, sample_rate=rate, num_steps=num_steps, **options) as recorder:
        batches = itertools.chain.from_iterable(itertools.repeat(private.batches or private.loader))
        while recorder.num_done < num_steps:
            step(next(batches))
    return recorder


def observed(private: Private, seed: int, step: _Step) -> Evidence:
    """Run a loop with default settings, and return what its observer recorded."""
    recorder = _run_loop(private, seed, step, _NUM_STEPS)
    return Evidence(claim=recorder.claim, num_steps=_NUM_STEPS, recorder=recorder)


def observed_phases(private: Private, seed: int, step: _Step) -> Evidence:
    """Run two phases of a training run, and return what the observer of the second recorded."""
    num_steps = _NUM_STEPS // 2
    for _ in range(2):
        private.begin_phase()
        recorder = _run_loop(private, seed, step, num_steps)
    return Evidence(claim=recorder.claim, num_steps=num_steps, recorder=recorder)


def scored(private: Private, seed: int, step: _Step) -> Evidence:
    """Run a loop with canaries that are alike, and return their scores."""
    recorder = _run_loop(private, seed, step, 200, canary=Dirac())
    return Evidence(claim=paper_claim(), num_steps=200, scores=Scores.of(recorder))


def settings(private: Private, _seed: int, _step: object, *, notes: str | None = None) -> Evidence:
    """Check the settings without running a step; a note that starts with ``notes`` counts as a finding."""
    report = check(private.optimizer, module=private.model, loader=private.loader)
    noted = [note for note in report.notes if notes is not None and note.startswith(notes)]
    findings = *report.findings, *(Finding.certain("data-set-size", note) for note in noted)
    return Evidence(claim=paper_claim(), num_steps=0, certain=findings)


def replayed_step(private: Private, _seed: int, step: _Step, *, non_finite: bool = False) -> Evidence:
    """Replay one step on neighboring batches; a non-finite release counts only if asked for."""
    result = replay(
        step,
        _replayed_batch(FEATURES),
        optimizer=private.optimizer,
        model=private.model,
        published_state=private.published,
    )
    findings = result.non_finite if non_finite else result.findings
    return Evidence(claim=paper_claim(), num_steps=1, certain=findings)


def _replayed_batch(*shape: int) -> Batch:
    return torch.randn(NUM_REPLAYED, *shape), torch.arange(NUM_REPLAYED) % CLASSES


def released(
    private: Private,
    seed: int,
    _step: object,
    *,
    shape: tuple[int, ...] = (FEATURES,),
    backward: Callable[[Private, Batch], None] = Private.backward,
) -> Evidence:
    """Replay the release of a batch, which is a sum, with and without its last example."""
    inputs, targets = _replayed_batch(*shape)

    def release(count: int) -> Tensor:
        backward(private, (inputs[:count], targets[:count]))
        private.optimizer.pre_step()
        return flat(private.optimizer)

    return replayed(
        release,
        NUM_REPLAYED,
        [NUM_REPLAYED - 1],
        reseed=lambda: torch.manual_seed(seed),
        max_grad_norm=private.optimizer.max_grad_norm,
    )


def flat(optimizer: Any, name: str = "grad") -> Tensor:
    """Return an attribute of all parameters as one vector."""
    return torch.cat([getattr(parameter, name).reshape(-1) for parameter in optimizer.params])


# past faults of Opacus


class _MeanOverPositions(nn.Module):
    """A layer that is used at many positions; inputs are small, so that its bias has most of the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(0.01 * inputs)
        return outputs.mean(dim=1)


def _norms_of_parts(private: Private) -> None:
    """Sum the squares of a bias gradient by position, as if each position had its own bias."""
    samplers = private.model.NORM_SAMPLERS
    correct = samplers[nn.Linear]

    def broken(layer: nn.Linear, activations: list[Tensor], backprops: Tensor) -> dict[Any, Tensor]:
        return {**correct(layer, activations, backprops), layer.bias: backprops.flatten(1).norm(dim=1)}

    private.model.NORM_SAMPLERS = {**samplers, nn.Linear: broken}


def _in_two_parts(private: Private, batch: Batch) -> None:
    inputs, targets = batch
    half = NUM_REPLAYED // 2
    private.optimizer.signal_skip_step(do_skip=True)
    private.backward((inputs[:half], targets[:half]))
    private.optimizer.pre_step()
    private.optimizer.signal_skip_step(do_skip=False)
    private.backward((inputs[half:], targets[half:]))


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
        self.first, self.second = (nn.Linear(FEATURES, CLASSES, bias=False) for _ in range(2))
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.first(inputs) + self.second(inputs)  # type: ignore[no-any-return]


class _Autoencoder(nn.Module):
    """Model that decodes with the weight of its encoder, in a functional call, or with one of its own."""

    def __init__(self, *, is_shared: bool) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(FEATURES, 16), nn.Linear(16, FEATURES, bias=False)
        self.head, self.is_shared = nn.Linear(FEATURES, CLASSES), is_shared
        if is_shared:
            del self.decoder

    def forward(self, inputs: Tensor) -> Tensor:
        code = torch.tanh(self.encoder(inputs))
        decoded = linear(code, self.encoder.weight.T) if self.is_shared else self.decoder(code)
        return self.head(decoded)  # type: ignore[no-any-return]


class _RowForEachUse(GradSampleModule):  # type: ignore[misc]
    """Module in which each use of a weight gives the example another row, clipped separately."""

    def capture_backprops_hook(self, module: nn.Module, *arguments: Any, **options: Any) -> None:
        for parameter in module.parameters():
            parameter._forward_counter = 1  # type: ignore[attr-defined]  # as if it were the last use
        super().capture_backprops_hook(module, *arguments, **options)


def _clip_each_use(private: Private) -> None:
    private.model.remove_hooks()
    private.model.__class__ = _RowForEachUse
    private.model.add_hooks()


SCENARIOS: Mapping[str, Scenario] = {
    "ghost-default-clip": PrivateTraining(
        judge=scored, options={**GHOST, "max_grad_norm": 0.1}, fault=assign("model.max_grad_norm", 1.0)
    ),
    "ghost-bias-norm": PrivateTraining(
        judge=partial(released, shape=(16, FEATURES)),
        options={**GHOST, **_SUM, "model": _MeanOverPositions, "max_grad_norm": 0.1},
        fault=_norms_of_parts,
    ),
    "ghost-accumulate": PrivateTraining(
        judge=partial(released, backward=_in_two_parts),
        options={**GHOST, **_SUM},
        fault=assign("optimizer.__class__", _Aliasing),
    ),
    "tied-weights": PrivateTraining(
        judge=released,
        # with Poisson sampling, Opacus refuses several rows
        options={**_SUM, "model": _Tied, "poisson_sampling": False},
        fault=_clip_each_use,
    ),
    "ghost-shared-weight": PrivateTraining(
        judge=observed,
        options={**GHOST, "model": partial(_Autoencoder, is_shared=False)},
        broken={"model": partial(_Autoencoder, is_shared=True)},
    ),
}
