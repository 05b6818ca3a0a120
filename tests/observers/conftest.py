"""Short trainings with Opacus, to be observed."""

import os
import sys
from contextlib import nullcontext, suppress

# Compiling takes longer than running here. XLA reads these when JAX compiles for the first time.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
)

import pytest
import torch
from opacus import PrivacyEngine
from opacus.optimizers import DPOptimizer
from opacus_runs import DELTA, FAULTS, Made, run, small_data, small_model, weights
from torch import nn
from torch.utils.data import DataLoader

import dpaudit
from dpaudit.observers.opacus import observe

# what Opacus and torch say of every private training
OPACUS_WARNINGS = [
    "ignore:Secure RNG turned off:UserWarning",
    "ignore:Full backward hook is firing:UserWarning",
    "ignore:Using a non-full backward hook:FutureWarning",
    "ignore:Ignoring drop_last:UserWarning",
]


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.name.startswith("test_opacus"):
            for warning in OPACUS_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True)
def no_failed_computation():
    """Forget a computation of JAX that was refused; those of later tests would wait for it, and fail."""
    yield
    if (dispatch := sys.modules.get("jax._src.dispatch")) is not None:
        with suppress(sys.modules["jax"].errors.JaxRuntimeError):
            dispatch.runtime_tokens.block_until_ready()
        dispatch.runtime_tokens.clear()


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def private():
    """What make_private makes of a small model: model, optimizer, loader, criterion, engine."""

    def build(
        *,
        epsilon=8.0,
        noise_multiplier=None,
        num_steps=300,
        num_examples=200,
        batch_size=10,
        build=small_model,
        data=small_data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        seed=0,
        loss_reduction="mean",
        max_grad_norm=1.0,
        loading=None,
        engine=PrivacyEngine,
        **options,
    ):
        torch.manual_seed(seed)
        model, examples = build(), data(num_examples)
        rate = batch_size / num_examples
        noise = noise_multiplier or dpaudit.noise_for_epsilon(
            epsilon, sample_rate=rate, num_steps=num_steps, delta=DELTA
        )
        engine, criterion = engine(accountant="rdp"), nn.CrossEntropyLoss(reduction=loss_reduction)
        made = engine.make_private(
            module=model,
            optimizer=optimizer([value for value in model.parameters() if value.requires_grad]),
            data_loader=DataLoader(examples, batch_size=batch_size, **(loading or {})),
            criterion=criterion,
            noise_multiplier=noise,
            max_grad_norm=max_grad_norm,
            loss_reduction=loss_reduction,
            **options,
        )
        found = Made.of(made, criterion)
        found.engine = engine
        return found

    return build


@pytest.fixture
def train(private):
    """Train with or without an observer; what was made, its recorder and its weights."""

    def go(*, observed=True, num_steps=300, seed=0, observer=None, **options):
        made = private(num_steps=num_steps, seed=seed, **options)
        usual = {"num_steps": num_steps, "delta": DELTA, "seed": seed}
        usual |= {"module": made.model}
        if options.get("poisson_sampling", True):
            usual |= {"loader": made.loader}
        context = observe(made.optimizer, **(usual | (observer or {}))) if observed else nullcontext()
        with context as made.recorder:
            run(made, num_steps)
        made.weights = weights(made.model)
        return made

    return go


@pytest.fixture(params=FAULTS)
def fault(request, monkeypatch):
    """Opacus broken from outside."""
    name, broken = FAULTS[request.param]
    monkeypatch.setattr(DPOptimizer, name, broken)
    return request.param
