"""What the faults of the blind benchmark share: their description, and small private training runs.

The faults were written without sight of how dpaudit detects anything. Each has a correct twin that looks
nearly the same. A scenario builds one of the two; the loops train and audit it as the README says.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from opacus import PrivacyEngine
from opacus.accountants import RDPAccountant
from opacus.data_loader import DPDataLoader
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dpaudit
from dpaudit import opacus
from dpaudit.observers.step import observe_step
from dpaudit.observers.step import replay as replay_step
from dpaudit.training.data import digits

__all__ = [
    "GROUPS",
    "BlindFault",
    "NumpyNoise",
    "OpacusLoop",
    "OwnStep",
    "TextData",
    "TokenClassifier",
    "TorchNoise",
    "digits_data",
    "dpsgd_claim",
    "ghost_training",
    "hand_made_training",
    "other_digits",
    "private_training",
    "rdp_epsilon",
    "small_network",
    "token_data",
]

GROUPS = (
    "noise",
    "clipping and sum",
    "ghost norms",
    "sampling, loaders",
    "coupled examples",
    "beside the release",
    "accounting, around the run",
)
NUM_EXAMPLES = 1500
NUM_STEPS = 40
EXPECTED_BATCH = 75


class Case(Protocol):
    """A training run that can be audited, and replayed if its loop has a step function."""

    can_replay: bool

    def audit(self, seed: int) -> Sequence[Any]: ...  # results

    def replay(self, seed: int) -> Any: ...


@dataclass(frozen=True)
class BlindFault:
    """A harmful fault and its correct twin.

    ``scenario(seed, broken)`` builds the training; ``expected`` matches a right cause, ``words``
    a right line *to check*; ``why`` says why the fault is harmful and the twin is correct.
    """

    name: str
    group: str
    library: str
    text: str
    why: str
    expected: str
    words: str
    scenario: Callable[[int, bool], Case]

    def __post_init__(self) -> None:
        if self.group not in GROUPS:
            raise ValueError(f"{self.name}: no group {self.group!r}")

    def run(self, seed: int) -> Sequence[Any]:
        """Train and audit the fault."""
        return self.scenario(seed, True).audit(seed)

    def run_twin(self, seed: int) -> Sequence[Any]:
        """Train and audit the correct twin."""
        return self.scenario(seed, False).audit(seed)

    def replay(self, seed: int, *, broken: bool = True) -> Any:
        """Replay a step of the fault or of the twin; None if its loop has no step function."""
        case = self.scenario(seed, broken)
        return case.replay(seed) if case.can_replay else None


def dpsgd_claim(
    *,
    noise_multiplier: float = 1.0,
    sample_rate: float = 0.05,
    num_steps: int = NUM_STEPS,
    delta: float = 1e-5,
    epsilon: float | None = None,
) -> dpaudit.Claim:
    """Return the claim of a privacy statement, with its epsilon as soon as claims have one."""
    more: dict[str, Any] = {}
    if epsilon is not None and "epsilon" in inspect.signature(dpaudit.Claim.dpsgd).parameters:
        more["epsilon"] = epsilon
    return dpaudit.Claim.dpsgd(
        noise_multiplier=noise_multiplier,
        sample_rate=sample_rate,
        num_steps=num_steps,
        delta=delta,
        **more,
    )


def digits_data() -> TensorDataset:
    """Return 1,500 handwritten digits."""
    train, _ = digits().split(NUM_EXAMPLES)
    return TensorDataset(train.inputs.reshape(len(train), -1).float(), train.targets)


def other_digits() -> TensorDataset:
    """Return 297 handwritten digits that are not among those of `digits_data`."""
    _, rest = digits().split(NUM_EXAMPLES)
    return TensorDataset(rest.inputs.reshape(len(rest), -1).float(), rest.targets)


def rdp_epsilon(noise_multiplier: float, sample_rate: float, num_steps: int, delta: float = 1e-5) -> float:
    """Return the epsilon of Opacus's RDP accountant, an upper bound."""
    accountant = RDPAccountant()
    accountant.history = [(noise_multiplier, sample_rate, num_steps)]
    return float(accountant.get_epsilon(delta))


def small_network() -> nn.Module:
    """Return a network for the digits."""
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


