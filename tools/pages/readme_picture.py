"""Draw the picture that README.md and docs/index.md open with, in a light and a dark version.

A small network is trained twice with Opacus on the digits that dpaudit ships: once with the claimed noise,
once with 0.8 of it. Both runs are audited while they train. The numbers that the README quotes are stored in
the ``<desc>`` element of each file. Takes ten seconds::

    .venv/bin/python tools/pages/readme_picture.py
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from _shared import DOCS
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpaudit.observers.opacus import observe
from dpaudit.recording import LiveBound
from dpaudit.training.data import digits

ASSETS = DOCS / "assets"
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


def points(bounds: list[LiveBound]) -> str:
    return "M" + " ".join(f"{x_of(bound.num_done):.1f},{y_of(bound.epsilon):.1f}" for bound in bounds)


def path(data: str, **attributes: str) -> str:
    return f'<path d="{data}" {_joined({"fill": "none"} | attributes)}/>'


def text(x: float, y: float, words: str, color: str, **attributes: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {_joined({"fill": color} | attributes)}>{words}</text>'


def _joined(attributes: dict[str, str]) -> str:
    return " ".join(f'{name.replace("_", "-")}="{value}"' for name, value in attributes.items())


def axes(theme: Theme) -> Iterator[str]:
    yield text(LEFT - 18, 16, "lower bound on ε (95 % confidence)", theme.muted)
    yield text((LEFT + RIGHT) / 2, BOTTOM + 38, "training step", theme.muted, text_anchor="middle")
    yield path(f"M{LEFT},{BOTTOM}H{RIGHT}", stroke=theme.grid)
    for epsilon in range(0, MAX_EPSILON, 2):
        yield text(LEFT - 8, y_of(epsilon) + 5, str(epsilon), theme.muted, text_anchor="end")
    for step in range(0, NUM_STEPS + 1, 50):
        yield text(x_of(step), BOTTOM + 20, str(step), theme.muted, text_anchor="middle")


def claim_line(epsilon: float, label: str, color: str) -> Iterator[str]:
    y = y_of(epsilon)
    yield path(f"M{LEFT},{y:.1f}H{RIGHT}", stroke=color, stroke_width="1.5", stroke_dasharray="6 4")
    yield text(RIGHT + 12, y - 6, label, color)  # above the label of a tight bound


def curve(bounds: list[LiveBound], label: str, reason: str, color: str) -> Iterator[str]:
    y = y_of(bounds[-1].epsilon)
    yield path(points(bounds), stroke=color, stroke_width="2.5")
    yield text(RIGHT + 12, y + 12, label, color, font_weight="600")
    yield text(RIGHT + 12, y + 30, reason, color)


def violation(broken: list[LiveBound], step: int, color: str) -> Iterator[str]:
    """Yield the area above the claim, and the step from which on it is refuted."""
    x, y, claimed = x_of(step), y_of(broken[step - 1].epsilon), y_of(broken[-1].claimed_epsilon)
    area = f"{points(broken[step - 1 :])} V{claimed:.1f} H{x:.1f}Z"
    yield path(area, fill=color, fill_opacity="0.12")
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{color}"/>'
    yield text(x + 34, claimed - 9, f"violation established at step {step}", color)


def svg(
    correct: list[LiveBound], broken: list[LiveBound], numbers: dict[str, float | int], theme: Theme
) -> str:
    labels = {name: f"{numbers[f'{name}_epsilon']:.2f}" for name in ("claimed", "correct", "broken")}
    reason = f"{BROKEN_NOISE:g} of the claimed noise"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-size="14" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">',
        f"<desc>{json.dumps(numbers)}</desc>",
        *axes(theme),
        *claim_line(broken[-1].claimed_epsilon, f"claimed ε = {labels['claimed']}", theme.text),
        *curve(correct, f"correct: ε ≥ {labels['correct']}", "noise as claimed", theme.correct),
        *curve(broken, f"broken: ε ≥ {labels['broken']}", reason, theme.broken),
        *violation(broken, int(numbers["violation_step"]), theme.broken),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


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
