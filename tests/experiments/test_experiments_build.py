"""Every setting of a config reaches the object that uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dpaudit.canaries import (
    Adversarial,
    Blank,
    Constant,
    Crafted,
    Dirac,
    Mislabelled,
    Mixture,
    RandomDirection,
)
from dpaudit.experiments import Config
from dpaudit.experiments._build import Experiment, build, load_data, model_for, resolve
from dpaudit.experiments.config import _schema
from dpaudit.experiments.config._schema import Digits, NamedModel, Section
from dpaudit.training import SGD, Adam, EndToEnd, FlipAndCrop, OneRun, TwoBatches
from dpaudit.training.broken import ClippedAfterMean, FewSeeds, NoiseTooSmall, ShuffledBatches, Unclipped

Build = Callable[..., Experiment]


@pytest.fixture
def built(small: Callable[..., Config]) -> Build:
    def make(*changes: str) -> Experiment:
        config = small(*changes)
        data = load_data(config.data)
        return build(config, resolve(config, data[0]), data)

    return make


FAULT = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
EXAMPLES = "threat_model=input", "audit.num_canaries=4", "audit.held_out=20"
SETTINGS: list[tuple[tuple[str, ...], Callable[[Experiment], Any], Any]] = [
    (("training.noise_multiplier=2.5",), lambda one: one.training.settings.noise_multiplier, 2.5),
    (("training.max_grad_norm=0.3",), lambda one: one.training.settings.max_grad_norm, 0.3),
    (("training.sample_rate=0.2",), lambda one: one.training.settings.sample_rate, 0.2),
    (("training.num_steps=7",), lambda one: one.training.settings.num_steps, 7),
    (("training.multiplicity=2",), lambda one: one.training.settings.multiplicity, 2),
    (("training.multiplicity=2",), lambda one: one.training.settings.augmentation, FlipAndCrop()),
    ((), lambda one: one.training.settings.augmentation, None),
    (
        (
            "training.optimizer.name=sgd",
            "training.optimizer.learning_rate=0.2",
            "training.optimizer.momentum=0.9",
            "training.optimizer.weight_decay=0.01",
        ),
        lambda one: one.training.settings.optimizer,
        SGD(learning_rate=0.2, momentum=0.9, weight_decay=0.01),
    ),
    (
        (
            "training.optimizer.name=adam",
            "training.optimizer.learning_rate=0.2",
            "training.optimizer.weight_decay=0.01",
        ),
        lambda one: one.training.settings.optimizer,
        Adam(learning_rate=0.2, weight_decay=0.01),
    ),
    (
        ("training.fault.name=noise-too-small", "training.fault.factor=0.4"),
        lambda one: one.training._mechanism,
        NoiseTooSmall(**FAULT, factor=0.4),
    ),
    (
        ("training.fault.name=few-seeds", "training.fault.num_seeds=3"),
        lambda one: one.training._mechanism,
        FewSeeds(**FAULT, num_seeds=3),
    ),
    (("training.fault.name=unclipped",), lambda one: one.training._mechanism, Unclipped(**FAULT)),
    (
        ("training.fault.name=clipped-after-mean",),
        lambda one: one.training._mechanism,
        ClippedAfterMean(**FAULT),
    ),
    (("training.fault.name=shuffled-batches",), lambda one: type(one.training._sampling), ShuffledBatches),
    (("training.delta=1e-6",), lambda one: one.audit.delta, 1e-6),
    (("audit.confidence=0.9",), lambda one: one.audit.confidence, 0.9),
    (("audit.num_canaries=5",), lambda one: one.num_canaries, 5),
    (("audit.first_steps=4",), lambda one: one.audit._first_steps, 4),
    (EXAMPLES, lambda one: (len(one.audit._held_out), one.audit.canary), (20, Crafted())),
    (("data.num_test=30", *EXAMPLES), lambda one: len(one.test), 10),
    ((), lambda one: type(one.audit), OneRun),
    (("audit.mode=paper", "audit.num_canaries=1"), lambda one: type(one.audit), TwoBatches),
    (
        ("audit.mode=paper", "audit.num_canaries=1", "audit.canary_rate=0.5", "audit.residual=true"),
        lambda one: (one.audit._rate, one.audit._residual),
        (0.5, True),
    ),
    (("audit.mode=end-to-end",), lambda one: type(one.audit), EndToEnd),
    (("audit.canary.kind=dirac", "audit.canary.scale=3.0"), lambda one: one.audit.canary, Dirac(scale=3.0)),
    (
        ("audit.canary.kind=mixture", "audit.canary.moving=true"),
        lambda one: one.audit.canary,
        Mixture(moving=True),
    ),
    (("audit.canary.kind=constant",), lambda one: one.audit.canary, Constant()),
    (("audit.canary.kind=random-direction",), lambda one: one.audit.canary, RandomDirection()),
    ((*EXAMPLES, "audit.canary.kind=blank"), lambda one: one.audit.canary, Blank()),
    ((*EXAMPLES, "audit.canary.kind=mislabelled"), lambda one: one.audit.canary, Mislabelled()),
    (
        (
            *EXAMPLES,
            "audit.canary.kind=adversarial",
            "audit.canary.num_steps=3",
            "audit.canary.step_size=0.2",
            "audit.canary.radius=0.5",
        ),
        lambda one: one.audit.canary,
        Adversarial(num_steps=3, step_size=0.2, radius=0.5),
    ),
    (
        (
            *EXAMPLES,
            "audit.canary.kind=crafted",
            "audit.canary.num_steps=3",
            "audit.canary.step_size=0.2",
            "audit.canary.every=5",
            "audit.canary.long=true",
        ),
        lambda one: one.audit.canary,
        Crafted(num_steps=3, step_size=0.2, every=5, long=True),
    ),
]


@pytest.mark.parametrize(
    ("changes", "read", "expected"), SETTINGS, ids=[" ".join(one[0])[:70] for one in SETTINGS]
)
def test_a_setting_reaches_what_uses_it(
    built: Build, changes: tuple[str, ...], read: Callable[[Experiment], Any], expected: Any
) -> None:
    assert read(built(*changes)) == expected


def test_seeds_of_the_training_run_and_of_its_audit_differ(built: Build) -> None:
    one, other = built("seed=3"), built("seed=4")
    assert one.audit.seed == one.resolved.audit_seed
    seeds = {one.resolved.seed, one.audit.seed, *vars(one.resolved.training_seeds).values()}
    assert len(seeds) == 2 + len(vars(one.resolved.training_seeds))
    assert other.audit.seed != one.audit.seed
    assert other.resolved.training_seeds != one.resolved.training_seeds


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("logistic-regression", 650),
        ("conv-net", 130_890),
        ("wide-resnet-16-4", 2_750_858),
        ("wide-resnet-40-4", 8_954_762),
    ],
)
def test_a_named_model_has_the_size_of_its_name_and_fits_the_data(name: Any, num_parameters: int) -> None:
    data, _ = load_data(Digits(name="digits"))
    model = model_for(NamedModel(name=name), data)()
    assert sum(one.numel() for one in model.parameters()) == num_parameters
    assert model(data.inputs[:2]).shape == (2, 10)


def test_numbers_that_a_config_omits_have_these_defaults() -> None:
    sections = [one for one in vars(_schema).values() if isinstance(one, type) and issubclass(one, Section)]
    defaults = {
        f"{section.__name__}.{name}": section.model_fields[name].default
        for section in sections
        for name in section.__annotations__
        if isinstance(section.model_fields[name].default, int | float)
    }
    assert defaults == {
        "Random.num_examples": 50000, "Random.num_classes": 10, "Random.seed": 0,
        "SgdConfig.learning_rate": 1.0, "SgdConfig.momentum": 0.0, "SgdConfig.weight_decay": 0.0,
        "AdamConfig.learning_rate": 0.001, "AdamConfig.weight_decay": 0.0,
        "NoiseTooSmallConfig.factor": 0.8, "FewSeedsConfig.num_seeds": 100,
        "TrainingConfig.delta": 1e-05, "TrainingConfig.max_grad_norm": 1.0,
        "CanaryConfig.scale": 10.0, "CanaryConfig.moving": False,
        "AdversarialConfig.num_steps": 20, "AdversarialConfig.step_size": 0.01,
        "AdversarialConfig.radius": 0.03,
        "CraftedConfig.num_steps": 50, "CraftedConfig.step_size": 0.1, "CraftedConfig.long": False,
        "PretrainedConfig.num_steps": 1000, "PretrainedConfig.batch_size": 64,
        "PretrainedConfig.learning_rate": 0.1,
        "_AuditConfig.confidence": 0.95, "_StepAuditConfig.stop_on_violation": False,
        "PaperConfig.num_canaries": 1, "PaperConfig.canary_rate": 1.0, "PaperConfig.residual": False,
        "ManyRunsConfig.num_models": 2000, "ProcessesConfig.max_retries": 3,
        "RayConfig.num_cpus": 1.0, "RayConfig.num_gpus": 0.0, "RayConfig.max_retries": 3,
    }  # fmt: skip
