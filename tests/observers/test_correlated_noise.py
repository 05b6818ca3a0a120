"""Noise that is correlated by design is named as such, and noise that is reused is not mistaken for it."""

import numpy as np
import pytest
from jax_privacy.matrix_factorization import banded, toeplitz

import dpaudit
from dpaudit.observers.step import observe_step

STEPS, WIDTH = 300, 200
FIRST, SECOND = (
    "correlated noise (DP-FTRL, matrix factorization)? A DP-SGD claim does not describe it",
    "is noise from earlier steps reused",
)


def banded_factorization():
    strategy = banded.ColumnNormalizedBanded.default(STEPS, bands=8)
    return np.linalg.inv(np.asarray(strategy.materialize()))


def toeplitz_of_ftrl():
    """The square root of the matrix of prefix sums, with columns of norm 1 at most."""
    strategy = toeplitz.materialize_lower_triangular(toeplitz.optimal_max_error_strategy_coefs(STEPS))
    return np.linalg.inv(np.asarray(strategy)) * float(np.linalg.norm(strategy, axis=0).max())


def tree_of_ftrl():
    """Differences of prefix sums, each of them the sum of the nodes of a binary tree."""
    levels, columns = STEPS.bit_length(), {}
    prefixes = np.zeros((STEPS + 1, 2 * STEPS + levels))
    for step in range(1, STEPS + 1):
        for level in range(levels):
            if step >> level & 1:
                prefixes[step, columns.setdefault((level, step >> level), len(columns))] = 1
    return np.sqrt(levels) * np.diff(prefixes, axis=0)


def running_sums():
    return np.eye(STEPS) - np.eye(STEPS, k=-1)


def audited(matrix, width=WIDTH):
    """The audit of a step whose noise is this matrix times white noise."""
    noise = matrix @ np.random.default_rng(1).standard_normal((matrix.shape[1], width))
    released = iter(noise)

    def step(rows):
        norms = np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True))
        return (rows / norms).sum(axis=0) + next(released)

    claim = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5)
    observed = observe_step(
        step, np.zeros((4, width)), claim=claim, max_grad_norm=1.0, num_steps=STEPS, seed=0
    )
    return observed.audit()


@pytest.mark.parametrize("factorize", [banded_factorization, toeplitz_of_ftrl, tree_of_ftrl, running_sums])
def test_noise_of_a_matrix_factorization_is_another_mechanism_and_named(factorize):
    result = audited(factorize())
    assert (result.verdict, result.refuted) == (dpaudit.Verdict.VIOLATION, ("mechanism",))
    causes = result.likely_causes()
    assert (causes[0], causes[1].startswith(SECOND), len(causes)) == (FIRST, True, 2)


def test_few_weights_suffice_to_recognize_it():
    assert audited(tree_of_ftrl(), width=8).likely_causes()[0] == FIRST


def reused(share):
    return np.eye(STEPS) * np.sqrt(1 - share**2) + share * np.eye(STEPS, k=-1)


FAULTS = {
    "periodic": np.tile(np.eye(5), (STEPS // 5, 1)),
    "partly reused": reused(0.3),
    "of running sums, as large as claimed in each": running_sums() / np.sqrt(2),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_reused_noise_is_not_called_a_factorization(fault):
    result = audited(FAULTS[fault])
    assert "step-correlation" in [finding.name for finding in result.findings]
    assert not [cause for cause in result.likely_causes() if cause == FIRST]


def test_sums_that_are_left_over_are_not_called_a_factorization():
    """They persist, so that steps are correlated; but new noise is related to them."""
    rng, record = np.random.default_rng(0), dpaudit.Diagnostics()
    total = last = np.zeros(100)
    for _ in range(STEPS):
        last, total = total, 0.9 * total + rng.standard_normal(100)
        record.observe_noise(rng.standard_normal(100) + 0.5 * last, known=total)
    found = record.diagnose()
    assert {"step-correlation", "noise-by-sum"} <= {finding.name for finding in found.findings}
    assert FIRST not in found.likely_causes()
