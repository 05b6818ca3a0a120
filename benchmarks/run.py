"""Run all benchmarks, each in a separate process; the exit status is 1 if any limit is missed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from _measure import ONE_THREAD
from _others import parser

ALONE = ("joint_exact", "compose", "first_audit", "streaming", "audit_overhead", "pools")
WITH_OTHERS = ("scan_thresholds", "posterior", "dpsgd_step", "compare")


def main() -> int:
    options = parser(__doc__).parse_args()
    others = [] if options.others is None else ["--others", str(options.others)]
    summary = {}
    for name in (*WITH_OTHERS[:2], *ALONE, *WITH_OTHERS[2:]):
        arguments = others if name in WITH_OTHERS else []
        start = time.perf_counter()
        status = _run(name, arguments)
        summary[name] = f"{_verdict(status)} ({time.perf_counter() - start:,.0f} s)"
    print("\nSummary")
    for name, text in summary.items():
        print(f"  {name:<16}{text}")
    return int(any(not text.startswith("OK") for text in summary.values()))


def _run(name: str, arguments: list[str]) -> int:
    script = Path(__file__).with_name(f"{name}.py")
    command = [sys.executable, str(script), *arguments]
    sys.stdout.flush()
    return subprocess.run(command, check=False, env={**os.environ, **ONE_THREAD}).returncode


def _verdict(status: int) -> str:
    return {0: "OK", 1: "A LIMIT WAS MISSED"}.get(status, f"FAILED with exit status {status}")


if __name__ == "__main__":
    sys.exit(main())
