"""Draw the picture that README.md and docs/index.md open with, in a light and a dark version.

A small network is trained twice with Opacus on the digits that dpaudit ships: once with the claimed noise,
once with 0.8 of it. Both runs are audited while they train. The numbers that the README quotes are stored in
the ``<desc>`` element of each file. Takes ten seconds::

    .venv/bin/python benchmarks/readme_picture.py
"""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpaudit.observers.opacus import observe
from dpaudit.recording import LiveBound
from dpaudit.training.data import digits

ASSETS = Path(__file__).parent.parent / "docs" / "assets"
NUM_STEPS, CLAIMED_NOISE, BROKEN_NOISE = 300, 1.0, 0.8
WIDTH, HEIGHT = 830, 326
LEFT, RIGHT, TOP, BOTTOM = 26, 630, 36, 284  # of the axes
MAX_EPSILON = 9


@dataclass(frozen=True)
class Theme:
    """The colors of one version; the background is transparent."""

    name: str
    text: str
    muted: str
    grid: str
    broken: str
    correct: str


THEMES = (
    Theme("light", text="#1f2328", muted="#59636e", grid="#d8dee4", broken="#cf222e", correct="#0969da"),
    Theme("dark", text="#e6edf3", muted="#9198a1", grid="#3d444d", broken="#ff7b72", correct="#58a6ff"),
)


def train_and_audit(noise_multiplier: float) -> tuple[list[LiveBound], float]:
    """Return the bound after every step, and the accuracy on the test set."""
    torch.manual_seed(1)
    train, test = digits().split(1500)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(TensorDataset(train.inputs, train.targets), batch_size=75),
        noise_multiplier=CLAIMED_NOISE,
        max_grad_norm=1.0,
    )
    optimizer.noise_multiplier = noise_multiplier
    claim = {"noise_multiplier": CLAIMED_NOISE, "num_steps": NUM_STEPS, "delta": 1e-5}
    with observe(optimizer, **claim, seed=1) as recorder:
        for _ in range(NUM_STEPS // len(loader)):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
    accuracy = (model(test.inputs).argmax(1) == test.targets).double().mean().item()
    return recorder.curve(range(1, NUM_STEPS + 1)), accuracy


def x_of(step: float) -> float:
    return LEFT + (RIGHT - LEFT) * step / NUM_STEPS


def y_of(epsilon: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * epsilon / MAX_EPSILON


def path(bounds: list[LiveBound]) -> str:
    return "M" + " ".join(f"{x_of(bound.num_done):.1f},{y_of(bound.epsilon):.1f}" for bound in bounds)


def text(x: float, y: float, words: str, color: str, attributes: str = "") -> str:
    return f'<text x="{x:g}" y="{y:.1f}" fill="{color}" {attributes}>{words}</text>'


def svg(
    correct: list[LiveBound], broken: list[LiveBound], numbers: dict[str, float | int], theme: Theme
) -> str:
    claimed = y_of(broken[-1].claimed_epsilon)
    found = next(bound for bound in broken if bound.is_violation)
    x, y = x_of(found.num_done), y_of(found.epsilon)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        ' font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="14">',
        f"<desc>{json.dumps(numbers)}</desc>",
        text(LEFT - 18, 16, "lower bound on ε (95 % confidence)", theme.muted),
    ]
    parts.append(f'<path d="M{LEFT},{BOTTOM}H{RIGHT}" stroke="{theme.grid}"/>')
    for epsilon in range(0, MAX_EPSILON, 2):
        parts.append(text(LEFT - 8, y_of(epsilon) + 5, str(epsilon), theme.muted, 'text-anchor="end"'))
    for step in range(0, NUM_STEPS + 1, 50):
        parts.append(text(x_of(step), BOTTOM + 20, str(step), theme.muted, 'text-anchor="middle"'))
    middle = (LEFT + RIGHT) / 2
    parts.append(text(middle, BOTTOM + 38, "training step", theme.muted, 'text-anchor="middle"'))
    above = f"{path(broken[found.num_done - 1 :])} V{claimed:.1f} H{x:.1f}Z"
    parts.append(f'<path d="{above}" fill="{theme.broken}" fill-opacity="0.12"/>')
    parts.append(
        f'<path d="M{LEFT},{claimed:.1f}H{RIGHT}" stroke="{theme.text}" stroke-width="1.5" stroke-dasharray="6 4"/>'
    )
    parts.append(text(RIGHT + 12, claimed + 5, f"claimed ε = {numbers['claimed_epsilon']:.2f}", theme.text))
    for bounds, color, name, label, last in (
        (broken, theme.broken, "broken", f"noise at {BROKEN_NOISE:g} of the claim", numbers["broken_epsilon"]),
        (correct, theme.correct, "correct", "noise as claimed", numbers["correct_epsilon"]),
    ):
        parts.append(f'<path d="{path(bounds)}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        height = y_of(bounds[-1].epsilon)
        parts.append(text(RIGHT + 12, height + 5, f"{name}: ε ≥ {last:.2f}", color, 'font-weight="600"'))
        parts.append(text(RIGHT + 12, height + 23, label, color))
    parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{theme.broken}"/>')
    parts.append(text(x + 12, y + 20, f"violation established at step {found.num_done}", theme.broken))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    warnings.simplefilter("ignore")  # Opacus and torch warn in every private training run
    correct, correct_accuracy = train_and_audit(CLAIMED_NOISE)
    broken, broken_accuracy = train_and_audit(BROKEN_NOISE)
    assert not any(bound.is_violation for bound in correct)
    numbers = {  # rounded to the safe side
        "claimed_epsilon": math.ceil(100 * broken[-1].claimed_epsilon) / 100,
        "correct_epsilon": math.floor(100 * correct[-1].epsilon) / 100,
        "broken_epsilon": math.floor(100 * broken[-1].epsilon) / 100,
        "violation_step": next(bound.num_done for bound in broken if bound.is_violation),
        "correct_accuracy": round(correct_accuracy, 2),
        "broken_accuracy": round(broken_accuracy, 2),
    }
    ASSETS.mkdir(exist_ok=True)
    for theme in THEMES:
        (ASSETS / f"bound-{theme.name}.svg").write_text(svg(correct, broken, numbers, theme))
    print(json.dumps(numbers, indent=2))


if __name__ == "__main__":
    main()