@dataclass
class OpacusLoop:
    """What ``make_private`` returned, and the loop around it."""

    model: nn.Module
    optimizer: Any
    loader: Any
    criterion: Any = field(default_factory=nn.CrossEntropyLoss)
    claim: Any = field(default_factory=dpsgd_claim)
    epochs: int = 2
    step: Callable[[Any], object] | None = None  # by default the usual one
    train: Callable[[], object] | None = None  # by default `step` for each batch of the loader
    can_replay: bool = True
    observed: dict[str, Any] = field(default_factory=dict)  # more arguments of `observe`
    replayed: dict[str, Any] = field(default_factory=dict)  # more arguments of `replay`
    engine: Any = None

    def usual_step(self, batch: Any) -> None:
        """Train on one batch."""
        x, y = batch
        self.optimizer.zero_grad()
        self.criterion(self.model(x), y).backward()
        self.optimizer.step()

    def train_step(self, batch: Any) -> None:
        """Train on one batch, as this loop does."""
        (self.step or self.usual_step)(batch)

    def fit(self) -> None:
        """Train."""
        if self.train is not None:
            self.train()
            return
        for batch in itertools.chain.from_iterable(itertools.repeat(self.loader, self.epochs)):
            self.train_step(batch)

    def observe(self, seed: int) -> Any:
        """Train under observation."""
        arguments = {"claim": self.claim, "loader": self.loader, "module": self.model} | self.observed
        with opacus.observe(self.optimizer, seed=seed, **arguments) as recorder:
            self.fit()
        return recorder

    def audit(self, seed: int) -> Sequence[Any]:
        """Train under observation and audit."""
        return (self.observe(seed).audit(),)

    def replay(self, seed: int) -> Any:
        """Train under observation and replay one step; without observation, if that is refused."""
        try:
            recorder = self.observe(seed)
        except dpaudit.DpauditError:
            batch = self.loader.collate_fn([self.loader.dataset[i] for i in range(8)])
            return opacus.replay(
                self.train_step, batch, optimizer=self.optimizer, model=self.model, **self.replayed
            )
        return recorder.replay(self.train_step, **self.replayed)


def private_training(
    seed: int,
    *,
    model: nn.Module | None = None,
    data: Dataset[Any] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    lr: float = 0.5,
    batch_size: int = EXPECTED_BATCH,
    noise_multiplier: float = 1.0,
    max_grad_norm: Any = 1.0,
    collate_fn: Callable[[Any], Any] | None = None,
    **engine_arguments: Any,
) -> OpacusLoop:
    """Make an ordinary training private with Opacus."""
    torch.manual_seed(seed)
    model = small_network() if model is None else model
    data = digits_data() if data is None else data
    engine = PrivacyEngine()
    private, wrapped, loader = engine.make_private(
        module=model,
        optimizer=optimizer(model.parameters(), lr=lr),
        data_loader=DataLoader(data, batch_size=batch_size, collate_fn=collate_fn),
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        **engine_arguments,
    )
    return OpacusLoop(model=private, optimizer=wrapped, loader=loader, engine=engine)


def ghost_training(
    seed: int,
    *,
    model: nn.Module | None = None,
    data: Dataset[Any] | None = None,
    criterion: nn.Module | None = None,
    lr: float = 0.5,
    max_grad_norm: float = 1.0,
    **engine_arguments: Any,
) -> OpacusLoop:
    """Make an ordinary training private with Opacus and ghost clipping."""
    torch.manual_seed(seed)
    model = small_network() if model is None else model
    data = digits_data() if data is None else data
    engine = PrivacyEngine()
    private, wrapped, private_criterion, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        criterion=nn.CrossEntropyLoss() if criterion is None else criterion,
        data_loader=DataLoader(data, batch_size=EXPECTED_BATCH),
        noise_multiplier=1.0,
        max_grad_norm=max_grad_norm,
        grad_sample_mode="ghost",
        **engine_arguments,
    )
    return OpacusLoop(
        model=private, optimizer=wrapped, loader=loader, criterion=private_criterion, engine=engine
    )


