"""What ``dpaudit scores`` finds and prints."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import dpaudit
from dpaudit.cli._result_table import _print_methods
from dpaudit.stats import _observations

HONEST = ["--noise-multiplier", "0.5", "--delta", "1e-5"]  # the files' own mu is 2
BROKEN = ["--noise-multiplier", "2", "--delta", "1e-5"]
DPSGD = [*BROKEN, "--sample-rate", "0.1", "--num-steps", "20", "--per-step"]


@pytest.mark.parametrize(
    ("claim", "status", "verdict"),
    [
        ([], 0, None),
        (HONEST, 0, "NO_VIOLATION"),
        (BROKEN, 1, "VIOLATION"),
        (["--epsilon", "1", "--delta", "1e-5"], 1, "VIOLATION"),
        (["--epsilon", "50", "--delta", "0"], 3, "UNDERPOWERED"),
        (DPSGD, 1, "VIOLATION"),
    ],
)
def test_the_exit_status_is_the_verdict(
    claim: list[str], status: int, verdict: str | None, files: Any, run: Any
) -> None:
    result = run("scores", *files.sides(), "--normalized", *claim, "--json")
    assert result.exit_code == status, result.stderr
    assert json.loads(result.stdout)["verdict"] == verdict


def test_advice_on_power_names_a_plan_that_exists(tmp_path: Path, run: Any) -> None:
    np.savez(tmp_path / "few.npz", with_canary=[1.0, 2.0, 3.0, 4.0], without_canary=[0.0, 1.5, 0.5, -1.0])
    few = {
        option: run("scores", str(tmp_path / "few.npz"), *DPSGD[:-1], option).stdout.split()
        for option in ("--per-step", "--end-to-end", "--one-run")
    }
    text = {option: " ".join(words) for option, words in few.items()}
    assert "needed More scores: `dpaudit plan` computes how many." in text["--per-step"]
    assert "needed More scores: `dpaudit plan --end-to-end` computes how many." in text["--end-to-end"]
    assert "dpaudit plan" not in text["--one-run"]
    assert "More canaries in the run would detect smaller leaks." in text["--one-run"]


def test_the_verdict_is_the_library_s_own(files: Any, run: Any) -> None:
    values = json.loads(run("scores", *files.sides(), "--normalized", *DPSGD, "--json").stdout)
    result = dpaudit.audit(
        dpaudit.Observations(
            with_canary=files.present, without_canary=files.absent, normalized=True, scores_of="step"
        ),
        claim=dpaudit.Claim.dpsgd(noise_multiplier=2, sample_rate=0.1, num_steps=20, delta=1e-5),
    )
    assert {key: values[key] for key in result.to_dict()} == result.to_dict()


def test_json_is_one_object_without_a_claim_too(files: Any, run: Any) -> None:
    result = run("scores", *files.sides(), "--delta", "0", "--json")
    values = json.loads(result.stdout)
    assert [values[key] for key in ("claim", "verdict", "sentence", "bound", "power")] == [None] * 5
    gaussian = [row for row in values["methods"] if row["symbol"] == "mu"]
    assert all(row["epsilon"] == "inf" for row in gaussian)  # no Gaussian has a finite one at delta = 0
    assert result.stderr == ""


def _rows(values: dict[str, Any]) -> set[tuple[str, str, str]]:
    return {(row["name"], row["threshold_rule"]["type"], row["kind"]) for row in values["methods"]}


PAPER = ["f-DP(CP)", "f-DP(ZB)", "(eps,delta)(CP)", "(eps,delta)(ZB)", "eps-DP(Katz) delta=0"]
KINDS = ["confidence", "credible", "confidence", "credible", "heuristic"]
PRACTICE = {(name, "SameData", "heuristic") for name in PAPER}


def test_with_a_fixed_threshold_every_method_uses_it(files: Any, run: Any) -> None:
    values = json.loads(run("scores", *files.sides(), "--threshold", "0.4", "--json").stdout)
    fixed = {(name, "Fixed", kind) for name, kind in zip(PAPER, KINDS, strict=True)}
    ours = {
        (f"{name}", "Fixed", "confidence") for name in ("f-DP(joint)", "(eps,delta)(joint)", "f-DP(betting)")
    }
    assert _rows(values) == fixed | ours | PRACTICE


def test_without_one_every_method_has_a_sound_rule(files: Any, run: Any) -> None:
    values = json.loads(run("scores", *files.sides(), "--json").stdout)
    rules = ["HeldOut", "HeldOut", "Simultaneous", "HeldOut", "HeldOut"]
    chosen = set(zip(PAPER, rules, KINDS, strict=True))
    ours = {("f-DP(joint)", "HeldOut", "confidence"), ("(eps,delta)(joint)", "Simultaneous", "confidence")}
    more = {("f-DP(CP)", "Simultaneous", "confidence"), ("f-DP(betting)", "Predictable", "confidence")}
    assert _rows(values) == chosen | ours | more | PRACTICE


def test_rows_are_the_library_s_own_bounds(files: Any, run: Any) -> None:
    values = json.loads(run("scores", *files.sides(), "--threshold", "0.4", "--json").stdout)
    observations = dpaudit.Observations(with_canary=files.present, without_canary=files.absent)
    for name, inference in (("f-DP(CP)", dpaudit.ClopperPearson()), ("f-DP(betting)", dpaudit.Betting())):
        bound = dpaudit.lower_bound(
            observations,
            delta=1e-5,
            tradeoff=dpaudit.Gaussian(),
            inference=inference,
            threshold=dpaudit.Fixed(0.4),
        )
        row = next(row for row in values["methods"] if row["name"] == name)
        assert {key: row[key] for key in bound.to_dict()} == bound.to_dict()


def test_a_step_s_bound_is_composed_to_the_training(files: Any, run: Any) -> None:
    values = json.loads(run("scores", *files.sides(), "--normalized", *DPSGD, "--json").stdout)
    joint = next(row for row in values["methods"] if row["name"] == "f-DP(joint)")
    katz = next(row for row in values["methods"] if row["inference"] == {"type": "KatzLog"})
    expected = dpaudit.training_epsilon(joint["parameter"], 0.1, 20, 1e-5)
    assert joint["training_epsilon"] == pytest.approx(expected)
    assert katz["training_epsilon"] is None
    assert katz["delta"] == 0


SMALL = ["--epsilon", "0.5", "--delta", "1e-5"]
WHOLE_RUNS = ["--noise-multiplier", "1", "--sample-rate", "0.1", "--num-steps", "500", "--delta", "1e-5"]


@pytest.fixture(scope="module")
def whole_runs() -> tuple[Any, Any]:
    """Log-likelihood ratios of 1,000 whole runs a side of correct training, as WHOLE_RUNS claims."""
    rng = np.random.default_rng(1)
    sampled = rng.random((1000, 500)) < 0.1
    sums = np.stack([rng.standard_normal((1000, 500)) + sampled, rng.standard_normal((1000, 500))])
    present, absent = np.log(0.9 + 0.1 * np.exp(sums - 0.5)).sum(axis=2)
    return present, absent


def test_scores_of_whole_runs_are_not_taken_for_scores_of_steps(
    whole_runs: Any, files: Any, run: Any, refused: Any
) -> None:
    sides = ["--with", files.npy("w.npy", whole_runs[0]), "--without", files.npy("o.npy", whole_runs[1])]
    sentence = refused("scores", *sides, *WHOLE_RUNS)
    for option in ("--per-step (each", "--end-to-end (each", "--one-run (all", "got none."):
        assert option in sentence
    assert refused("scores", *sides, *WHOLE_RUNS, "--per-step", "--end-to-end").endswith(
        "got --per-step and --end-to-end."
    )
    steps = json.loads(run("scores", *sides, *WHOLE_RUNS, "--per-step", "--json").stdout)
    assert steps["verdict"] == "VIOLATION"  # which is why it must be asked for
    assert steps["scores_of"] == "step"
    assert any(text.startswith("each score is of a single step") for text in steps["bound"]["assumptions"])
    runs = json.loads(run("scores", *sides, *WHOLE_RUNS, "--end-to-end", "--json").stdout)
    assert (runs["verdict"], runs["scores_of"]) == ("NO_VIOLATION", "run")
    assert any("comes from a whole run" in text for text in runs["bound"]["assumptions"])
    with pytest.raises(
        dpaudit.InputError, match="A claim about DP-SGD needs to know what each score is of: pass"
    ):
        dpaudit.audit(
            dpaudit.Observations(with_canary=whole_runs[0], without_canary=whole_runs[1]),
            claim=dpaudit.Claim.dpsgd(noise_multiplier=1.0, sample_rate=0.1, num_steps=500, delta=1e-5),
        )


def test_members_of_one_model_are_guessed(whole_runs: Any, files: Any, run: Any) -> None:
    present, absent = (side[:500] for side in whole_runs)
    table = files.npz("t.npz", score=np.concatenate([present, absent]), present=np.repeat([1, 0], 500))
    values = json.loads(run("scores", table, *WHOLE_RUNS, "--one-run", "--json").stdout)
    assert values["verdict"] == "UNDERPOWERED"  # guesses on 1,000 canaries cannot show an epsilon of 12
    assert [row["name"] for row in values["methods"]] == ["f-DP(one-run)", "(eps,delta)(one-run)"]
    guesses = dpaudit.Guesses.from_scores(
        np.concatenate([present, absent]), np.repeat([True, False], 500), num_guesses=1000
    )
    curve = dpaudit.SubsampledGaussian(0.1, 500)
    expected = dpaudit.one_run_fdp_bound(guesses, tradeoff=curve, delta=1e-5)
    assert values["bound"]["parameter"] == expected.parameter > 0
    assert values["bound"]["assumptions"][:-1] == list(expected.assumptions)
    assert values["bound"]["assumptions"][-1].startswith("all scores are of one training run")
    broken = json.loads(run("scores", table, *SMALL, "--one-run", "--json").stdout)
    assert (broken["verdict"], broken["scores_of"]) == ("VIOLATION", "one-run")
    alone = json.loads(run("scores", table, "--one-run", "--json").stdout)
    assert [row["name"] for row in alone["methods"]] == ["(eps,delta)(one-run)"]


@pytest.mark.parametrize(
    ("claim", "threshold"),
    [
        ([], []),
        ([], ["--threshold", "0.5"]),
        (DPSGD, []),
        (DPSGD, ["--normalized"]),
        pytest.param([*DPSGD[:-1], "--end-to-end"], ["--normalized"], marks=pytest.mark.long),
    ],
)
def test_the_table_fits_80_columns(claim: list[str], threshold: list[str], files: Any, run: Any) -> None:
    result = run("scores", *files.sides(), *claim, *threshold, "-v")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in result.stdout
    assert sum("f-DP(CP)" in line for line in lines) >= 2
    assert any(line.split()[:3] == ["1", "the", "mechanism's"] for line in lines)
    assert any(line.startswith("  verdict ") for line in lines) == bool(claim)
    header = next(line for line in lines if line.startswith("method "))
    assert ("training" in header) == (claim == DPSGD)


@pytest.fixture
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Treat every file as too large for the memory; gives the sizes of the pieces that were read."""
    read: list[int] = []
    original = _observations._from_file

    def counted(scores: np.memmap, first: int, end: int) -> Any:
        for start, piece in original(scores, first, end):
            read.append(piece.size)
            yield start, piece

    monkeypatch.setattr("dpaudit.methods._STREAMED", 10)
    monkeypatch.setattr("dpaudit.stats._roc_band._SORTED", 10)
    monkeypatch.setattr(_observations, "_from_file", counted)
    monkeypatch.setattr(dpaudit.Observations, "in_memory", lambda _: pytest.fail("read into memory"))
    return read


