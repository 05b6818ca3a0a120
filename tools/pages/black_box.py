"""Check black-box audits, end to end through ``dpaudit.experiments.run``.

    python tools/pages/black_box.py FOLDER [--models 2000] [--fashion DIRECTORY] [--seeds 40] [--only NAME]

Models with 64 hidden units are trained for 200 steps with batch size 64 on 800 examples: the digits that come
with dpaudit (64-64-10), or Fashion-MNIST in DIRECTORY (784-64-10). Half of the models include the canary. The
checks are:

- correct training is not flagged at epsilon 2 and 8, whatever the initial weights;
- training that claims epsilon 2 but adds no noise is flagged;
- initial weights from held-out data give a clearly larger bound than random ones at epsilon 8;
- clipping alone gives a bound close to that of an attack without errors on the same number of models;
- at most 2 of 40 audits of correct training, with 200 logistic regressions each, are flagged at 95 %.

Each row is a run in FOLDER. Run the same command again to resume.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _shared import Table, finish, restart_in_environment

from dpaudit.experiments import parse_config, run

CONFIG = """
output = "unset"
seed = 1
threat_model = "black-box"
model = {name = "mlp", hidden = [64]}
data = {name = "digits", num_examples = 800}
audit = {held_out = 900, methods = [], canary = {kind = "blank"}}
training = {batch_size = 64, num_steps = 200, optimizer = {name = "sgd", learning_rate = 0.1}}
"""
PRETRAINED = ("audit.initialization=pre-trained",)
FORGOTTEN = ("training.fault.name=noise-too-small", "training.fault.factor=0.0")
# a high learning rate, with which the model learns the canary well
CLIP_ONLY = ("training.noise_multiplier=0", "training.optimizer.learning_rate=0.5")
CASES: dict[str, tuple[str, ...]] = {
    "pre-trained": ("training.target_epsilon=8.0", *PRETRAINED),
    "random": ("training.target_epsilon=8.0",),
    "forgotten noise": ("training.target_epsilon=2.0", *PRETRAINED, *FORGOTTEN),
    "clip only": (*CLIP_ONLY, *PRETRAINED),
    "random, eps 2": ("training.target_epsilon=2.0",),
    "pre-trained, eps 2": ("training.target_epsilon=2.0", *PRETRAINED),
}
COLUMNS = ("training", "claim", "epsilon >=", "at most", "verdict", "models/s")
CLEARLY = 0.5  # difference of epsilon between the two kinds of initial weights
CLOSE = 0.8  # fraction of the largest bound
SMALL = (
    'model={name="logistic-regression"}',
    "training.target_epsilon=8.0",
    "training.num_steps=50",
    "training.optimizer.learning_rate=0.5",
    "audit.num_models=200",
    "audit.canary.kind=mislabelled",
)
MOST_FLAGGED = 2


def outcome(folder: Path, name: str, changes: Sequence[str]) -> dict[str, Any]:
    """Return the result of a run, which is read if it exists."""
    path = folder / name.replace(",", "").replace(" ", "-")
    config = parse_config(CONFIG, name, [*changes, f"output={path}"])
    return run(config, say=lambda line: print(f"  {name}: {line}", flush=True)).values


def is_as_claimed(name: str, values: dict[str, Any], found: dict[str, dict[str, Any]]) -> bool:
    epsilon, violated = values["bound"]["epsilon"], values["verdict"] == "VIOLATION"
    if name == "clip only":
        return bool(epsilon >= CLOSE * values["largest_epsilon"])
    if name == "forgotten noise":
        return bool(violated)
    if name == "random" and "pre-trained" in found:
        larger = found["pre-trained"]["bound"]["epsilon"]
        return bool(not violated and larger >= epsilon + CLEARLY)
    return bool(not violated)


def cells(name: str, values: dict[str, Any]) -> tuple[str, ...]:
    claimed, speed = values["claim"]["epsilon"], values["timing"]["models_per_second"]
    return (
        name,
        claimed if isinstance(claimed, str) else f"{claimed:.3g}",
        f"{values['bound']['epsilon']:.3g}",
        f"{float(values['largest_epsilon']):.3g}",
        values["verdict"] or "none",
        "" if speed is None else f"{speed:.3g}",
    )


def audits(folder: Path, only: str | None, changes: Sequence[str]) -> Table:
    table = Table("Black-box audits", COLUMNS, complaint="NOT AS CLAIMED")
    found: dict[str, dict[str, Any]] = {}
    for name, own in CASES.items():
        if only is None or only == name:
            found[name] = values = outcome(folder, name, [*own, *changes])
            table.add(*cells(name, values), met=is_as_claimed(name, values, found))
            print(*table.rows[-1], sep="  ", flush=True)
    return table


def soundness(folder: Path, num_seeds: int) -> Table:
    table = Table("Correct training", ("audits", "flagged", "allowed"), complaint="FLAGGED TOO OFTEN")
    flagged = 0
    for seed in range(num_seeds):
        values = outcome(folder, f"sound {seed}", [*SMALL, f"seed={seed}", "pool=serial"])
        flagged += values["verdict"] == "VIOLATION"
    table.add(str(num_seeds), str(flagged), str(MOST_FLAGGED), met=flagged <= MOST_FLAGGED)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", type=int, default=2_000)
    parser.add_argument("--fashion", metavar="DIRECTORY")
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--only", choices=CASES)
    given = parser.parse_args()
    changes = [f"audit.num_models={given.models}"]
    if given.fashion is not None:
        changes += ["data.name=idx", f"data.directory={given.fashion}", "audit.held_out=4000"]
    tables = [audits(given.folder, given.only, changes)]
    if given.only is None and given.seeds:
        tables.append(soundness(given.folder, given.seeds))
    return finish(*tables)


if __name__ == "__main__":
    restart_in_environment()
    sys.exit(main())
