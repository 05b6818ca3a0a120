"""What is kept of the noise of all steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpaudit.diagnostics._exact import RESOLUTION
from dpaudit.diagnostics._kept_steps import KeptSteps
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
        """Of the sums of each leaf in each step: their squares over the leaf's size."""
        self.products: FloatArray
        """Dot products of the first coordinates of each two leaves."""
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

    def observe(self, residual: Any, leaves: Leaves | None = None) -> None:
        """The noise of one step, in units of the claimed standard deviation."""
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
        self.energies += squares
        self.step_energies.append(energy)
        self._add_sums(noise)
        self._add_products(noise)
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
        self.products = np.zeros((layout.compared.size, layout.compared.size))

    def _add_sums(self, noise: FloatArray) -> None:
        sums = np.abs(np.add.reduceat(noise, self.layout.starts))
        beyond = np.maximum(sums - RESOLUTION * self.layout.sizes, 0.0)
        self.sum_energy += float((beyond**2 / self.layout.sizes).sum())

    def _add_products(self, noise: FloatArray) -> None:
        if self.layout.compared.size > 1:
            heads = self.layout.heads
            values = np.where(heads >= 0, noise[heads], 0.0)
            self.products += values @ values.T

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
            "products": self.products.copy(),
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
        self.products = state["products"].copy()
        self.sketches.load_state_dict(state["sketches"])
