"""What single precision makes of a sum of many gradients is not taken for a fault of the noise."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from dpaudit.diagnostics import Diagnostics
from dpaudit.observers._residuals import clipped_sum, sum_rounding

ROWS = np.ones((8000, 50), np.float32)  # the sum of equal rows is rounded the same way at every row
NOISE = 0.05


def diagnose(*, factor=1.0, is_allowed_for=True):
    rng = np.random.default_rng(0)
    known = clipped_sum(ROWS.astype(np.float64), 1.0)
    released = (ROWS / np.linalg.norm(ROWS, axis=1, keepdims=True)).sum(axis=0)
    rounding = sum_rounding(ROWS, 1.0) / NOISE if is_allowed_for else 0.0
    record = Diagnostics()
    for _ in range(200):
        noise = (factor * NOISE * rng.standard_normal(50)).astype(np.float32)
        record.observe_noise((released + noise - known) / NOISE, rounding=rounding)
    return {finding.name for finding in record.diagnose().findings}


def test_a_sum_in_single_precision_is_a_finding_only_if_its_rounding_is_not_allowed_for():
    assert {"coordinate-correlation", "step-correlation"} <= diagnose(is_allowed_for=False)
    assert diagnose() == set()


def test_allowing_for_rounding_hides_no_missing_noise():
    rows = ROWS[:500]
    assert 0 < sum_rounding(rows, 1.0) / NOISE < 0.1
    record = Diagnostics()
    for row in np.random.default_rng(0).standard_normal((100, 50)):
        record.observe_noise(0.8 * row, rounding=sum_rounding(rows, 1.0) / NOISE)
    assert [finding.name for finding in record.diagnose().findings] == ["noise-variance"]


@pytest.mark.parametrize("make", [np.asarray, torch.as_tensor, jnp.asarray])
def test_the_rounding_is_above_what_the_libraries_are_off_by(make):
    rows = make(np.random.default_rng(1).standard_normal((3000, 40)).astype(np.float32))
    unit = rows / make(np.linalg.norm(np.asarray(rows), axis=1, keepdims=True))
    off = np.asarray(unit.sum(axis=0), np.float64) - clipped_sum(np.asarray(rows, np.float64), 1.0)
    assert 0 < np.abs(off).max() < sum_rounding(rows, 1.0) < 1e-3


def test_double_precision_and_no_rows_are_not_rounded():
    assert sum_rounding(ROWS.astype(np.float64), 1.0) == 0.0
    assert sum_rounding(ROWS[:0], 1.0) == 0.0


@pytest.mark.parametrize("bad", [-0.1, np.nan, np.inf])
def test_a_rounding_that_is_none_is_refused(bad):
    with pytest.raises(ValueError, match="rounding"):
        Diagnostics().observe_noise([0.0, 1.0], rounding=bad)
