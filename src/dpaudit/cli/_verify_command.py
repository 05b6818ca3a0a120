"""``dpaudit verify``: check the files of runs, and derive their numbers again from the scores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpaudit.cli._console import output, print_json, working
from dpaudit.cli._exit_status import BAD_INPUT, ExitStatus, printable
from dpaudit.cli._options import Json

if TYPE_CHECKING:  # imported when the command is called, so that the others start faster
    from dpaudit.experiments._recompute import Verification


_Runs = Annotated[list[Path], typer.Argument(metavar="DIR", help="Directories of runs.")]


def verify(*, runs: _Runs, as_json: Json = False) -> None:
    """Check that runs are as they were when they were sealed.

    Compares every file with the manifest, and derives counts, bounds and
    verdict again from the stored scores. The verdict does not matter.

    Exit status: 0 if all runs are sealed and consistent, 2 if a file has
    changed, a number does not follow, or a run is unfinished or unsealed.
    """
    from dpaudit.experiments import _recompute  # noqa: PLC0415

    with working(f"Checking {len(runs)} {'run' if len(runs) == 1 else 'runs'}"):
        verifications = [_recompute.verify(path) for path in runs]
    is_accepted = all(verification.status == "sealed" for verification in verifications)
    if as_json:
        print_json(
            {"accepted": is_accepted, "runs": [verification.to_dict() for verification in verifications]}
        )
    else:
        for verification in verifications:
            _print(verification)
    if not is_accepted:
        raise ExitStatus(BAD_INPUT)


def _print(verification: Verification) -> None:
    """Print the status of a run, and the sentences that belong to it."""
    console = output()
    verdict = (
        ""
        if verification.seal is None and verification.verdict is None
        else f", {verification.verdict or 'no claim'}"
    )
    seal = "" if verification.seal is None else f", seal {verification.seal}"
    console.print(
        printable(f"{verification.directory}: {verification.status}{verdict}{seal}"), soft_wrap=True
    )
    sentences = (
        verification.remarks if verification.error is None else (verification.error, *verification.remarks)
    )
    for text in sentences:
        console.print(f"  {printable(text)}", soft_wrap=True)
