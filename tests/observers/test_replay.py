"""Replays of functions that return a release: one example must not move it by more than the clipping norm."""

import json

import numpy as np
import pytest
import torch

import dpaudit
from dpaudit.observers.step import replay

NORM = 0.5
ROWS = np.random.default_rng(9).standard_normal((20, 100)).astype(np.float32)
NEIGHBORS = [ROWS[1:], np.concatenate([ROWS, 50 * ROWS[:1]])]


def clipped_sum(rows, norm=NORM):
    return (rows / np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True) / norm)).sum(axis=0)


def replayed(release, batch=ROWS, neighbors=None, *, reseed=lambda: None, **options):
    return replay(release, batch, neighbors, reseed=reseed, max_grad_norm=NORM, **options)


def with_noise(release):
    """A release with noise, and the function that resets it."""
    rng = np.random.default_rng()

    def reseed():
        rng.bit_generator.state = np.random.default_rng(0).bit_generator.state

    return lambda rows: release(rows) + rng.standard_normal(100), reseed


def names(result):
    return [finding.name for finding in result.findings]


CORRECT = {
    "sum": (clipped_sum, {}),
    "mean": (lambda rows: clipped_sum(rows) / 20, {"batch_size": 20}),
    "list": (lambda rows: clipped_sum(rows).tolist(), {}),
    "tensor": (lambda rows: torch.as_tensor(clipped_sum(rows)), {}),
}


@pytest.mark.parametrize("neighbors", [None, NEIGHBORS])
@pytest.mark.parametrize("kind", CORRECT)
def test_a_correct_step_moves_by_at_most_the_clipping_norm(kind, neighbors):
    release, options = CORRECT[kind]
    result = replayed(release, neighbors=neighbors, **options)
    assert result.largest == pytest.approx(1.0, rel=1e-5)
    assert not result.is_violation
    assert not result.tests_coupling
    result.raise_for_violation()
    assert any("only releases were compared" in gap for gap in result.not_covered)


BROKEN = {
    "no clipping": lambda rows: rows.sum(axis=0),
    "batch statistics": lambda rows: clipped_sum(rows - rows.mean(axis=0)),
    "another norm": lambda rows: clipped_sum(rows, 1.01 * NORM),
}


@pytest.mark.parametrize("neighbors", [None, NEIGHBORS])
@pytest.mark.parametrize("fault", BROKEN)
def test_a_release_that_moves_too_far_is_a_violation(fault, neighbors):
    release, reseed = with_noise(BROKEN[fault])
    result = replayed(release, neighbors=neighbors, reseed=reseed)
    assert names(result) == ["sensitivity"]
    assert result.likely_causes()
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["is_violation"]
    with pytest.raises(
        dpaudit.ViolationError, match=r"clipping norms if one example is .*, more than the [12] "
    ):
        result.raise_for_violation()


def test_a_release_that_is_not_finite_hides_no_violation():
    missing = np.concatenate([ROWS[1:], np.full((1, 100), np.nan)])
    result = replayed(clipped_sum, neighbors=[missing])
    assert not result.is_violation
    assert [finding.name for finding in result.non_finite] == ["non-finite-example"]
    assert "if it can have a non-finite gradient" in str(result)
    assert result.likely_causes()
    assert result.to_dict()["checks"][0]["distance"] is None

    def doubled(rows):
        return clipped_sum(rows) * (2.0 if len(rows) > 20 else 1.0)

    assert names(replayed(doubled, neighbors=[missing, NEIGHBORS[1]])) == ["sensitivity"]
    result = replayed(lambda rows: np.exp(rows).sum(axis=0), neighbors=[1e6 * ROWS])
    assert not result.is_violation  # finite examples may have a non-finite gradient, too
    assert result.non_finite


def test_data_of_one_batch_that_is_left_for_the_next_is_a_finding():
    last = []

    def release(rows):
        last.append(rows.mean())
        return rows[0] / 100 + (last[-2] if len(last) > 2 else last[0])

    result = replayed(release)
    assert "next-release" in names(result)
    assert "it keeps data outside of its state" in str(result)


def test_an_error_of_an_example_is_a_finding_only_if_the_example_is_natural():
    def fixed_size(rows):
        return clipped_sum(rows.reshape(20, 100))

    result = replayed(fixed_size)
    assert names(result) == ["failing-step"]
    assert "The step raises ValueError if one example is removed" in str(result)
    result = replayed(fixed_size, neighbors=[ROWS[1:], np.concatenate([ROWS[:19], 0 * ROWS[:1]])])
    assert names(result) == []
    assert any(
        "raised ValueError if one example is added or removed, as" in gap for gap in result.not_covered
    )


def test_what_cannot_be_replayed_is_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(
        dpaudit.InputError, match=r"bit for bit, got other releases: let reseed\(\) reset the RNG"
    ):
        replayed(lambda _: rng.standard_normal(100))
    with pytest.raises(dpaudit.InputError, match="at least one batch"):
        replayed(clipped_sum, neighbors=[])
    with pytest.raises(dpaudit.InputError, match="a finite release"):
        replayed(clipped_sum, np.full((20, 100), np.nan), [ROWS])
    with pytest.raises(
        dpaudit.InputError, match="got 100 numbers for the batch and 99 for a neighboring one"
    ):
        replayed(clipped_sum, neighbors=[ROWS[:, 1:]])
    with pytest.raises(dpaudit.InputError, match="no change of an example changed the release"):
        replayed(lambda _: np.zeros(100))
    with pytest.raises(dpaudit.InputError, match="max_grad_norm"):
        replay(clipped_sum, ROWS, reseed=lambda: None, max_grad_norm=0.0)