def test_large_files_are_never_read_into_memory(files: Any, run: Any, small_is_large: list[int]) -> None:
    result = run("scores", *files.sides(), "--normalized", *HONEST, "--json")
    assert result.exit_code == 0, result.output
    # for the order of the sides, for the counts at the midpoint, for the tails (extremes of one side, counts
    # of the other), for the mean of the beginning (here all), for the estimate, and for the rates
    assert sum(small_is_large) == 7 * files.scores.size
    names = [row["name"] for row in json.loads(result.stdout)["methods"]]
    assert names == [*PAPER, "f-DP(joint)", "(eps,delta)(joint)"]


def test_large_files_of_steps_are_bet_on_in_the_pass_of_the_counts(
    files: Any, run: Any, small_is_large: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    present, absent = files.present.reshape(50, 6), files.absent.reshape(50, 5)
    sides = ["--with", files.npy("w.npy", present), "--without", files.npy("o.npy", absent)]
    result = run("scores", *sides, "--normalized", *HONEST, "--json")
    assert result.exit_code == 0, result.output
    # also for the order of the sides, the mean of the beginning, the estimate, and the rates: in all and per
    # step
    assert sum(small_is_large) == 6 * files.scores.size
    monkeypatch.undo()
    observations = dpaudit.Observations(with_canary=present, without_canary=absent, normalized=True)
    expected = dpaudit.audit(
        observations,
        claim=dpaudit.Claim.gaussian(noise_multiplier=0.5, delta=1e-5),
        inference=dpaudit.Betting(tails=0.0),  # far scores would need another pass
    ).bound
    assert json.loads(result.stdout)["bound"] == expected.to_dict()


def test_streamed_files_have_the_result_of_scores_in_memory(
    files: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Including ROC band and estimate; the bins of the band are those of many scores in both."""
    monkeypatch.setattr("dpaudit.stats._roc_band._SORTED", 10)
    monkeypatch.setattr(_observations, "_CHUNK", 64)
    words = ["scores", *files.sides(), "--normalized", *HONEST, "--json"]
    whole = json.loads(run(*words).stdout)
    monkeypatch.setattr("dpaudit.methods._STREAMED", 10)
    streamed = json.loads(run(*words).stdout)
    rows = whole.pop("methods")
    assert [row for row in rows if row in streamed["methods"]] == streamed.pop("methods")
    assert streamed == whole
    assert streamed["estimate"]["roc"] is not None


def test_large_files_without_a_fixed_threshold_are_audited_all_the_same(
    files: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpaudit.methods._LARGE", 10)
    result = run("scores", *files.sides(), *BROKEN)
    assert result.exit_code == 1, result.output
    assert "Large files stay on disk: methods that need them in memory are skipped." in result.stdout


def test_a_bad_score_in_a_large_file_is_named(
    files: Any, refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpaudit.methods._STREAMED", 10)
    files.absent[17] = np.nan
    sentence = refused("scores", *files.sides(), "--normalized")
    assert sentence == "Scores must be finite, got without_canary[17]=nan."


def test_long_work_is_announced_on_standard_error(
    files: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpaudit.cli._scores_command._QUICK", 10)
    result = run("scores", *files.sides(), "--normalized", "--json")
    assert result.stderr == "Analyzing 300 scores with the canary and 250 without it\n"
    json.loads(result.stdout)


@pytest.mark.parametrize("composed", [True, False])
def test_the_table_of_methods_has_a_row_for_each_bound(composed: bool) -> None:
    joint = {
        "name": "f-DP(joint)",
        "threshold_rule": {"type": "Fixed", "threshold": 0.5},
        "symbol": "mu",
        "parameter": 0.75,
        "epsilon": 2.5,
        "training_epsilon": 6.25 if composed else None,
        "kind": "confidence",
        "assumptions": ["first", "second"],
    }
    katz = {**joint, "name": "Katz", "symbol": "epsilon", "kind": "heuristic", "assumptions": ["second"]}
    values = {
        "shapes": {"with_canary": [1000, 4], "without_canary": [900]},
        "confidence": 0.9,
        "delta": 1e-6,
        "methods": [joint, katz],
    }
    console = Console(file=io.StringIO(), width=100)
    _print_methods(console, values)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    extra = ["training"] * composed
    assert ["method", "threshold", "mu", "epsilon", *extra, "kind", "notes"] in lines
    numbers = ["2.5", *["6.25"] * composed]
    assert ["f-DP(joint)", "fixed", "0.5", "0.75", *numbers, "confidence", "1", "2"] in lines
    assert ["Katz", "fixed", "0.5", *numbers, "heuristic", "2"] in lines
    assert ["1", "first"] in lines
    assert ["2", "second"] in lines
    text = console.file.getvalue()
    assert "scores: 1,000 x 4 with the canary, 900 without it" in text
    assert "at the 90 % level, epsilon at delta = 1e-06" in text


def test_coupled_scores_are_bet_on_and_not_counted(tmp_path: Any, run: Any) -> None:
    rng = np.random.default_rng(0)
    present = rng.random((50, 8)) < 0.5
    path = tmp_path / "scores.npz"
    np.savez(path, score=present + 0.5 * rng.standard_normal(present.shape), present=present)
    usual = json.loads(run("scores", str(path), "--normalized", *HONEST, "--json").stdout)
    result = run("scores", str(path), "--normalized", "--coupled", *HONEST, "--json")
    assert result.exit_code == 0, result.stderr
    values = json.loads(result.stdout)
    assert [row["inference"]["type"] for row in values["methods"]] == ["Betting"]
    assert values["bound"]["inference"]["stop_loss"] is False
    assert values["bound"]["epsilon"] < usual["bound"]["epsilon"]
    assert run("scores", str(path), "--coupled").exit_code == 0
