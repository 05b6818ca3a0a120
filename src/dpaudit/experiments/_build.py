"""Build a training run with its audit from a config.

``resolve`` fills in what a config may leave open (noise, sample rate, seed), once for each run. ``build``
combines the data, model, DP-SGD settings, faults and canaries named in the tables of a config. Black-box
audits use the same parts. ``example`` returns a commented config to start from.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from dpaudit import _io, _validate
from dpaudit import training as engine
from dpaudit._provenance import digest, seed_digest, spawn_seed
from dpaudit.accounting import noise_for_epsilon
from dpaudit.canaries import Adversarial, Blank, Crafted, GradientCanary, InputCanary, Mislabelled
from dpaudit.errors import InputError
from dpaudit.experiments._analysis import GRADIENT_CANARIES
from dpaudit.experiments._loop import ignore
from dpaudit.experiments.config import Config
from dpaudit.experiments.config import _schema as schema
from dpaudit.experiments.trials._trial_plan import source_digest
from dpaudit.recording import LiveBound
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

Audit: TypeAlias = engine.OneRun | engine.TwoBatches | engine.EndToEnd

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
_MECHANISMS: Mapping[str, Callable[..., engine.PrivateSum]] = {
    "noise-too-small": NoiseTooSmall,
    "few-seeds": FewSeeds,
    "unclipped": Unclipped,
    "clipped-after-mean": ClippedAfterMean,
}
_TEST_SHARE = 6  # one example in six is for testing if the data have no test part
_MIN_PIXELS = 8  # per side: convolutional networks halve the image repeatedly


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Noise, sample rate and seed of a run, and hashes of its data and code."""

    noise_multiplier: float
    sample_rate: float
    num_examples: int
    data_digest: str
    code_digest: str
    """Hash of the user's training function; empty if there is none."""
    seed: int

    @property
    def training_seeds(self) -> engine.Seeds:
        """The seeds of the training run."""
        return engine.Seeds.of(self.seed)

    @property
    def audit_seed(self) -> int:
        """The seed of canaries and their membership, which must be independent of the training run."""
        return spawn_seed(self.seed, 1)  # branch 2 is that of trials

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "seeds": {**asdict(self.training_seeds), "audit": self.audit_seed}}

    def digests(self, config: Config) -> dict[str, Any]:
        """Return digests of what the numbers depend on; seeds are never stored outside private files."""
        values = {key: value for key, value in config.identity().items() if key != "seed"}
        seeds = {"run": self.seed, **asdict(self.training_seeds), "audit": self.audit_seed}
        return {
            "data": self.data_digest,
            "configuration": digest(values),
            **({"code": self.code_digest} if self.code_digest else {}),
            "seeds": {name: seed_digest(name, seed) for name, seed in seeds.items()},
        }

    def run_digest(self, config: Config) -> str:
        """Return the digest by which files know their run: of the config, the data and the seeds."""
        return digest([config.identity(), self.to_dict()])

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any], source: str = "the config.json of the run") -> Resolved:
        """Return the object that :meth:`to_dict` serialized; errors name ``source``."""
        missing = [name for name in cls.__dataclass_fields__ if name not in stored]
        if missing:
            raise InputError(
                f"{source} has no {', '.join(missing)}: the run was started by another version of dpaudit; "
                "choose another output directory."
            )
        return cls(**{name: stored[name] for name in cls.__dataclass_fields__})


def resolve(config: Config, data: Dataset) -> Resolved:
    """Calibrate the noise and draw the seed if the config does not specify them."""
    training, num_examples = config.training, len(data)
    rate = _sample_rate(training, num_examples)
    return Resolved(
        noise_multiplier=_noise_multiplier(training, rate),
        sample_rate=rate,
        num_examples=num_examples,
        data_digest=_digest(data),
        code_digest=_code_digest(config),
        seed=secrets.randbits(128) if config.seed is None else config.seed,
    )


