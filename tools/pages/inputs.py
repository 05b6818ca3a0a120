"""Compare input canaries: how tight each is, and how often correct training is flagged.

    python tools/pages/inputs.py sound [--seeds 40] [--canaries blank,crafted,...]
    python tools/pages/inputs.py tight [--cifar10 DIR] [--fashion DIR] [--location DIR] [--seeds 5]
                                      [--cases digits,location,...] [--canaries blank,crafted,...]
                                      [--cache FILE]

``sound`` audits correct training of a small network on the digits, with each canary in each mode, and fails
if more than 5 % of the seeds are flagged. ``tight`` draws the paper's two batches per step and prints the
mean mu over seeds with its standard error; the noise allows a mu of 2. It uses plain scores with the
threshold 1/2, plain scores with a threshold chosen afterwards as in the paper (a heuristic), and scores from
which the rest of the batch is subtracted. Every cell is cached, so that an interrupted command resumes.
WRN-16-4 takes minutes per cell.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import _shared  # noqa: F401  # finds the tests
import torch
from digits_training import DELTA, dpsgd_training, finished

import dpaudit
from dpaudit.recording import PerStep
from dpaudit.training import OneRun, TwoBatches
from dpaudit.training.data import cifar10, digits, hold_out, idx_images, location
from dpaudit.training.models import conv_net, mlp, wide_resnet

_NOISE = 0.5
_HELD_OUT = 128
_CANARIES = {
    "blank": dpaudit.Blank(),
    "mislabelled": dpaudit.Mislabelled(),
    "adversarial": dpaudit.Adversarial(),
    "crafted": dpaudit.Crafted(),
    "long crafted": dpaudit.Crafted(long=True),
    "recrafted": dpaudit.Crafted(every=25),
}
_COLUMNS = "plain", "CP, same data", "residual"


@dataclass(frozen=True)
class Case:
    """A model, its data, and its training parameters."""

    model: str
    data: str
    batch_size: int
    num_steps: int
    num_train: int
    learning_rate: float = 0.5


_CASES = {
    "digits": Case("mlp", "digits", 64, 300, 1500),
    "location": Case("mlp", "location", 64, 300, 4000),
    "fashion": Case("conv-net", "fashion", 64, 100, 10_000),
    "cifar10 conv-net": Case("conv-net", "cifar10", 64, 100, 10_000),
    "cifar10 short conv-net": Case(
        "conv-net", "cifar10", 16, 40, 10_000
    ),  # the same as the WRN, for comparison
    "cifar10 wrn": Case("wrn", "cifar10", 16, 40, 10_000),
}


def _data(case, directories):
    """Return the training examples and the held-out examples."""
    if case.data == "digits":
        train, rest = digits().split(case.num_train)
    elif case.data == "location":
        train, rest = location(directories["location"]).split(case.num_train)
    else:
        read = cifar10 if case.data == "cifar10" else idx_images
        folder = directories[case.data]
        train, rest = read(folder, train=True).split(case.num_train)[0], read(folder, train=False)
    return train, hold_out(rest, _HELD_OUT, apart_from=train)[1]


def _build(case, data):
    channels = data.shape[0]
    if case.model == "mlp":
        return lambda: mlp(torch.Size(data.shape).numel(), 128, data.num_classes)
    if case.model == "conv-net":
        return lambda: conv_net(in_channels=channels, num_classes=data.num_classes)
    return lambda: wide_resnet(in_channels=channels, num_classes=data.num_classes)


class _BothScores(TwoBatches):
    """Hook that records plain scores and residual scores."""

    def attach(self, training):
        super().attach(training)
        self.residual = self._make_recorder(training, PerStep(paired=True))

    def observe(self, step):
        rows = self._inserter.rows(step.index, [0])
        steps = step, self._training.draw(rows, self._generators)
        for recorder, residual in ((self.recorder, False), (self.residual, True)):
            scores = [self._inserter.scores(one, residual=residual)[0] for one in steps]
            recorder.record(scores, [False, True], notify=False)


def _train(audit, case, train, build, seed):
    training = dpsgd_training(
        audit,
        build=build,
        data=train,
        seed=seed,
        noise_multiplier=_NOISE,
        sample_rate=case.batch_size / len(train),
        num_steps=case.num_steps,
        learning_rate=case.learning_rate,
    )
    finished(training)


def _mu(recorder, threshold, inference):
    bound = dpaudit.lower_bound(
        recorder.observations,
        delta=DELTA,
        tradeoff=dpaudit.Gaussian(),
        inference=inference,
        threshold=threshold,
    )
    return bound.parameter


def _cell(case, data, canary, seed):
    train, held_out = data
    audit = _BothScores(delta=DELTA, canary=canary, held_out=held_out, seed=seed)
    started = time.perf_counter()
    _train(audit, case, train, _build(case, train), seed)
    seconds = time.perf_counter() - started
    return {
        "plain": _mu(audit.recorder, dpaudit.Fixed(0.5), dpaudit.JointExact()),
        "CP, same data": _mu(audit.recorder, dpaudit.SameData(), dpaudit.ClopperPearson()),
        "residual": _mu(audit.residual, dpaudit.Fixed(0.5), dpaudit.JointExact()),
        "seconds": seconds,
    }


class _Cells:
    """Measured cells on disk, so that an interrupted command resumes."""

    def __init__(self, path):
        self._path = Path(path)
        self._values = json.loads(self._path.read_text()) if self._path.exists() else {}

    def __getitem__(self, key):
        return self._values[key]

    def measure(self, key, make):
        """Return the stored value, or compute it with ``make`` and store it."""
        if key not in self._values:
            self._values[key] = make()
            self._path.write_text(json.dumps(self._values, indent=1))
        return self._values[key]


def _tight(arguments):
    directories = {name: getattr(arguments, name) for name in ("cifar10", "fashion", "location")}
    cells = _Cells(arguments.cache)
    canaries = {kind: _CANARIES[kind] for kind in arguments.canaries.split(",")}
    for name in arguments.cases.split(","):
        case = _CASES[name]
        if case.data != "digits" and directories[case.data] is None:
            print(f"{name}: skipped, because --{case.data} is not given")
            continue
        data = _data(case, directories)
        for seed in range(arguments.seeds):
            for kind, canary in canaries.items():
                key = f"{case} {canary} noise={_NOISE} seed={seed}"
                cell = cells.measure(key, partial(_cell, case, data, canary, seed))
                print(f"# {name}, {kind}, seed {seed}: {cell['seconds']:.0f} s", flush=True)
        _print_table(name, canaries, arguments.seeds, cells)


def _print_table(name, canaries, num_seeds, cells):
    case = _CASES[name]
    print(
        f"\n{name}: {case.num_steps} steps of {case.batch_size}, mu out of {1 / _NOISE:g}, {num_seeds} seeds"
    )
    print(f"{'':15}" + "".join(f"{column:>15}" for column in _COLUMNS))
    for kind, canary in canaries.items():
        keys = [f"{case} {canary} noise={_NOISE} seed={seed}" for seed in range(num_seeds)]
        found = [[cells[key][column] for key in keys] for column in _COLUMNS]
        print(f"{kind:15}" + "".join(f"{_mean(values):>15}" for values in found), flush=True)


def _mean(values):
    """Return the mean, with its standard error if there is more than one value."""
    error = f" ({statistics.stdev(values) / len(values) ** 0.5:.2f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{error}"


_MODES = {
    "one-run": lambda **common: OneRun(num_canaries=8, **common),
    "paper, plain": TwoBatches,
    "paper, residual": lambda **common: TwoBatches(residual=True, **common),
}


def _is_flagged(case, data, mode, canary, seed):
    audit = _MODES[mode](delta=DELTA, canary=canary, held_out=data[1], seed=seed)
    _train(audit, case, data[0], lambda: mlp(64, 16, 10), seed)
    return audit.recorder.audit().verdict is dpaudit.Verdict.VIOLATION


def _sound(arguments):
    case = Case("mlp", "digits", 45, 60, 1500)
    data, cells = _data(case, {}), _Cells(arguments.cache)
    most = arguments.seeds // 20  # 5 %
    counts = []
    print(f"flagged seeds with correct training, out of {arguments.seeds}")
    for kind in arguments.canaries.split(","):
        canary = _CANARIES[kind]
        for mode in _MODES:
            found = [
                cells.measure(
                    f"{case} {canary} {mode} seed={seed}",
                    partial(_is_flagged, case, data, mode, canary, seed),
                )
                for seed in range(arguments.seeds)
            ]
            counts.append(sum(found))
            print(f"{kind:15}{mode:18}{counts[-1]:3}", flush=True)
    if max(counts) > most:
        raise SystemExit(f"Expected at most {most} flagged, got {max(counts)}.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("sound", "tight"))
    for name in ("cifar10", "fashion", "location"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--cases", default=",".join(_CASES))
    parser.add_argument("--canaries", default=",".join(_CANARIES))
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--cache", default="inputs-cells.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.seeds = arguments.seeds or (40 if arguments.what == "sound" else 5)
    (_sound if arguments.what == "sound" else _tight)(arguments)


if __name__ == "__main__":
    main()
