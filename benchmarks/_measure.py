"""Timing and tables shared by the benchmarks."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "ONE_THREAD",
    "Table",
    "finish",
    "medians",
    "milliseconds",
    "restart_in_environment",
    "seconds",
]

# For child processes: limits refer to one core, and threads that share a core distort the times.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}

# The C library reads these before Python starts. By default it returns memory to the system after every step,
# which makes per-example gradients three to four times slower.
MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "67108864",
}


def seconds(function: Callable[..., object], *arguments: Any) -> float:
    """Return the duration of one call."""
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def medians(
    functions: Mapping[str, Callable[..., object]],
    repetitions: int,
    fresh: Callable[[], tuple[Any, ...]] = tuple,
) -> dict[str, float]:
    """Return the median duration of each function in seconds.

    The functions take turns, so that temporary load on the machine affects all of them. Each call gets new
    arguments from ``fresh``, which runs outside the measured time.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repetitions):
        for name, function in functions.items():
            arguments = fresh()
            times[name].append(seconds(function, *arguments))
    return {name: statistics.median(values) for name, values in times.items()}


def milliseconds(value: float) -> str:
    """Format seconds as milliseconds for a table cell."""
    return f"{1e3 * value:,.2f} ms" if value < 0.0995 else f"{1e3 * value:,.0f} ms"


@dataclass
class Table:
    """Rows of text; the last cell of a row shows whether its limit was met."""

    title: str
    columns: tuple[str, ...]
    complaint: str = "TOO SLOW"
    rows: list[tuple[str, ...]] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)

    def add(self, *cells: str, met: bool | None = None, remark: str = "") -> None:
        """Add a row; ``met`` is None without a limit, and ``remark`` is shown instead."""
        verdict = remark if met is None else "OK" if met else self.complaint
        self.rows.append((*cells, verdict))
        if met is False:
            self.missed.append(" ".join(cells))

    def show(self) -> None:
        """Print the table."""
        lines = [(*self.columns, ""), *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        print(f"\n{self.title}")
        for number, line in enumerate(lines):
            cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            print("  " + "  ".join(cells).rstrip())
            if number == 0:
                print("  " + "  ".join("-" * width for width in widths if width))


def finish(*tables: Table) -> int:
    """Print the tables and return the exit status, 1 if a limit was missed."""
    for table in tables:
        table.show()
    return int(any(table.missed for table in tables))


def restart_in_environment(python: str = sys.executable) -> None:
    """Restart the process with one thread and retained memory, unless it already runs that way."""
    # A variable records the interpreter, because sys.executable may spell the same path differently.
    wanted = MALLOC | ONE_THREAD | {"DPAUDIT_BENCHMARK_PYTHON": python}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(python, [python, *sys.argv], os.environ | wanted)
    import torch  # noqa: PLC0415  # after the restart, and not needed by scripts that only print tables

    torch.set_num_threads(1)