def require_same_data(resolved: Resolved, data: Dataset) -> None:
    """Raise if the examples have changed: the claim and the checkpoint refer to the original ones."""
    if _digest(data) != resolved.data_digest:
        raise InputError(
            f"The data files have changed: the run started with {resolved.num_examples} training examples, "
            f"and these {len(data)} are not the same. Restore them or choose another output directory."
        )


def require_same_code(resolved: Resolved, config: Config) -> None:
    """Raise if the training function has changed: the scores of two versions must not be mixed."""
    if isinstance(config.model, schema.FunctionModel) and _code_digest(config) != resolved.code_digest:
        raise InputError(
            f"The file of model.function={config.model.function!r} has changed since the run started; "
            "restore it or choose another output directory."
        )


def _code_digest(config: Config) -> str:
    return source_digest(config.model.function) if isinstance(config.model, schema.FunctionModel) else ""


def _digest(data: Dataset) -> str:
    """Return a hash of the examples."""
    hasher = hashlib.sha256()
    for tensor in (data.inputs, data.targets):
        hasher.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        hasher.update(tensor.contiguous().numpy().data)
    return hasher.hexdigest()


def _sample_rate(training: schema.TrainingConfig, num_examples: int) -> float:
    if training.batch_size is None:
        assert training.sample_rate is not None  # the config has exactly one of them
        return training.sample_rate
    if training.batch_size > num_examples:
        raise InputError(
            f"training.batch_size must be at most {num_examples}, the number of examples, got "
            f"{training.batch_size:g}."
        )
    return training.batch_size / num_examples


def _noise_multiplier(training: schema.TrainingConfig, sample_rate: float) -> float:
    if training.target_epsilon is None:
        assert training.noise_multiplier is not None  # the config has exactly one of them
        return training.noise_multiplier
    try:
        return noise_for_epsilon(
            training.target_epsilon,
            sample_rate=sample_rate,
            num_steps=training.num_steps,
            delta=training.delta,
        )
    except InputError as error:
        raise InputError(f"No noise was found for training.target_epsilon: {error}") from error


@dataclass(frozen=True, eq=False)
class Experiment:
    """Training run with its audit, the tests of its noise and batches, and the test examples."""

    config: Config
    resolved: Resolved
    training: engine.Training
    audit: Audit
    tests: engine.Diagnose
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
    audit, tests = _audit(config, resolved, held_out, bounds, crafting), engine.Diagnose()
    is_shuffled = isinstance(config.training.fault, schema.ShuffledBatchesConfig)
    training = engine.Training(
        engine.initialize(model_for(config.model, train), seeds.initialization),
        train,
        settings_of(config.training, resolved),
        seeds=seeds,
        device=device_of(config.device),
        hooks=[audit, tests],
        sampling=ShuffledBatches(resolved.sample_rate) if is_shuffled else None,
        mechanism=mechanism_of(config.training, resolved),
    )
    if not isinstance(audit, engine.EndToEnd):
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
    audit: schema.AuditConfig = config.audit
    assert not isinstance(audit, schema.ManyRunsConfig)  # handled by run_many
    common: dict[str, Any] = {
        "delta": config.training.delta,
        "canary": _canary(audit),
        "num_canaries": audit.num_canaries,
        "confidence": audit.confidence,
        "seed": resolved.audit_seed,
    }
    if isinstance(audit, schema.EndToEndConfig):
        return engine.EndToEnd(**common)
    common |= {
        "callbacks": (bounds.append,),
        "first_steps": audit.first_steps,
        "held_out": held_out,
        "notify": crafting,
    }
    if isinstance(audit, schema.PaperConfig):
        return engine.TwoBatches(canary_rate=audit.canary_rate, residual=audit.residual, **common)
    return engine.OneRun(**common)


