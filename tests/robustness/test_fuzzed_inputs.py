"""Mutated scores, configs, options and values by the thousand, each from its own seed.

Each is audited, or refused in one sentence: no traceback, no warning in front of the sentence, no status that
means a fault of the machine, and neither long nor large work. The numbers of fuzzed values are those at the
ends of the range of floats, where squares, inverses and exponentials overflow.
"""

from __future__ import annotations

import copy
import io
import json
import random
import resource
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import STRANGE
from typer.testing import CliRunner

import dpaudit
from dpaudit import Claim, ErrorCounts, Guesses, Observations, Recorder
from dpaudit.cli._app import app
from dpaudit.cli._score_files import Columns, ScoreFiles
from dpaudit.errors import DpauditError
from dpaudit.experiments import example, load_config
from dpaudit.stats import Bound, Estimate, Power, ThresholdRule
from dpaudit.stats._result import ClaimPart
from dpaudit.stats._roc_band import RocBand

FEW, MANY = 300, 5_000
SECONDS, BYTES, LONGEST = 10.0, 1e9, 1_000
VERDICTS, REFUSED = (0, 1, 3), 2

RNG = np.random.default_rng(5)
PRESENT, ABSENT = 1 + RNG.normal(size=24), RNG.normal(size=20)
SCORES, MASK = np.concatenate([PRESENT, ABSENT]), np.arange(44) < 24
NUMBERS = (
    0.0, -1.0, 0.5, 1.0, 2.0, 1e-4, 1e-9, 1e-12, 1e-160, 1e-300, 1e-320, 5e-324, 1e4, 1e9, 1e160, 1e308,
    1 - 1e-12, 1 - 2**-53, float("nan"), float("inf"), -float("inf"),
)  # fmt: skip
INTEGERS = (0, 1, 2, 7, 100, -3, 10_000_000, 2**31, 2**63, 10**30)
WORDS = ("", "x", "true", "1_000", "0x1p-3", "9" * 5_000, "\x1b[2J", "\x00", "\uff11", "--json", "1e", "²")
ARRAYS: tuple[Any, ...] = (
    PRESENT, ABSENT, PRESENT.astype(np.float32), PRESENT.astype(np.float16), PRESENT.reshape(6, 4),
    ABSENT.reshape(5, 4), PRESENT * 1e300, PRESENT * 1e-300, np.full(24, 1e308), np.full(24, -5e-324),
    np.zeros(24), np.ma.masked_array(PRESENT, PRESENT > 1), np.array([{}] * 24), PRESENT.astype(str),
    np.zeros(24, dtype=[("a", "f8")]), PRESENT + 1j, np.array([]), np.zeros((2, 0)), np.zeros((2, 2, 2)), 3.0,
    None, "scores", [[1.0], [1.0, 2.0]], [None, 1.0], {"a": 1}, np.array([1.0, np.nan]), MASK, MASK[:24],
    np.arange(24, dtype=np.int64), np.array(["2020-01-01"] * 24, dtype="M8[D]"), iter([1.0]), b"12",
)  # fmt: skip
FLAGS: tuple[Any, ...] = (False, True, False, True, np.True_, None, 0, 1, "false", np.array([True]), [])


class TooSlowError(BaseException):
    """A case that takes too much time, whatever the code catches."""


