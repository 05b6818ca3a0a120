"""Check the time of a DP-SGD step against torch without privacy and against Opacus 1.6.0 with hooks.

A step may take at most twice as long as without privacy, and must be several times faster than Opacus where
all layers are linear. Every kind of step starts from the same weights and uses the same batch, clipping norm,
noise and learning rate. Without noise, a step of Opacus must lead to the same weights as ours.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from _cases import (
    CONV_NET,
    LEARNING_RATE,
    MLP,
    WIDE_RESNET,
    Case,
    Step,
    fixed_indices,
    in_turns,
    ratio,
    training,
)
from _measure import Table, finish, milliseconds, restart_in_environment
from _others import parser
from torch import nn

from dpaudit.training.gradients import flat_parameters

MOST_OF_TORCH = 2.0
SPEEDUP = {MLP: 8.0, CONV_NET: 1.2, WIDE_RESNET: 1.5}
SAME = 1e-5  # fraction of the largest weight change: Opacus adds 1e-6 to every norm


def torch_step(case: Case) -> Step:
    """Return a plain training step: forward, backward, update."""
    data, model, indices = case.data(), case.model(), fixed_indices(case.batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step() -> None:
        inputs, targets = data.at(indices)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def dpaudit_step(case: Case) -> Step:
    return training(case).step


@dataclass(frozen=True)
class Tables:
    """The comparisons with torch and, if installed, with Opacus."""

    torch: Table
    opacus: Table | None

    @classmethod
    def empty(cls, with_opacus: bool) -> Tables:
        """Return tables without rows."""
        columns = ("model", "batch", "torch", "dpaudit", "ratio", "limit")
        theirs = ("model", "batch", "Opacus", "dpaudit", "speed-up", "limit")
        return cls(
            Table("A DP-SGD step and a step without privacy", columns),
            Table("A DP-SGD step of Opacus 1.6.0 and of dpaudit", theirs) if with_opacus else None,
        )

    def add(self, case: Case, times: dict[str, list[float]]) -> None:
        """Add a row to each table."""
        cells = {name: milliseconds(statistics.median(found)) for name, found in times.items()}
        head = case.name, str(case.batch_size)
        slower = ratio(times["dpaudit"], times["torch"])
        limit = f"at most {MOST_OF_TORCH:g}x"
        row = *head, cells["torch"], cells["dpaudit"], f"{slower:.2f}x", limit
        self.torch.add(*row, met=slower <= MOST_OF_TORCH)
        if self.opacus is not None:
            faster, least = ratio(times["opacus"], times["dpaudit"]), SPEEDUP[case]
            row = *head, cells["opacus"], cells["dpaudit"], f"{faster:.2f}x", f"at least {least:g}x"
            self.opacus.add(*row, met=faster >= least)


def require_same_step(case: Case) -> None:
    """Exit if the updates of Opacus and dpaudit differ, which would make the comparison meaningless.

    Double precision is used, because in single precision the gradients of a deep network differ by 1e-3 from
    their true values: some ReLU activations are on the other side of zero.
    """
    from _opacus_step import opacus_model  # noqa: PLC0415  # only if Opacus is installed

    case = replace(case, batch_size=8, dtype=torch.float64)
    before = flat_parameters(case.model())
    ours = training(case, noise_multiplier=0.0)
    ours.step()
    mine, theirs = flat_parameters(ours.model) - before, flat_parameters(opacus_model(case)) - before
    difference = float((mine - theirs).abs().max() / mine.abs().max())
    if difference > SAME:
        raise SystemExit(f"{case.name}: the update of Opacus differs by {difference:.1e} of ours.")


def main() -> int:
    parser(__doc__).parse_args()
    kinds = {"torch": torch_step, "dpaudit": dpaudit_step}
    with_opacus = importlib.util.find_spec("opacus") is not None
    if with_opacus:
        from _opacus_step import opacus_step  # noqa: PLC0415  # only if Opacus is installed

        kinds["opacus"] = opacus_step
    tables = Tables.empty(with_opacus)
    for case in SPEEDUP:
        if with_opacus:
            require_same_step(case)
        tables.add(case, in_turns(case, kinds))
    return finish(tables.torch, *filter(None, [tables.opacus]))


def restart_with_others() -> None:
    """Restart with the interpreter that has Opacus, because both take turns in one process."""
    others = parser(__doc__).parse_args().others
    if others is None:
        restart_in_environment()
        return
    source = Path(__file__).resolve().parents[1] / "src"
    os.environ["PYTHONPATH"] = str(source)
    restart_in_environment(str(others.absolute()))


if __name__ == "__main__":
    restart_with_others()
    sys.exit(main())
