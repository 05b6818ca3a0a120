"""Check that auditing every step with 4,096 canaries slows training by at most 10 %."""

from __future__ import annotations

import argparse
import statistics
import sys

from _cases import CONV_NET, MLP, Case, Step, in_turns, ratio, restart_in_environment, training
from _measure import Table, finish, milliseconds

from dpaudit.training import OneRun

LIMIT = 1.10
NUM_CANARIES = 4096


def without_audit(case: Case) -> Step:
    return training(case).step


def with_audit(case: Case) -> Step:
    return training(case, [OneRun(delta=1e-5, num_canaries=NUM_CANARIES, seed=0)]).step


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    columns = ("model", "batch", "without", "with audit", "ratio", "limit")
    table = Table(f"One step of DP-SGD, audited with {NUM_CANARIES} canaries", columns)
    for case in (MLP, CONV_NET):
        times = in_turns(case, {"without": without_audit, "with": with_audit})
        slower = ratio(times["with"], times["without"])
        cells = [milliseconds(statistics.median(found)) for found in times.values()]
        table.add(
            case.name,
            str(case.batch_size),
            *cells,
            f"{slower:.3f}x",
            f"at most {LIMIT:.2f}x",
            met=slower <= LIMIT,
        )
    return finish(table)


if __name__ == "__main__":
    restart_in_environment()
    sys.exit(main())