def _canary(audit: schema.AuditConfig) -> GradientCanary | InputCanary:
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
            f"audit.held_out must be below {len(test)}, the number of test examples, got {count}."
        )
    return hold_out(test, count, seed=resolved.audit_seed, apart_from=train)


def model_for(config: schema.ModelConfig, data: Dataset) -> Callable[[], nn.Module]:
    """Return a function that builds the model for the input shape and classes of the data."""
    features, classes = math.prod(data.shape), data.num_classes
    if isinstance(config, schema.Mlp):
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
        raise InputError(f"The model {model} needs data with {expected}, got {data!r}.")


def settings_of(training: schema.TrainingConfig, resolved: Resolved) -> engine.DPSGD:
    """Return the DP-SGD settings, with the noise and the sample rate of this run."""
    return engine.DPSGD(
        noise_multiplier=resolved.noise_multiplier,
        max_grad_norm=training.max_grad_norm,
        sample_rate=resolved.sample_rate,
        num_steps=training.num_steps,
        optimizer=_optimizer(training.optimizer),
        multiplicity=training.multiplicity or 1,
        augmentation=None if training.multiplicity is None else engine.FlipAndCrop(),
    )


def _optimizer(config: schema.OptimizerConfig) -> engine.Optimizer:
    """Return the optimizer that a table describes; its keys are the fields of the optimizer."""
    values = config.model_dump(exclude={"name"})
    return engine.SGD(**values) if isinstance(config, schema.SgdConfig) else engine.Adam(**values)


def mechanism_of(training: schema.TrainingConfig, resolved: Resolved) -> engine.PrivateSum | None:
    """Return the faulty mechanism that a config requests; None for the correct one."""
    values = {} if training.fault is None else training.fault.model_dump()
    kind = _MECHANISMS.get(values.pop("name", ""))
    if kind is None:
        return None
    noise = resolved.noise_multiplier
    return kind(noise_multiplier=noise, max_grad_norm=training.max_grad_norm, **values)


def device_of(name: str) -> torch.device:
    """Return the device; raise if torch cannot use it on this machine."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device={name!r} is not available to torch.") from error
    return device


def load_data(config: schema.DataConfig) -> tuple[Dataset, Dataset]:
    """Return the training and test examples; data without a test part are split."""
    if isinstance(config, schema.Random):
        for_test = config.num_test or -(-config.num_examples // (_TEST_SHARE - 1))
        total = config.num_examples + for_test
        images = random_images(total, shape=config.shape, num_classes=config.num_classes, seed=config.seed)
        return images.split(config.num_examples)
    if isinstance(config, schema.Files) and config.name in _WITH_TEST_PART:
        folder, read = _io.expanded(config.directory), _WITH_TEST_PART[config.name]
        train = _first(read(folder, train=True), config.num_examples, "num_examples")
        test = read(folder, train=False)
    else:
        data = digits()
        if isinstance(config, schema.Files):
            data = _WITHOUT_TEST_PART[config.name](_io.expanded(config.directory))
        count = config.num_examples or len(data) - len(data) // _TEST_SHARE
        _require_at_most("num_examples", count, len(data) - 1)
        train, test = data.split(count)
    return train, _first(test, config.num_test, "num_test")


def _first(data: Dataset, count: int | None, name: str) -> Dataset:
    if count is None or count == len(data):
        return data
    _require_at_most(name, count, len(data))
    return data.split(count)[0]


def _require_at_most(name: str, count: int, available: int) -> None:
    if count > available:
        raise InputError(f"data.{name} must be at most {available}, got {count}.")


def example(name: str) -> str:
    """Return the text of a commented config.

    Args:
        name: One of ``EXAMPLES``, such as "digits".

    Returns:
        The config, in TOML.

    Raises:
        InputError: There is no such example.

    Example:
        ``Path("config.toml").write_text(example("digits"))``

    """
    _validate.choice("example", name, EXAMPLES)
    return _io.packaged("experiments", "examples", f"{name}.toml")
