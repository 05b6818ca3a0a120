"""Write the numbers of a fixed set of audits to a file, or compare them with those of a file.

    python tools/pages/golden.py --write golden.json
    python tools/pages/golden.py --compare golden.json

A change that only moves code leaves every bound, stated power and p-value as it was. The set has every
inference with every threshold rule on scores of several shapes, and short training runs in every library,
correct and broken, all with fixed seeds. Powers are simulated, so they are compared with a tolerance;
everything else must be equal to nine digits. Training depends on the machine's arithmetic: write and
compare on one machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _shared import restart_in_environment
from correct_runs import native_audit

import dpaudit
from dpaudit.errors import DpauditError
from dpaudit.stats import (
    Betting,
    ClopperPearson,
    Fixed,
    HeldOut,
    JointExact,
    KatzLog,
    Posterior,
    Predictable,
    SameData,
    Simultaneous,
    Tails,
    lower_bound,
)
from dpaudit.zoo.faults import OBSERVERS, fault_named

DELTA = 1e-5
POWER_TOLERANCE = 0.02  # relative; the error of the simulation behind a stated power
EXACT_TOLERANCE = 1e-9
BROKEN = ("less-noise", "cut", "std-by-size", "forgotten-bias", "left-over", "doubled", "duplicates")
NUM_STEPS = 120

INFERENCES = (ClopperPearson(), JointExact(), Betting(), Posterior(), KatzLog())
RULES = (Fixed(0.5), HeldOut(0.5, seed=1), Simultaneous(), Predictable(), SameData(), Tails())
CURVES = (dpaudit.Gaussian(), dpaudit.ApproximateDP(), dpaudit.PureDP())
SHAPES = {"scores": (400, None), "steps": (60, 16), "few": (12, None)}


def scores(shape: tuple[int, int | None]) -> dpaudit.Observations:
    rng, size = np.random.default_rng(7), shape[0] if shape[1] is None else shape
    return dpaudit.Observations(
        with_canary=1 + rng.standard_normal(size), without_canary=rng.standard_normal(size)
    )


def bounds() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield every combination of inference, rule, curve and shape."""
    for inference, rule, curve, (name, shape) in itertools.product(INFERENCES, RULES, CURVES, SHAPES.items()):
        delta = 0.0 if isinstance(inference, KatzLog) else DELTA

        def bound(
            inference: Any = inference,
            rule: Any = rule,
            curve: Any = curve,
            shape: Any = shape,
            delta: Any = delta,
        ) -> dict[str, Any]:
            result = lower_bound(
                scores(shape), delta=delta, tradeoff=curve, inference=inference, threshold=rule
            )
            return {"parameter": result.parameter, "epsilon": result.epsilon}

        names = (type(value).__name__ for value in (inference, rule, curve))
        yield " ".join([*names, name]), bound


def audits() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield verdicts on scores, and short training runs."""
    claims = {
        "gaussian": dpaudit.Claim.gaussian(noise_multiplier=2.0, delta=DELTA),
        "approximate": dpaudit.Claim.approximate_dp(epsilon=1.0, delta=DELTA),
    }
    for (name, claim), (kind, shape) in itertools.product(claims.items(), SHAPES.items()):
        yield (
            f"audit {name} {kind}",
            lambda claim=claim, shape=shape: numbers(dpaudit.audit(scores(shape), claim=claim)),
        )
    yield "native correct", lambda: native(is_broken=False)
    yield "native broken", lambda: native(is_broken=True)
    from _detection_runs import RUNS, Run  # noqa: PLC0415  # imports all libraries

    for observer, name in itertools.product(OBSERVERS, ("correct", *BROKEN)):
        fault = fault_named(name)
        if observer in fault.observers:
            size = None if name == "correct" else fault.sizes[0]

            def run(fault: Any = fault, size: Any = size, observer: str = observer) -> dict[str, Any]:
                training = Run(fault, size, sigma=1.2, num_steps=NUM_STEPS, seed=5)
                return numbers(RUNS[observer](training).audit())

            yield f"{observer} {name}", run


def native(*, is_broken: bool) -> dict[str, Any]:
    from dpaudit.training import DPSGD, SGD, broken, initialize  # noqa: PLC0415
    from dpaudit.training.data import digits  # noqa: PLC0415
    from dpaudit.training.models import mlp  # noqa: PLC0415

    train, _ = digits().split(1500)
    settings = DPSGD(
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.05,
        num_steps=NUM_STEPS,
        optimizer=SGD(learning_rate=0.5),
    )
    options = (
        {"mechanism": broken.NoiseTooSmall(noise_multiplier=1.0, max_grad_norm=1.0)} if is_broken else {}
    )
    return numbers(native_audit(initialize(lambda: mlp(64, 16, 10), 1), train, settings, 1, **options))


def numbers(result: Any) -> dict[str, Any]:
    """Return the numbers of a result: bound, power, p-values and findings."""
    checks = () if result.diagnosis is None else result.diagnosis.checks
    return {
        "verdict": result.verdict.name,
        "parameter": result.bound.parameter,
        "epsilon": result.bound.epsilon,
        "claimed": result.claim.epsilon,
        "power": result.power.parameter,
        "p_value": result.p_value,
        "checks": {check.name: check.p_value for check in checks},
        "findings": [finding.name for finding in result.findings],
        "causes": list(result.likely_causes()),
    }


def recorded(only: str) -> dict[str, Any]:
    """Return the numbers of all audits whose name contains ``only``, or why there are none."""
    values: dict[str, Any] = {}
    for name, compute in itertools.chain(bounds(), audits()):
        if only not in name:
            continue
        try:
            values[name] = compute()
        except DpauditError as error:
            values[name] = {"error": type(error).__name__}
        print(name, file=sys.stderr)
    return values


def differences(path: str, before: Any, after: Any) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from differences(f"{path} / {key}", before.get(key), after.get(key))
    elif isinstance(before, float | int) and isinstance(after, float | int):
        tolerance = POWER_TOLERANCE if path.endswith("power") else EXACT_TOLERANCE
        if before != after and not math.isclose(before, after, rel_tol=tolerance, abs_tol=1e-300):
            yield f"{path}: {before} -> {after}"
    elif before != after:
        yield f"{path}: {before} -> {after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--only", default="", help="a part of the names of audits")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    values = json.loads(json.dumps(recorded(arguments.only)))
    if arguments.write:
        arguments.write.write_text(json.dumps(values, indent=1))
    if arguments.compare is None:
        return 0
    before = {
        name: numbers_before
        for name, numbers_before in json.loads(arguments.compare.read_text()).items()
        if arguments.only in name
    }
    changed = [line for name in before for line in differences(name, before[name], values.get(name))]
    print("\n".join(changed) or f"All numbers of {len(values)} audits are equal.")
    return int(bool(changed))


if __name__ == "__main__":
    restart_in_environment()
    sys.exit(main())
