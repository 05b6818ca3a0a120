"""Check that auditing every step with 4,096 canaries slows training by at most 10 %."""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial

from _cases import CONV_NET, MLP, Case, Step, in_turns, ratio, training
from _measure import Table, finish, milliseconds, restart_in_environment

from dpaudit.training import OneRun

LIMIT = 1.10
NUMBERS = (64, 1024, 4096)


def without_audit(case: Case) -> Step:
    return training(case).step


def with_audit(case: Case, num_canaries: int) -> Step:
    return training(case, [OneRun(delta=1e-5, num_canaries=num_canaries, seed=0)]).step


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    columns = ("model", "batch", "canaries", "without", "with audit", "ratio", "limit")
    table = Table("One step of DP-SGD", columns)
    for case in (MLP, CONV_NET):
        kinds = {str(number): partial(with_audit, num_canaries=number) for number in NUMBERS}
        times = in_turns(case, {"without": without_audit, **kinds})
        for number in NUMBERS:
            slower = ratio(times[str(number)], times["without"])
            cells = [milliseconds(statistics.median(times[kind])) for kind in ("without", str(number))]
            table.add(
                case.name,
                str(case.batch_size),
                f"{number:,}",
                *cells,
                f"{slower:.3f}x",
                f"at most {LIMIT:.2f}x",
                met=slower <= LIMIT,
            )
    return finish(table)


if __name__ == "__main__":
    restart_in_environment()
    sys.exit(main())
