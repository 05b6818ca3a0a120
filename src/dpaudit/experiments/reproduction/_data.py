"""Which official files a figure needs, and what stands for them without."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpaudit import _files
from dpaudit.errors import InputError

__all__ = ["CIFAR10", "PURCHASE", "Data", "Need"]


@dataclass(frozen=True)
class Need:
    """Files of one data set; the first of several places that has one is taken."""

    paper: str
    """What the paper calls the data."""
    files: str
    places: tuple[tuple[str, str], ...]
    """A file in the data folder, and the name that configs have for the data."""


CIFAR10 = Need(
    "CIFAR-10",
    "cifar-10-batches-bin, the folder of the binary version of CIFAR-10 "
    "(https://www.cs.toronto.edu/~kriz/cifar.html)",
    (("cifar-10-batches-bin/data_batch_1.bin", "cifar10"), ("data_batch_1.bin", "cifar10")),
)
PURCHASE = Need(
    "Purchase",
    "purchase100.npz or dataset_purchase (Purchase-100), or else bangkok (Location; both are at "
    "https://github.com/privacytrustlab/datasets)",
    tuple((name, "purchase100") for name in ("purchase100.npz", "purchase100.csv", "dataset_purchase"))
    + tuple((name, "location") for name in ("location.npz", "location.csv", "bangkok")),
)
_OFFICIAL = frozenset({"cifar10", "purchase100"})


@dataclass(frozen=True)
class Data:
    """Where data come from: the official files in a folder, or what comes with dpaudit."""

    directory: Path | None = None
    embedded: bool = False

    def require(self, name: str, needs: Iterable[Need]) -> None:
        """Refuse a figure whose files are not there, with a sentence that says which."""
        missing = [need.files for need in needs if not self.embedded and self._found(need) is None]
        if missing:
            where = "" if self.directory is None else f", got {self.directory} without them"
            raise InputError(
                f"Expected --data-dir with the official files that {name} needs{where}: "
                f"{' and '.join(missing)}; or give --embedded, to use the digits that come with dpaudit."
            )

    def names(self, needs: Sequence[Need]) -> list[str]:
        """Which data are used, as a store tells them apart."""
        return ["digits"] if self.embedded and needs else [str(self._found(need)) for need in needs]

    def stand_ins(self, needs: Iterable[Need]) -> dict[str, str]:
        """How to call data that are not the paper's, by the paper's name for its own."""
        used = {need.paper: self.config(need)["name"] for need in needs}
        return {paper: f"{name} for {paper}" for paper, name in used.items() if name not in _OFFICIAL}

    def config(self, need: Need) -> dict[str, Any]:
        """The table ``data`` of a config, for all examples."""
        name = self._found(need)
        if self.embedded or name is None:
            return {"name": "digits"}
        return {"name": name, "directory": str(self.directory)}

    def _found(self, need: Need) -> str | None:
        if self.directory is None:
            return None
        folder = _files.expanded(self.directory)
        return next((name for file, name in need.places if (folder / file).is_file()), None)
