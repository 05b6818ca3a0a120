"""Build a training run with its audit from a config.

``build`` combines the data, model, DP-SGD settings, faults and canaries named in the tables of a config.
Black-box audits use the same parts. ``example`` returns a commented config to start from.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeAlias

import torch
from torch import nn

from dpaudit import _io
from dpaudit.canaries import Adversarial, Blank, Crafted, GradientCanary, InputCanary, Mislabelled
from dpaudit.errors import InputError
from dpaudit.experiments._analysis import GRADIENT_CANARIES
from dpaudit.experiments._loop import ignore
from dpaudit.experiments._resolved import Resolved
from dpaudit.experiments.config import Config
from dpaudit.experiments.config._schema import (
    AuditConfig,
    DataConfig,
    Digits,
    EndToEndConfig,
    FewSeedsConfig,
    ManyRunsConfig,
    Mlp,
    ModelConfig,
    NoiseTooSmallConfig,
    OptimizerConfig,
    PaperConfig,
    Random,
    SgdConfig,
    ShuffledBatchesConfig,
    TrainingConfig,
)
from dpaudit.recording import LiveBound
from dpaudit.training import (
    DPSGD,
    SGD,
    Adam,
    Diagnose,
    EndToEnd,
    FlipAndCrop,
    OneRun,
    Optimizer,
    PrivateSum,
    Sampler,
    Training,
    TwoBatches,
    initialize,
)
from dpaudit.training.broken import ClippedAfterMean, FewSeeds, NoiseTooSmall, ShuffledBatches, Unclipped
from dpaudit.training.data import (
    Dataset,
    HeldOutData,
    cifar10,
    digits,
    hold_out,
    idx_images,
    location,
    purchase100,
    random_images,
)
from dpaudit.training.models import conv_net, logistic_regression, mlp, purchase_mlp, wide_resnet

Audit: TypeAlias = OneRun | TwoBatches | EndToEnd

EXAMPLES = (
    "digits",
    "paper-cifar10",
    "end-to-end",
    "purchase",
    "input",
    "black-box",
    "black-box-one-run",
    "black-box-function",
)
_CANARIES: Mapping[str, Callable[..., GradientCanary | InputCanary]] = {
    **GRADIENT_CANARIES,
    "blank": Blank,
    "mislabelled": Mislabelled,
    "adversarial": Adversarial,
    "crafted": Crafted,
}
_WITH_TEST_PART: Mapping[str, Callable[..., Dataset]] = {"cifar10": cifar10, "idx": idx_images}
_WITHOUT_TEST_PART: Mapping[str, Callable[..., Dataset]] = {"purchase100": purchase100, "location": location}
_TEST_SHARE = 6  # one example in six is for testing if the data have no test part
_MIN_PIXELS = 8  # per side: convolutional networks halve the image repeatedly


@dataclass(frozen=True, eq=False)
class Experiment:
    """Training run with its audit, the tests of its noise and batches, and the test examples."""

    config: Config
    resolved: Resolved
    training: Training
    audit: Audit
    tests: Diagnose
    test: Dataset
    bounds: deque[LiveBound]
    """The latest live bound of the audit, if there is one."""

    @property
    def live(self) -> LiveBound | None:
        """The latest live bound; None before the first."""
        return self.bounds[-1] if self.bounds else None

    @property
    def num_canaries(self) -> int:
        """The number of canaries per step."""
        return self.audit.num_canaries


def build(
    config: Config,
    resolved: Resolved,
    data: tuple[Dataset, Dataset],
    crafting: Callable[[int, int], None] = ignore,
) -> Experiment:
    """Return the experiment that a config describes, before its first step."""
    train, (test, held_out) = data[0], split_held_out(config, resolved, *data)
    seeds, bounds = resolved.training_seeds, deque[LiveBound](maxlen=1)
    audit, tests = _audit(config, resolved, held_out, bounds, crafting), Diagnose()
    training = Training(
        initialize(model_for(config.model, train), seeds.initialization),
        train,
        settings_of(config.training, resolved),
        seeds=seeds,
        device=device_of(config.device),
        hooks=[audit, tests],
        sampling=_sampling(config.training, resolved),
        mechanism=mechanism_of(config.training, resolved),
    )
    if not isinstance(audit, EndToEnd):
        # the accountant's table for live bounds, in advance, so that it does not distort step timings
        hypothesis = audit.recorder.claim.hypothesis(None)
        hypothesis.epsilon(hypothesis.parameter)
    return Experiment(config, resolved, training, audit, tests, test, bounds)


def _audit(
    config: Config,
    resolved: Resolved,
    held_out: HeldOutData | None,
    bounds: deque[LiveBound],
    crafting: Callable[[int, int], None],
) -> Audit:
    """Return the audit that a config describes; its live bounds are appended to ``bounds``."""
    audit: AuditConfig = config.audit
    assert not isinstance(audit, ManyRunsConfig)  # handled by run_many
    common: dict[str, Any] = {
        "delta": config.training.delta,
        "canary": _canary(audit),
        "num_canaries": audit.num_canaries,
        "confidence": audit.confidence,
        "seed": resolved.audit_seed,
    }
    if isinstance(audit, EndToEndConfig):
        return EndToEnd(**common)
    common |= {
        "callbacks": (bounds.append,),
        "first_steps": audit.first_steps,
        "held_out": held_out,
        "notify": crafting,
    }
    if isinstance(audit, PaperConfig):
        return TwoBatches(canary_rate=audit.canary_rate, residual=audit.residual, **common)
    return OneRun(**common)


def _canary(audit: AuditConfig) -> GradientCanary | InputCanary:
    """Return the canary that a table describes; its keys are the fields of the canary."""
    assert audit.canary is not None  # filled in by the config
    values = audit.canary.model_dump()
    return _CANARIES[values.pop("kind")](**values)


def split_held_out(
    config: Config, resolved: Resolved, train: Dataset, test: Dataset
) -> tuple[Dataset, HeldOutData | None]:
    """Split the held-out examples off the test set, so that the training set stays complete."""
    count = getattr(config.audit, "held_out", None)
    if count is None:
        return test, None
    if count >= len(test):
        raise InputError(
            f"Expected audit.held_out={count} to be less than {len(test)}, the number of test examples."
        )
    return hold_out(test, count, seed=resolved.audit_seed, apart_from=train)


def model_for(config: ModelConfig, data: Dataset) -> Callable[[], nn.Module]:
    """Return a function that builds the model for the input shape and classes of the data."""
    features, classes = math.prod(data.shape), data.num_classes
    if isinstance(config, Mlp):
        return lambda: mlp(features, *config.hidden, classes)
    if config.name == "logistic-regression":
        return lambda: logistic_regression(features, classes)
    if config.name == "purchase-mlp":
        _require((features, classes) == (600, 100), config.name, "600 features and 100 classes", data)
        return purchase_mlp
    images = len(data.shape) == 3 and min(data.shape[1:]) >= _MIN_PIXELS
    _require(images, config.name, f"images of at least {_MIN_PIXELS} x {_MIN_PIXELS} pixels", data)
    channels = data.shape[0]
    if config.name == "conv-net":
        return lambda: conv_net(in_channels=channels, num_classes=classes)
    depth = {"wide-resnet-16-4": 16, "wide-resnet-40-4": 40}[config.name]
    return lambda: wide_resnet(depth, 4, in_channels=channels, num_classes=classes)


def _require(ok: bool, model: str, expected: str, data: Dataset) -> None:
    if not ok:
        raise InputError(f"Expected data with {expected} for the model {model}, got {data!r}.")


def settings_of(training: TrainingConfig, resolved: Resolved) -> DPSGD:
    """Return the DP-SGD settings, with the noise and the sample rate of this run."""
    return DPSGD(
        noise_multiplier=resolved.noise_multiplier,
        max_grad_norm=training.max_grad_norm,
        sample_rate=resolved.sample_rate,
        num_steps=training.num_steps,
        optimizer=_optimizer(training.optimizer),
        multiplicity=training.multiplicity or 1,
        augmentation=None if training.multiplicity is None else FlipAndCrop(),
    )


def _optimizer(config: OptimizerConfig) -> Optimizer:
    """Return the optimizer that a table describes; its keys are the fields of the optimizer."""
    values = config.model_dump(exclude={"name"})
    return SGD(**values) if isinstance(config, SgdConfig) else Adam(**values)


def _sampling(training: TrainingConfig, resolved: Resolved) -> Sampler | None:
    """Return the faulty sampling that a config requests; None for correct sampling."""
    shuffled = isinstance(training.fault, ShuffledBatchesConfig)
    return ShuffledBatches(resolved.sample_rate) if shuffled else None


def mechanism_of(training: TrainingConfig, resolved: Resolved) -> PrivateSum | None:
    """Return the faulty mechanism that a config requests; None for the correct one."""
    fault = training.fault
    if fault is None or isinstance(fault, ShuffledBatchesConfig):
        return None
    common = {"noise_multiplier": resolved.noise_multiplier, "max_grad_norm": training.max_grad_norm}
    if isinstance(fault, NoiseTooSmallConfig):
        return NoiseTooSmall(**common, factor=fault.factor)
    if isinstance(fault, FewSeedsConfig):
        return FewSeeds(**common, num_seeds=fault.num_seeds)
    return Unclipped(**common) if fault.name == "unclipped" else ClippedAfterMean(**common)


def device_of(name: str) -> torch.device:
    """Return the device; raise if torch cannot use it on this machine."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"Expected a device that is available to torch, got device={name!r}.") from error
    return device