@contextmanager
def _limited() -> Iterator[None]:
    """Interrupt what takes more processor time than allowed."""

    def stop(*_: object) -> None:
        raise TooSlowError(f"more than {SECONDS:g} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _require_sentence(text: str) -> None:
    assert 0 < len(text) <= LONGEST, f"{len(text)} characters: {text[:200]}"
    assert text.rstrip().endswith((".", "?", "--help", "digits")), text
    assert "\n" not in text.rstrip() or " errors:\n" in text, text  # of a config, one per line
    assert "Traceback" not in text, text
    assert "Warning" not in text, text


def _command(*words: object) -> None:
    """Call ``dpaudit``; it gives a verdict, or a sentence and nothing else."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (*VERDICTS, REFUSED), f"status {result.exit_code}: {result.stderr[:500]}"
    assert "Warning" not in result.stderr
    if result.exit_code == REFUSED:
        _, is_one, sentence = result.stderr.partition("dpaudit: ")
        assert is_one, result.stderr[:500]
        _require_sentence(sentence.removesuffix("\n"))


class Case:
    """One mutated input, chosen by its seed alone."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._random, self._folder = random.Random(seed), folder

    def one_of(self, *values: Any) -> Any:
        return self._random.choice(values)

    def number(self) -> float:
        return float(self.one_of(*NUMBERS))

    def usually(self, value: Any, *others: Any) -> Any:
        """The value, or in one of four cases another one."""
        return self.one_of(*others) if self._random.random() < 0.25 else value

    def strange(self, value: Any) -> Any:
        return self.usually(value, *NUMBERS, *STRANGE, *INTEGERS)

    def altered(self, values: Any) -> Any:
        """Plain values, one or two of which are replaced or dropped."""
        found = {"whole": copy.deepcopy(values)}
        for _ in range(self.one_of(1, 1, 2)):
            outer: Any = found
            key: Any = "whole"
            while isinstance(outer[key], dict | list) and outer[key] and self._random.random() < 0.9:
                outer = outer[key]
                key = self.one_of(*(outer if isinstance(outer, dict) else range(len(outer))))
            if outer is not found and isinstance(outer, dict) and self._random.random() < 0.3:
                del outer[key]
            else:
                outer[key] = copy.deepcopy(self.one_of(*STRANGE, *NUMBERS))
        return found["whole"]

    def damaged(self, content: bytes) -> bytes:
        found = bytearray(content)
        for _ in range(self._random.randint(0, 4)):
            place = self._random.choice((self._random.randrange(len(found) + 1), self._random.randrange(130)))
            kind = self.one_of("flip", "put", "drop", "over", "cut")
            if kind == "flip" and place < len(found):
                found[place] ^= 1 << self._random.randrange(8)
            elif kind == "put":
                found[place:place] = self._random.randbytes(self._random.randint(1, 8))
            elif kind == "drop":
                del found[place : place + self._random.randint(1, 20)]
            elif kind == "over":
                found[place : place + 4] = self.one_of(
                    b"9999", b"1e99", b"nan,", b"\xff\xff\xff\x7f", b'",(\n'
                )
            elif self._random.random() < 0.3:
                del found[place:]
        return bytes(found)

    def path(self, suffix: str, content: bytes) -> Path:
        path = self._folder / f"case{suffix}"
        path.write_bytes(content)
        return path

    def scores_file(self) -> Path:
        """A table or one side, intact or damaged."""
        file = io.BytesIO()
        suffix = self.one_of(".npy", ".npz", ".npz", ".csv", ".csv", ".parquet")
        if suffix == ".npy":
            array = self.one_of(*(one for one in ARRAYS if isinstance(one, np.ndarray)))
            np.save(file, np.asarray(array), allow_pickle=True)
        elif suffix == ".npz":
            save = self.one_of(np.savez, np.savez_compressed)
            save(file, score=self.usually(SCORES, *ARRAYS[:12]), present=self.usually(MASK, *ARRAYS[:12]))
        elif suffix == ".csv":
            rows = [
                f"{self.usually(one, *NUMBERS, *WORDS)},{int(is_in)}"
                for one, is_in in zip(SCORES, MASK, strict=True)
            ]
            rows.insert(0, self.usually("score,present", "", "a;b", "score", "present,score,score"))
            file.write("\n".join(rows if self._random.random() < 0.1 else _tame(rows)).encode())
        else:
            arrow = pytest.importorskip("pyarrow")
            from pyarrow import parquet  # noqa: PLC0415

            words = ["true" if one else "false" for one in MASK]
            columns = {"score": SCORES, "present": self.usually(MASK, words, SCORES, [None] * 44)}
            parquet.write_table(arrow.table(columns), file)
        return self.path(suffix, self.damaged(file.getvalue()))

    def options(self, **usual: object) -> list[object]:
        """Options with these values, some of them strange, dropped or doubled."""
        words: list[object] = []
        for name, value in usual.items():
            option = f"--{name.replace('_', '-')}"
            if self._random.random() < 0.1:
                continue
            strange = [repr(self.number()), *map(str, INTEGERS), *WORDS]
            words += [option, self.usually(value, self.one_of(*strange), repr(self.number()))]
        return words

    # What is fuzzed. The first ones take milliseconds.

    def reads_scores(self) -> None:
        path = self.scores_file()
        is_side = path.suffix == ".npy"
        columns = Columns(identifier=self.usually(None, "score", "x"))
        files = ScoreFiles(
            None if is_side else path, path if is_side else None, path if is_side else None, columns
        )
        files.read(normalized=False, paired=self.usually(False, True))

    def makes_observations(self) -> None:
        flags = {name: self.usually(False, *FLAGS) for name in ("normalized", "paired", "coupled")}
        sides = [self.one_of(*ARRAYS) for _ in range(2)]
        ids = self.usually(None, *ARRAYS)
        if self._random.random() < 0.5:
            Observations(with_canary=sides[0], without_canary=sides[1], **flags)
        elif self._random.random() < 0.5:
            mask = self.usually(MASK[: np.size(sides[0]) or 1], *ARRAYS)
            Observations.from_presence(sides[0], mask, ids=ids, **flags)
        else:
            Guesses.from_scores(
                sides[0], self.usually(MASK[:24], *ARRAYS), num_guesses=self.strange(4), ids=ids
            )

    def reads_values(self) -> None:
        kind, values = self.one_of(*_stored_values())
        kind.from_dict(self.altered(values))

    def resumes(self) -> None:
        recorder, state = _recorder(), _recorder_state()
        for key in self._random.sample(sorted(state), self.one_of(1, 1, 2)):
            state[key] = self.one_of(*STRANGE, *ARRAYS, *NUMBERS)
        recorder.load_state_dict(self.usually(state, None, [], {}, "x", {**state, "more": 1}))
        str(recorder.num_done)

    def loads_config(self) -> None:
        load_config(self._config(), self._changes())

    def makes_claims(self) -> None:
        self._claim()

    def counts_errors(self) -> None:
        names = ("false_positives", "num_absent", "false_negatives", "num_present")
        ErrorCounts(**{name: self.strange(5) for name in names})

    # These take longer.

    def audits(self) -> None:
        side = self.usually(PRESENT, *ARRAYS[:11])
        other = self.usually(ABSENT, *ARRAYS[:11])
        observations = Observations(
            with_canary=side, without_canary=other, normalized=self.usually(True, False)
        )
        confidence = self.usually(0.95, *NUMBERS)
        result = dpaudit.audit(observations, claim=self._claim(), confidence=confidence)
        str(result)
        json.dumps(result.to_dict(), allow_nan=False)

    def calls_scores(self) -> None:
        path = self.usually(self._good_table(), self.scores_file())
        claim = self.one_of(
            {"epsilon": 1.0, "delta": 1e-5},
            {"noise_multiplier": 1.0, "delta": 1e-5},
            {"noise_multiplier": 1.0, "sample_rate": 0.1, "num_steps": 10, "delta": 1e-5},
        )
        more = self.usually({}, {"threshold": 0.5}, {"confidence": 0.9}, {"score_column": "score"})
        flags = self._random.sample(
            ("--normalized", "--json", "--paired", "--coupled"), self.one_of(0, 1, 1, 2)
        )
        _command("scores", path, *self.options(**claim, **more), *flags)

    def calls_plan(self) -> None:
        claim = self.one_of({"epsilon": 1.0, "delta": 1e-5}, {"noise_multiplier": 1.0, "delta": 1e-5})
        size = self.one_of({"observations": 100}, {"steps": 20, "canaries": 8}, {"noise_factor": 0.5})
        _command("plan", *self.options(**claim, **size), *self.usually([], ["--json"], ["--power", "0.5"]))

    def calls_run(self) -> None:
        """A config that is valid stops at its output, which is inside of a file."""
        inside = self.path(".file", b"") / "run"
        changes = [word for change in self._changes() for word in ("--set", change)]
        _command("run", self._config(), *changes, "--set", f'output="{inside}"')

    def calls_report(self) -> None:
        folder = self._folder / "run"
        folder.mkdir(exist_ok=True)
        (folder / "result.json").write_text(json.dumps(self.altered(dict(_stored_values()[0][1]))))
        _command("report", folder, "--output", self._folder / "page.html")

    def _good_table(self) -> Path:
        rows = [f"{score!r},{int(is_in)}" for score, is_in in zip(SCORES.tolist(), MASK, strict=True)]
        return self.path(".csv", "\n".join(["score,present", *rows]).encode())

    def _claim(self) -> Claim:
        noise = {"noise_multiplier": self.strange(1.0), "delta": self.strange(1e-5)}
        kind = self.one_of("gaussian", "dpsgd", "approximate", "curve")
        if kind == "gaussian":
            return Claim.gaussian(**noise)
        if kind == "dpsgd":
            return Claim.dpsgd(**noise, sample_rate=self.strange(0.1), num_steps=self.strange(10))
        if kind == "approximate":
            return Claim.approximate_dp(epsilon=self.strange(1.0), delta=self.strange(1e-5))
        return Claim.curve(dpaudit.Gaussian(), parameter=self.strange(1.0), delta=self.strange(1e-5))

    def _config(self) -> Path:
        lines = example(
            self.one_of("digits", "end-to-end", "input", "black-box", "black-box-one-run")
        ).splitlines()
        for _ in range(self.one_of(0, 1, 2, 3)):
            number = self._random.randrange(len(lines))
            name, is_pair, _ = lines[number].partition("=")
            word = self.one_of(
                *map(repr, NUMBERS), *map(str, INTEGERS), *map(json.dumps, WORDS), "[]", "{}", "[["
            )
            lines[number] = (
                f"{name}= {word}" if is_pair else self.one_of(lines[number], "", "[training]", "]")
            )
        return self.path(
            ".toml", self.usually("\n".join(lines).encode(), self.damaged("\n".join(lines).encode()))
        )

    def _changes(self) -> list[str]:
        keys = (
            "training.num_steps", "training.multiplicity", "training.noise_multiplier", "training.delta",
            "data.num_examples", "model.hidden", "audit.num_canaries", "audit.confidence", "seed", "x.y",
        )  # fmt: skip
        words = [*map(repr, NUMBERS), *map(str, INTEGERS), "[9999999999]", "true", "[", *WORDS]
        return [f"{self.one_of(*keys)}={self.one_of(*words)}" for _ in range(self.one_of(0, 1, 2))]


QUICK = ("reads_scores", "makes_observations", "reads_values", "resumes", "loads_config", "makes_claims")
ALL = (
    *QUICK,
    "counts_errors",
    "audits",
    "calls_scores",
    "calls_scores",
    "calls_plan",
    "calls_run",
    "calls_report",
)


def _tame(rows: list[str]) -> list[str]:
    """Rows of which at most one has a strange score."""
    return [
        row if row.count(",") == 1 and row[0] in "-0123456789" and "e" not in row else "0.5,1" for row in rows
    ]


def _recorder() -> Recorder:
    return Recorder(claim=Claim.gaussian(noise_multiplier=1.0, delta=1e-5), num_steps=4)


def _recorder_state() -> dict[str, Any]:
    recorder = _recorder()
    for step in range(3):
        present = np.arange(6) % 2 == step % 2
        recorder.record(present + 0.1 * np.arange(6.0), present)
    return recorder.state_dict()


_KEPT: list[tuple[Any, dict[str, Any]]] = []


def _stored_values() -> list[tuple[Any, dict[str, Any]]]:
    """Classes that are read from files, with values of each; the first has those of a whole result."""
    if not _KEPT:
        observations = Observations(with_canary=PRESENT, without_canary=ABSENT, normalized=True)
        result = dpaudit.audit(observations, claim=Claim.gaussian(noise_multiplier=1.0, delta=1e-5))
        values = json.loads(json.dumps(result.to_dict()))
        _KEPT.extend([
            (Bound, values), (Bound, values["bound"]), (Power, values["power"]),
            (Estimate, values["estimate"]), (RocBand, values["estimate"]["roc"]),
            (ClaimPart, values["claim"]["parts"][0]), (ThresholdRule, values["bound"]["threshold_rule"]),
        ])  # fmt: skip
    return _KEPT


def _failures(seeds: range, kinds: tuple[str, ...], folder: Path) -> list[str]:
    """What went wrong, by seed; everything else was audited or refused in a sentence."""
    found = []
    for seed in seeds:
        case, kind = Case(seed, folder), kinds[seed % len(kinds)]
        call: Callable[[], None] = getattr(case, kind)
        try:
            with warnings.catch_warnings(), _limited():
                warnings.simplefilter("error")
                call()
        except DpauditError as error:
            try:
                _require_sentence(str(error))
            except AssertionError as wrong:
                found.append(f"{kind}, seed {seed}: {wrong}")
        except (Exception, TooSlowError) as error:  # noqa: BLE001  # all of them are listed
            found.append(f"{kind}, seed {seed}: {type(error).__name__}: {str(error)[:300]}")
    return found


def test_mutated_inputs_are_audited_or_refused_in_a_sentence(tmp_path: Path) -> None:
    assert not _failures(range(FEW), QUICK, tmp_path)


@pytest.mark.long
def test_thousands_of_mutated_inputs_take_little_time_and_memory(tmp_path: Path) -> None:
    _stored_values()
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    failures = _failures(range(MANY), ALL, tmp_path)
    assert not failures, "\n".join([f"{len(failures)} of {MANY}", *failures[:40]])
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) < BYTES
