"""Statistics of scores that are standard normal if a score is presence and noise of the claimed amount.

Scores of one step share its noise. How much is known from the directions of their canaries, so that the
sampling error of a mean or a spread over all of them is known exactly.
"""

import numpy as np
import pytest
from statistical_limits import room, spread_range

MOST = room(1.0, comparisons=3)  # of a standard normal number


def statistics(*, scores, present, directions, lengths, noise_multiplier):
    """Of the absent, of the present, and of the spread of both.

    ``scores`` and ``present`` are steps x canaries; ``directions`` are for each step canaries x parameters,
    of length 1; ``lengths`` are those of the clipped gradients, in clipping norms.
    """
    present = np.asarray(present, dtype=np.float64)
    noise = (np.asarray(scores) - present) * np.asarray(lengths) / noise_multiplier
    cosines = np.asarray([np.asarray(one, np.float64) @ np.asarray(one, np.float64).T for one in directions])
    return {
        "absent": _mean(noise, cosines, 1 - present),
        "present": _mean(noise, cosines, present),
        "spread": float((np.square(noise) - 1).sum() / np.sqrt(2 * np.square(cosines).sum())),
    }


def _mean(noise, cosines, chosen):
    """The sum of the chosen ones over its standard error."""
    variance = np.einsum("si,sij,sj->", chosen, cosines, chosen)
    return float((noise * chosen).sum() / np.sqrt(variance))


def off(found):
    """Return those statistics that are further from 0 than random noise explains."""
    return {name: value for name, value in found.items() if not abs(value) < MOST}


def require_normal(observations, *, noise, signal=1.0):
    """Check mean and spread of scores whose noise is independent, with and without a canary."""
    for scores, mean in ((observations.with_canary, signal), (observations.without_canary, 0.0)):
        assert scores.mean() == pytest.approx(mean, abs=room(noise / np.sqrt(scores.size), comparisons=4))
        low, high = spread_range(scores.size, comparisons=4)
        assert low < scores.std(ddof=1) / noise < high