def load_data(config: DataConfig) -> tuple[Dataset, Dataset]:
    """Return the training and test examples."""
    train, test = _all_data(config)
    return train, _first(test, config.num_test, "num_test")


def _all_data(config: DataConfig) -> tuple[Dataset, Dataset]:
    if isinstance(config, Random):
        for_test = config.num_test or -(-config.num_examples // (_TEST_SHARE - 1))
        total = config.num_examples + for_test
        images = random_images(total, shape=config.shape, num_classes=config.num_classes, seed=config.seed)
        return images.split(config.num_examples)
    if isinstance(config, Digits):
        return _split(digits(), config.num_examples)
    folder = _io.expanded(config.directory)
    if config.name in _WITHOUT_TEST_PART:
        return _split(_WITHOUT_TEST_PART[config.name](folder), config.num_examples)
    read = _WITH_TEST_PART[config.name]
    train = read(folder, train=True)
    return _first(train, config.num_examples, "num_examples"), read(folder, train=False)


def _split(data: Dataset, num_examples: int | None) -> tuple[Dataset, Dataset]:
    """Return the first examples and the rest."""
    count = len(data) - len(data) // _TEST_SHARE if num_examples is None else num_examples
    _require_at_most("num_examples", count, len(data) - 1)
    return data.split(count)


def _first(data: Dataset, count: int | None, name: str) -> Dataset:
    if count is None or count == len(data):
        return data
    _require_at_most(name, count, len(data))
    return data.split(count)[0]


def _require_at_most(name: str, count: int, available: int) -> None:
    if count > available:
        raise InputError(f"Expected data.{name}={count} to be at most {available}.")


def example(name: str) -> str:
    """Return the text of a commented config."""
    if name not in EXAMPLES:
        raise InputError(f"Expected one of the examples {', '.join(EXAMPLES)}, got {name!r}.")
    return (resources.files("dpaudit.experiments") / "examples" / f"{name}.toml").read_text(encoding="utf-8")
