"""Epsilons of extreme training runs by slow and obvious means, for the table in ``fixtures``.

``python tests/accounting/ends_of_the_range.py`` adds what the table lacks; all of it takes about ten minutes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from scipy import special

PATH = Path(__file__).parent.parent / "fixtures" / "ends_of_the_range.json"

# noise multiplier, sample rate, steps, delta; and the real part of the path of integration
INVERTED = {
    (0.6, 1e-4, 10**5, 1e-5): 3.0,
    (0.3, 1e-5, 10**6, 1e-5): 0.8,
    (1.0, 1e-3, 10**6, 1e-5): 3.0,
    (1.0, 1e-6, 10**6, 1e-5): 12.0,
    (0.3, 1e-3, 10**5, 1e-5): 0.18,
    (50.0, 0.5, 10**6, 1e-12): 0.7,
    (1.0, 0.01, 10**5, 1e-12): 1.0,
    (20.0, 1e-4, 10**6, 1e-9): 600.0,
    (5.0, 1e-5, 10**5, 1e-12): 90.0,
    (0.4, 1e-6, 10**6, 1e-3): 1.0,
}
ONE_STEP = [
    (0.5, 1e-6, 1, 1e-7),
    (0.3, 1e-6, 1, 1e-12),
    (0.3, 1e-3, 1, 1e-5),
    (0.5, 1e-6, 1, 4e-8),
    (1.0, 1e-6, 1, 1e-9),
    (1.0, 0.01, 1, 1e-12),
    (50.0, 1e-6, 1, 1e-12),
    (50.0, 0.5, 1, 1e-3),
    (5.0, 1e-4, 1, 1e-6),
    (0.3, 0.9, 1, 0.1),
]
FULL_BATCHES = [
    (50.0, 1.0, 10**6, 1e-12),
    (50.0, 1.0, 1, 1e-3),
    (0.3, 1.0, 1, 0.1),
    (1.0, 1.0, 100, 1e-9),
    (10.0, 1.0, 10**4, 1e-12),
]
# intervals that are fine for the losses
GRID = {
    (0.3, 1e-3, 10, 1e-5): 1e-4,
    (0.3, 0.1, 100, 1e-12): 1e-3,
    (0.3, 1e-6, 10, 1e-12): 1e-4,
    (0.3, 1e-4, 1000, 1e-8): 1e-4,
    (0.5, 0.01, 100, 1e-3): 1e-4,
    (0.5, 1e-3, 10**4, 1e-6): 1e-4,
    (0.6, 0.3, 3, 0.1): 1e-4,
    (0.8, 1e-4, 10**4, 1e-7): 1e-5,
    (1.0, 0.01, 10**4, 0.1): 1e-4,
    (1.0, 0.1, 30, 1e-10): 1e-4,
    (2.0, 0.1, 10**5, 1e-5): 1e-2,
    (2.0, 1e-3, 1000, 1e-6): 1e-5,
    (5.0, 0.01, 10**5, 1e-7): 1e-4,
    (10.0, 0.5, 300, 1e-9): 1e-4,
    (50.0, 0.9, 10**4, 1e-4): 1e-4,
}


def inverted(noise: float, rate: float, steps: int, delta: float, real: float) -> tuple[float, float]:
    """Integrate in 50 digits: over the noise on the real axis, over orders on a vertical line."""
    with mpmath.workdps(50):
        sigma, q, one = mpmath.mpf(noise), mpmath.mpf(rate), mpmath.mpf(1)
        spacing = sigma / 40
        grid = [k * spacing for k in range(-480, int((12 * noise + 1 + real) / noise * 40))]
        ratios = [mpmath.log(1 - q + q * mpmath.exp((2 * x - 1) / (2 * sigma**2))) for x in grid]
        weights = [mpmath.exp(-(x**2) / (2 * sigma**2)) / mpmath.sqrt(2 * mpmath.pi) / 40 for x in grid]

        def log_moment(order: Any) -> Any:
            return mpmath.log(
                mpmath.fsum(w * mpmath.exp(order * r) for w, r in zip(weights, ratios, strict=True))
            )

        step, terms, at = mpmath.mpf(1) / 50, [], mpmath.mpf(0)
        while True:
            s, slope = mpmath.mpc(real, real * mpmath.sinh(at)), real * mpmath.cosh(at)
            value = steps * log_moment(one + s)
            terms.append((s, value + mpmath.log(step / mpmath.pi * slope / (s * (1 + s)) / (1 if at else 2))))
            at += step
            if (value - steps * log_moment(one + real)).real < -40:
                break

        limit = rate * math.sqrt(steps * math.expm1(min(noise**-2, 700)))  # the total mu
        low, high = mpmath.mpf(0), mpmath.mpf(20 * (limit**2 / 2 + limit * -float(special.ndtri(delta))))
        for _ in range(60):
            middle = (low + high) / 2
            is_above = mpmath.fsum((mpmath.exp(t - s * middle)).real for s, t in terms) > delta
            low, high = (middle, high) if is_above else (low, middle)
        found = float(low)
    return found, found


def one_step(noise: float, rate: float, steps: int, delta: float) -> tuple[float, float]:
    """Bisect on the closed form of delta, q (Phi(a) - e^c Phi(b)) at epsilon = ln(1 + q (e^c - 1))."""
    assert steps == 1
    with mpmath.workdps(50):
        sigma = mpmath.mpf(noise)

        def excess(certain: Any) -> Any:
            upper, lower = (mpmath.ncdf(-certain * sigma + side / (2 * sigma)) for side in (1, -1))
            return rate * (upper - mpmath.exp(certain) * lower) - delta

        low, certain = mpmath.mpf(0), 80 / sigma + 1 / sigma**2
        for _ in range(160):
            middle = (low + certain) / 2
            low, certain = (middle, certain) if excess(middle) > 0 else (low, middle)
        found = float(mpmath.log1p(rate * mpmath.expm1(certain)))
    return found, found


def full_batches(noise: float, _: float, steps: int, delta: float) -> tuple[float, float]:
    """Return the closed form of the Gaussian mechanism, with mu = sqrt(steps) / noise."""
    return one_step(noise / math.sqrt(steps), 1.0, 1, delta)


def on_a_grid(noise: float, rate: float, steps: int, delta: float, interval: float) -> tuple[float, float]:
    """Return dp-accounting's pessimistic epsilon, and the same minus its change by half of the interval."""
    coarse, fine = (
        privacy_loss_distribution.from_gaussian_mechanism(
            noise, sampling_prob=rate, value_discretization_interval=size, use_connect_dots=True
        )
        .self_compose(steps)
        .get_epsilon_for_delta(delta)
        for size in (interval, interval / 2)
    )
    return fine - abs(coarse - fine), fine


def random_setting(seed: int) -> tuple[float, float, int, float]:
    """Draw a setting from the range in which a grid is exact, evenly in logarithms."""
    ends = np.log10([[0.3, 1e-3, 1, 1e-8], [50, 1, 10**4, 0.1]])
    noise, rate, steps, delta = (10 ** np.random.default_rng(seed).uniform(*ends)).tolist()
    return noise, rate, int(steps), delta


def main() -> None:
    rows = json.loads(PATH.read_text()) if PATH.exists() else []
    stored = {tuple(row["setting"]) for row in rows}
    for kind, settings in (
        (one_step, ONE_STEP),
        (full_batches, FULL_BATCHES),
        (on_a_grid, GRID),
        (inverted, INVERTED),
    ):
        for setting in settings:
            if setting in stored:
                continue
            extra = (settings[setting],) if isinstance(settings, dict) else ()
            low, high = kind(*setting, *extra)
            print(kind.__name__, setting, low, high, flush=True)
            rows.append({"setting": setting, "oracle": kind.__name__, "low": low, "high": high})
            PATH.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main()
