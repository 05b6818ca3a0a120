"""Which fields of a step each library gives: what the page shows is what observers fill."""

import re
from pathlib import Path

import numpy as np
import pytest
from jax_runs import train as train_jax
from test_jax_privacy_keras import fit
from test_jax_privacy_keras import private as private_keras
from torch import nn

import dpaudit
from dpaudit.observers.jax_privacy import observe_model
from dpaudit.observers.step import observe_step
from dpaudit.training import DPSGD, SGD, Diagnose, Training
from dpaudit.training.data import digits

PAGE = Path(__file__).parents[2] / "docs" / "supported.md"
FIELDS = (
    *("scores", "noise", "total", "examples", "released", "weights", "max_noise", "sum_norm", "num_rows"),
    *("max_row_norm", "noise_multiplier", "example_sum_norm", "batch", "row_digests"),
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
    pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]


def on_the_page(library):
    """The fields that the table of the page lists for a library."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.read_text().splitlines()
        if line.startswith("| field |") or re.match(r"\| `\w+` \|", line)
    ]
    column = rows[0].index(library)
    return {row[0].strip("`") for row in rows[1:] if row[column] == "yes"}


def fields_of(recorder):
    return recorder._tests.noise.given_fields & set(FIELDS)


@pytest.mark.parametrize("library", ["Opacus", "Opacus ghost"])
def test_opacus_gives_the_fields_of_the_page(train, library):
    options = {"grad_sample_mode": "ghost"} if library == "Opacus ghost" else {}
    assert fields_of(train(num_steps=4, **options).recorder) == on_the_page(library)


def test_jax_privacy_gives_the_fields_of_the_page():
    assert fields_of(train_jax(4).recorder) == on_the_page("JAX Privacy")


def test_keras_gives_the_fields_of_the_page():
    model = private_keras()
    with observe_model(model, seed=0) as recorder:
        fit(model, 20)
    assert fields_of(recorder) == on_the_page("Keras")


def test_a_step_of_ones_own_gives_the_fields_of_the_page():
    recorder = observe_step(
        lambda rows: rows.sum(axis=0) + np.random.default_rng(0).standard_normal(40),
        np.zeros((2, 40)),
        claim=dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5),
        max_grad_norm=1.0,
        num_steps=4,
        canary=dpaudit.Dirac(),
        seed=0,
    )
    assert fields_of(recorder) == on_the_page("own step")


def test_the_native_engine_gives_the_fields_of_the_page():
    data, hook = digits().split(200)[0], Diagnose()
    settings = DPSGD(
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.1,
        num_steps=4,
        optimizer=SGD(learning_rate=0.1),
    )
    for _ in Training(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), data, settings, hooks=[hook]).run():
        pass
    assert hook.noise.given_fields & set(FIELDS) == on_the_page("native")
