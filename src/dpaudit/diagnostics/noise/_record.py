"""What is kept of the noise of all steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpaudit.diagnostics._exact import RESOLUTION
from dpaudit.diagnostics._kept_steps import KeptSteps
from dpaudit.diagnostics._signs import sure_signs
from dpaudit.diagnostics.noise._layout import Layout, Leaves
from dpaudit.errors import InputError
from dpaudit.stats._types import FloatArray

__all__ = ["NoiseRecord"]


class NoiseRecord:
    """Sums over the steps, and a few coordinates of each step: no more memory than a few gradients."""

    def __init__(self) -> None:
        self.layout: Layout
        self.energies: FloatArray
        """The sum of squares of each coordinate."""
        self.step_energies: list[float] = []
        """The sum of squares of each step."""
        self.sum_energy = 0.0
        """Of the sums of signs of each leaf in each step: their squares over the leaf's size."""
        self.agreeing: FloatArray
        """How many signs of the first coordinates of each two leaves are the same."""
        self.differing: FloatArray
        """How many are not; the rest is too small to have a sign."""
        self.resolution = RESOLUTION
        """By how much a number may be rounded, at most."""
        self.sketches = KeptSteps()

    @property
    def num_steps(self) -> int:
        """How many steps were observed."""
        return len(self.step_energies)

    @property
    def count(self) -> int:
        """How many numbers all squares are of."""
        return self.num_steps * self.energies.size

    @property
    def energy(self) -> float:
        """The sum of all squares."""
        return float(sum(self.step_energies))

    def observe(self, residual: Any, leaves: Leaves | None = None, rounding: float = 0.0) -> None:
        """The noise of one step, and how far it may be off, in units of the claimed standard deviation."""
        vector = np.asarray(residual)
        self._require_alike(vector, leaves)
        if self.num_steps == 0:
            self._start(Layout.of(vector.size, leaves))
        layout = self.layout
        noise = np.asarray(vector if layout.kept is None else vector[layout.kept], dtype=np.float64)
        squares = noise * noise
        energy = float(squares.sum())
        if not np.isfinite(energy):
            index = int(np.argmax(~np.isfinite(squares)))
            raise InputError(
                f"Expected finite noise in step {self.num_steps}, got {noise[index]} at coordinate "
                f"{index if layout.kept is None else layout.kept[index]}: did the training diverge?"
            )
        self.resolution = max(self.resolution, rounding)
        self.energies += squares
        self.step_energies.append(energy)
        signs = sure_signs(noise, max(RESOLUTION, rounding))
        self._add_sums(signs)
        self._add_pairs(signs)
        self.sketches.add(noise[layout.sketch].astype(np.float32))

    def _require_alike(self, vector: Any, leaves: Leaves | None) -> None:
        expected = self.layout.num_parameters if self.num_steps else vector.size
        if vector.ndim != 1 or vector.size != expected or vector.size == 0 or vector.dtype.kind not in "fiu":
            raise InputError(
                f"Expected the noise of step {self.num_steps} as a vector of {expected or 'some'} numbers, "
                f"got shape {vector.shape} of {vector.dtype}."
            )
        if self.num_steps and leaves is not None and not self.layout.is_like(leaves):
            raise InputError(f"Expected the leaves of the first step in step {self.num_steps}, got others.")

    def _start(self, layout: Layout) -> None:
        self.layout = layout
        self.energies = np.zeros(int(layout.sizes.sum()))
        self.agreeing = np.zeros((layout.compared.size, layout.compared.size))
        self.differing = self.agreeing.copy()

    def _add_sums(self, signs: FloatArray) -> None:
        starts, sizes = self.layout.starts, self.layout.sizes
        unsure = sizes - np.add.reduceat(np.abs(signs), starts)
        sums = np.maximum(np.abs(np.add.reduceat(signs, starts)) - unsure, 0.0)
        self.sum_energy += float((sums**2 / sizes).sum())

    def _add_pairs(self, signs: FloatArray) -> None:
        if self.layout.compared.size > 1:
            heads = self.layout.heads
            values = np.where(heads >= 0, signs[heads], 0.0)
            sure, product = np.abs(values) @ np.abs(values).T, values @ values.T
            self.agreeing += (sure + product) / 2
            self.differing += (sure - product) / 2

    def state_dict(self) -> dict[str, Any]:
        """All that was kept."""
        if self.num_steps == 0:
            return {}
        return {
            "num_parameters": self.layout.num_parameters,
            "leaves": dict(self.layout.leaves),
            "energies": self.energies.copy(),
            "step_energies": list(self.step_energies),
            "sum_energy": self.sum_energy,
            "agreeing": self.agreeing.copy(),
            "differing": self.differing.copy(),
            "resolution": self.resolution,
            "sketches": self.sketches.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where ``state_dict`` was taken."""
        if not state:
            return
        self._start(Layout.of(state["num_parameters"], state["leaves"]))
        self.energies = state["energies"].copy()
        self.step_energies = list(state["step_energies"])
        self.sum_energy = state["sum_energy"]
        self.agreeing, self.differing = state["agreeing"].copy(), state["differing"].copy()
        self.resolution = state["resolution"]
        self.sketches.load_state_dict(state["sketches"])