def hand_made_training(
    seed: int,
    optimizer_class: Callable[..., DPOptimizer],
    *,
    model: nn.Module | None = None,
    data: Dataset[Any] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    lr: float = 0.5,
    max_grad_norm: Any = 1.0,
    **optimizer_arguments: Any,
) -> OpacusLoop:
    """Put the parts of Opacus together by hand, with a DP optimizer of the user's."""
    torch.manual_seed(seed)
    wrapped = GradSampleModule(small_network() if model is None else model)
    private = optimizer_class(
        optimizer(wrapped.parameters(), lr=lr),
        noise_multiplier=1.0,
        max_grad_norm=max_grad_norm,
        expected_batch_size=EXPECTED_BATCH,
        **optimizer_arguments,
    )
    data = digits_data() if data is None else data
    loader = DPDataLoader.from_data_loader(DataLoader(data, batch_size=EXPECTED_BATCH))
    return OpacusLoop(model=wrapped, optimizer=private, loader=loader)


@dataclass
class OwnStep:
    """A step of the user's own: from rows to a private gradient."""

    step: Callable[[Any], Any]
    rows: Any  # gradients of the other examples
    examples: Any = None  # a batch for `replay`
    reseed: Callable[[], object] | None = None
    claim: Any = None
    max_grad_norm: float = 1.0
    batch_size: float | None = None
    can_replay: bool = True
    leaves: dict[str, int] | None = None

    def audit(self, seed: int) -> Sequence[Any]:
        """Call the step with canaries and audit."""
        claim = self.claim or dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5)
        recorder = observe_step(
            self.step,
            self.rows,
            claim=claim,
            max_grad_norm=self.max_grad_norm,
            batch_size=self.batch_size,
            leaves=self.leaves,
            seed=seed,
        )
        return (recorder.audit(),)

    def replay(self, seed: int) -> Any:  # noqa: ARG002
        """Replay the step on neighboring batches."""
        if self.reseed is None:
            raise ValueError("a step needs reseed= to be replayed")
        return replay_step(
            self.step,
            self.examples,
            reseed=self.reseed,
            max_grad_norm=self.max_grad_norm,
            batch_size=self.batch_size,
        )


ROWS, WIDTH = 16, 400


class NumpyNoise:
    """The generator of a step in NumPy."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = np.random.default_rng(seed)

    def reseed(self) -> None:
        """Start the generator again."""
        self.rng = np.random.default_rng(self.seed)

    def own_step(self, step: Callable[[Any], Any], **more: Any) -> OwnStep:
        """Return the step with a batch for `replay`."""
        examples = np.random.default_rng(0).standard_normal((ROWS, WIDTH)) / 30
        return OwnStep(step, np.zeros((ROWS, WIDTH)), examples=examples, reseed=self.reseed, **more)


class TorchNoise:
    """The generator of a step in torch."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.generator = torch.Generator()
        self.reseed()

    def reseed(self) -> None:
        """Start the generator again."""
        self.generator.manual_seed(self.seed)

    def own_step(self, step: Callable[[Any], Any], **more: Any) -> OwnStep:
        """Return the step with a batch for `replay`."""
        examples = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)) / 30
        return OwnStep(step, torch.zeros(ROWS, WIDTH), examples=examples, reseed=self.reseed, **more)


class TokenClassifier(nn.Module):
    """The mean of embeddings, and a linear layer."""

    def __init__(self, num_tokens: int = 60, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, width)
        self.head = nn.Linear(width, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(tokens).mean(dim=1))
        return logits


def token_data(seed: int, num_tokens: int = 60, length: int = 8) -> TensorDataset:
    """Return 1,500 texts of tokens, frequent and rare ones, in four classes."""
    generator = torch.Generator().manual_seed(100 + seed)
    frequency = 1.0 / (1.0 + torch.arange(num_tokens)) ** 1.5
    shape = (NUM_EXAMPLES, length)
    tokens = torch.multinomial(frequency, NUM_EXAMPLES * length, replacement=True, generator=generator)
    tokens = tokens.reshape(shape)
    return TensorDataset(tokens, tokens.max(dim=1).values % 4)


class TextData(Dataset[Any]):
    """Texts of 6 to 8 tokens; one in a hundred has 4, one in a hundred 12."""

    def __init__(self, seed: int) -> None:
        self.tokens, self.targets = token_data(seed, length=12).tensors
        generator = torch.Generator().manual_seed(200 + seed)
        self.lengths = torch.randint(6, 9, (len(self.tokens),), generator=generator)
        unusual = torch.rand(len(self.tokens), generator=generator)
        self.lengths[unusual < 0.01] = 4
        self.lengths[unusual > 0.99] = 12

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index, : self.lengths[index]], self.targets[index]
