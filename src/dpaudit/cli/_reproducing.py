"""Figures of the paper measured, watched and written: one, or one after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dpaudit.cli._progress import Watching
from dpaudit.errors import DpauditError, InputError

if TYPE_CHECKING:  # imported when the command is called, so that the others start faster
    from dpaudit.experiments.reproduction import Data, Figure, Reproduced, Scale
    from dpaudit.experiments.trials import Processes

__all__ = ["Asked"]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the words of the command say of every figure."""

    scale: Scale
    place: Path
    data: Data
    seed: int
    device: str
    num_workers: int | None
    """None: one for each core, where it is worth it."""

    def one(self, figure: Figure) -> tuple[Reproduced, list[Path]]:
        """Measure a figure and write its files."""
        from dpaudit.report.reproduction import require_plotting, write_reproduced  # noqa: PLC0415

        require_plotting()  # before the work, not after it
        found = self._measured(figure)
        return found, write_reproduced(found, self.place)

    def each(self, figures: tuple[Figure, ...]) -> Iterator[tuple[Reproduced, list[Path]]]:
        """One after another. What goes wrong with one is told, and the next one comes."""
        failed = []
        for figure in figures:
            typer.echo(f"{figure.name}: {figure.title}", err=True)
            try:
                yield self.one(figure)
            except DpauditError as error:
                typer.echo(f"{figure.name}: {error}", err=True)
                failed.append(figure.name)
        if failed:
            raise InputError(
                f"Expected {len(figures)} figures, but {len(failed)} could not be made: {', '.join(failed)}."
            )

    def _pool(self) -> Processes | None:
        """A GPU has one process at a time, and so has what takes seconds, unless more are asked for."""
        from dpaudit.experiments.reproduction import Scale  # noqa: PLC0415
        from dpaudit.experiments.trials import Processes  # noqa: PLC0415

        if self.num_workers is not None:
            return Processes(num_workers=self.num_workers) if self.num_workers > 1 else None
        return Processes() if self.device == "cpu" and self.scale is not Scale.TINY else None

    def _measured(self, figure: Figure) -> Reproduced:
        from dpaudit.experiments.reproduction import reproduce  # noqa: PLC0415

        num_done = total = 0
        with Watching() as watching:

            def watch(done: int, number: int, text: str) -> None:
                nonlocal num_done, total
                num_done, total = done, number
                watching.show(done, number, f"{done} of {number}: {text}")

            try:
                return reproduce(
                    figure,
                    output=self.place,
                    scale=self.scale,
                    data=self.data,
                    seed=self.seed,
                    device=self.device,
                    pool=self._pool(),
                    watch=watch,
                    within=watching.within,
                )
            except KeyboardInterrupt:
                kept = f"{num_done} of {total} cells of {figure.name} are done and kept in {self.place}"
                watching.say(f"Interrupted: {kept}. The same command goes on from there.")
                raise
