"""The power of counts against all outcomes of a small audit, as docs/statistics.md states it."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from score_samples import bound, counts

import dpaudit
from dpaudit.stats._power import AuditDesign
from dpaudit.stats.inference import BoundQuery

DELTA = 1e-5


def _most_refuting(false_positives: int, size: int, claimed: float, inference: dpaudit.Inference) -> int:
    """The most false negatives with which the claim is refuted, -1 if none; by bisection."""
    low, high = -1, size
    while high - low > 1:
        middle = (low + high) // 2
        refuted = bound(counts(false_positives, size, middle, size), inference).parameter
        low, high = (middle, high) if refuted > claimed else (low, middle)
    return low


def _enumerated(size: int, claimed: float, actual: float, inference: dpaudit.Inference) -> float:
    rate = stats.norm.cdf(-actual / 2)
    chances = stats.binom.pmf(np.arange(size + 1), size, rate)
    likely = np.flatnonzero(chances > 1e-5)
    most = [_most_refuting(int(fp), size, claimed, inference) for fp in likely]
    return float(chances[likely] @ stats.binom.cdf(most, size, rate))


@pytest.mark.parametrize(
    ("inference", "size", "claimed"),
    [
        (dpaudit.ClopperPearson(), 40, 1.0),
        (dpaudit.ClopperPearson(), 90, 2.0),
        (dpaudit.JointExact(), 40, 1.0),
        (dpaudit.JointExact(), 90, 2.0),
    ],
    ids=str,
)
def test_the_leak_stated_for_80_per_cent_is_found_about_as_often(
    inference: dpaudit.Inference, size: int, claimed: float
) -> None:
    claim = dpaudit.Claim.gaussian(noise_multiplier=1 / claimed, delta=DELTA)
    leak = dpaudit.smallest_leak(claim, num_steps=size, inference=inference)
    assert 0.785 < _enumerated(size, claimed, leak.parameter, inference) < 0.805


class _CountingGaussian(dpaudit.Gaussian):
    """Count how often a point is inverted to its parameter, which is costly for the curve of a whole run."""

    inverted = 0

    def parameter(self, fpr, fnr):
        type(self).inverted += 1
        return super().parameter(fpr, fnr)


@pytest.mark.parametrize("inference", [dpaudit.ClopperPearson(), dpaudit.JointExact()])
@pytest.mark.parametrize("size", [40, 300])
def test_an_audit_that_can_refute_a_claim_is_recognized_on_the_claimed_curve(inference, size):
    query = BoundQuery(_CountingGaussian(), 1e-5, 0.05)
    design = AuditDesign(inference, dpaudit.Fixed(0.5), query, size, size, size)
    largest = design.max_refutable
    _CountingGaussian.inverted = 0
    assert design.can_refute(0.5 * largest)
    assert design.can_refute(0.999 * largest)
    assert not design.can_refute(1.001 * largest)
    assert replace(design).can_refute(0.5 * largest)
    assert _CountingGaussian.inverted == 0
