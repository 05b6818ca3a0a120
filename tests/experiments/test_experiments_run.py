"""A run in its directory: what it writes, refuses and goes on from."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import forged

import dpaudit
from dpaudit import InputError
from dpaudit.experiments import Config, Progress, rehearse, run
from dpaudit.experiments._build import load_data
from dpaudit.experiments._directory import RunDirectory
from dpaudit.experiments._recompute import verify

Small = Callable[..., Config]
MODES = ("one-run", "paper", "end-to-end")
ONE_MODE = [MODES[0], *(pytest.param(mode, marks=pytest.mark.long) for mode in MODES[1:])]
INPUT = ("threat_model=input", "audit.held_out=60", "audit.canary.num_steps=3", "audit.canary.kind=crafted")
FILES = [
    "checkpoint.pt",
    "config.json",
    "manifest.json",
    "present.npy",
    "provenance.json",
    "result.json",
    "scores.npy",
]


def changes_of(mode: str) -> list[str]:
    return [f"audit.mode={mode}", *(["audit.num_canaries=1"] if mode == "paper" else [])]


def arrays(config: Config) -> dict[str, np.ndarray]:
    return {path.name: np.load(path) for path in Path(config.output).glob("*.npy")}


def without_times(values: dict[str, Any]) -> dict[str, Any]:
    """Everything but what depends on the clock."""
    return {key: value for key, value in values.items() if key not in ("timing", "provenance")}


class CrashError(Exception):
    """Stands for a power failure."""


def crash_at(step: int) -> Callable[[Progress], None]:
    def watch(progress: Progress) -> None:
        if progress.num_done == step:
            raise CrashError

    return watch


def stored(config: Config, name: str) -> Any:
    return json.loads((Path(config.output) / name).read_text())


def test_a_run_leaves_everything_and_nothing_half_written(small: Small) -> None:
    config = small("audit.confidence=0.9")
    outcome = run(config)
    assert sorted(path.name for path in Path(config.output).iterdir()) == [".lock", *FILES]
    assert stored(config, "result.json") == outcome.values
    assert outcome.values["schema_version"] == 2
    assert outcome.values["num_done"] == 20
    assert 0 < outcome.values["accuracy"] <= 1
    assert outcome.values["bound"]["confidence"] == pytest.approx(0.92)
    assert outcome.values["diagnosis"]["confidence"] == pytest.approx(0.98)
    assert set(stored(config, "manifest.json")["files"]) == set(FILES) - {"manifest.json"}
    found = arrays(config)
    assert found["scores.npy"].shape == found["present.npy"].shape == (20, 32)


@pytest.mark.parametrize(
    "changes",
    [
        changes_of("one-run"),
        changes_of("paper"),
        pytest.param(changes_of("end-to-end"), marks=pytest.mark.long),
        [*INPUT, "audit.canary.every=8", "audit.num_canaries=4"],
        [*INPUT, "audit.canary.every=8", *changes_of("paper")],
    ],
)
def test_a_run_that_crashed_has_the_observations_of_one_that_did_not(
    small: Small, changes: list[str], tmp_path: Path
) -> None:
    config = small(*changes, "checkpoint_seconds=0")
    for step in (7, 7, 12):  # the second time before any new step
        with pytest.raises(CrashError):
            run(config, watch=crash_at(step))
    resumed = run(config)
    whole = small(*changes, f"output={tmp_path / 'whole'}")
    crafted: list[tuple[int, int]] = []
    straight = run(whole, crafting=lambda *steps: crafted.append(steps))
    assert crafted == ([(1, 3), (2, 3), (3, 3)] * 3 if INPUT[0] in changes else [])
    assert without_times(resumed.values) == without_times(straight.values)
    assert arrays(config).keys() == arrays(whole).keys()
    for name, array in arrays(config).items():
        np.testing.assert_array_equal(array, arrays(whole)[name])


def test_a_resumed_run_begins_at_its_checkpoint(small: Small) -> None:
    config = small("checkpoint_seconds=0")
    with pytest.raises(CrashError):
        run(config, watch=crash_at(7))
    seen: list[Progress] = []
    run(config, watch=seen.append)
    assert [progress.num_done for progress in seen] == list(range(6, 21))  # step 7 was not saved any more
    assert seen[-1].num_new == 14


def test_without_a_seed_two_runs_differ_and_an_interrupted_one_goes_on_with_its_own(
    small: Small, tmp_path: Path
) -> None:
    def unseeded(name: str) -> Config:
        return small("checkpoint_seconds=0", f"output={tmp_path / name}").model_copy(update={"seed": None})

    first, second = unseeded("first"), unseeded("second")
    with pytest.raises(CrashError):
        run(first, watch=crash_at(3))
    seed = stored(first, "config.json")["resolved"]["seed"]
    run(first)
    run(second)
    assert stored(first, "config.json")["resolved"]["seed"] == seed
    assert stored(second, "config.json")["resolved"]["seed"] != seed
    again = small(f"seed={seed}", f"output={tmp_path / 'again'}")
    run(again)
    np.testing.assert_array_equal(arrays(first)["scores.npy"], arrays(again)["scores.npy"])
    assert not np.array_equal(arrays(first)["scores.npy"], arrays(second)["scores.npy"])


def test_nobody_else_can_read_the_seeds(small: Small) -> None:
    config = small("training.num_steps=2")
    run(config)
    files = {path.name: path for path in Path(config.output).iterdir()}
    private = {name for name, path in files.items() if path.stat().st_mode & 0o077 == 0}
    assert private >= {"config.json", "checkpoint.pt"}


def test_a_target_epsilon_is_calibrated_once_and_kept(small: Small) -> None:
    base = small().model_dump()
    base["training"] |= {"noise_multiplier": None, "target_epsilon": 2.0}
    config = Config.model_validate(base)
    values = run(config).values
    assert values["claim"]["epsilon"] == pytest.approx(2.0, rel=1e-3)
    assert values["noise_multiplier"] == stored(config, "config.json")["resolved"]["noise_multiplier"]


def test_a_batch_size_is_a_sample_rate(small: Small) -> None:
    base = small("training.num_steps=2").model_dump()
    base["training"] |= {"sample_rate": None, "batch_size": 100.0}
    assert rehearse(Config.model_validate(base))["sample_rate"] == 0.25
    base["training"]["batch_size"] = 401.0
    with pytest.raises(InputError, match=r"batch_size must be at most 400, the number of examples, got 401"):
        rehearse(Config.model_validate(base))


def test_a_finished_run_is_not_run_again(small: Small) -> None:
    first = run(small())
    again = run(small("output=" + small().output, "checkpoint_seconds=5"), watch=crash_at(0))
    assert (first.was_finished, again.was_finished) == (False, True)
    assert again.values == first.values


def test_a_directory_with_another_config_is_refused_by_the_difference(small: Small) -> None:
    with pytest.raises(CrashError):
        run(small(), watch=crash_at(1))
    with pytest.raises(
        InputError,
        match=r"config: training\.num_steps is 30 instead of the stored 20\. Choose another",
    ):
        run(small("training.num_steps=30"))
    with pytest.raises(InputError, match=r"config: data\.num_examples is 300 instead of the stored 400"):
        run(small("data.num_examples=300"))


@pytest.mark.parametrize("start", [run, partial(rehearse, keep=True)], ids=["run", "rehearse"])
@pytest.mark.parametrize("name", ["result.json", "manifest.json", "with_canary.npy", "scores.npy"])
def test_a_directory_of_something_else_is_refused_before_training(
    name: str, start: Callable[[Config], object], small: Small
) -> None:
    config = small()
    path = Path(config.output) / name
    path.parent.mkdir()
    path.write_text("mine")
    with pytest.raises(InputError, match=rf"it has {name} without a config\.json. Remove it or choose"):
        start(config)
    assert [one.name for one in path.parent.iterdir() if one.name != ".lock"] == [name]
    assert path.read_text() == "mine"


@pytest.mark.parametrize("name", ["with_canary.npy", "log_likelihood_ratios.npy", "trials.jsonl"])
def test_a_file_of_another_mode_is_not_sealed_with_a_run_that_is_resumed(name: str, small: Small) -> None:
    config = small()
    run(config)
    folder = Path(config.output)
    for one in ("manifest.json", "result.json"):
        (folder / one).unlink()
    np.save(folder / "stray.npy", np.zeros(4))
    (folder / "stray.npy").rename(folder / name)
    sentence = rf"has {name}, which a run of mode one-run does not write; remove it or choose"
    with pytest.raises(InputError, match=sentence):
        run(config)
    (folder / name).unlink()
    run(config)
    assert verify(folder).status == "sealed"


def test_another_run_is_not_replaced(small: Small) -> None:
    config = small()
    run(config)
    with pytest.raises(InputError, match=r"num_steps is 3 instead of the stored 20\. Choose"):
        rehearse(small("training.num_steps=3"), keep=True)
    assert verify(config.output).status == "sealed"
    assert rehearse(config, keep=True)["verdict"] == run(config).values["verdict"]


def test_a_second_run_in_the_same_directory_is_refused(small: Small) -> None:
    config = small()
    with (
        RunDirectory(config.output).locked(),
        pytest.raises(InputError, match="is in use by another process"),
    ):
        run(config)
    assert run(config).values["num_done"] == 20


@pytest.mark.parametrize("content", [b"", b"not a checkpoint"])
def test_a_damaged_checkpoint_is_told(small: Small, content: bytes) -> None:
    config = small("checkpoint_seconds=0")
    with pytest.raises(CrashError):
        run(config, watch=crash_at(5))
    path = Path(config.output) / "checkpoint.pt"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"The checkpoint .*checkpoint\.pt is damaged"):
        run(config)
    path.unlink()
    assert run(config).values["num_done"] == 20


def test_a_violation_ends_the_run_if_that_is_asked(small: Small) -> None:
    broken = ["training.fault.name=noise-too-small", "training.fault.factor=0.2", "training.num_steps=200"]
    config = small(*broken, "audit.stop_on_violation=true", 'audit.methods=["f-DP(CP)"]')
    values = run(config).values
    assert values["verdict"] == "VIOLATION"
    assert values["stopped_early"] is True
    assert values["num_done"] < 200
    assert values["bound"]["inference"]["type"] == dpaudit.Betting().to_dict()["type"]
    assert values["methods"] == []  # bounds by counts do not hold for a run that chose its own end
    assert values["diagnosis"] is None  # and tests of its noise neither
    assert "stopped at its first violation" in values["notes"][0]
    assert values["estimate"] is None
    assert arrays(config)["scores.npy"].shape == (values["num_done"], 32)


def test_a_run_that_crashed_stops_at_the_same_violation(small: Small, tmp_path: Path) -> None:
    broken = ["training.fault.name=noise-too-small", "training.fault.factor=0.2", "training.num_steps=200"]
    asked = [*broken, "audit.stop_on_violation=true", "checkpoint_seconds=0"]
    end = run(small(*asked, f"output={tmp_path / 'whole'}")).values["num_done"]
    with pytest.raises(CrashError):
        run(small(*asked), watch=crash_at(end))  # the step of the violation
    assert run(small(*asked)).values["num_done"] == end


def test_a_signal_at_the_violation_that_ends_a_run_is_not_lost(small: Small, received: list[int]) -> None:
    broken = ["training.fault.name=noise-too-small", "training.fault.factor=0.2", "training.num_steps=200"]
    config = small(*broken, "audit.stop_on_violation=true", "checkpoint_seconds=0")
    steps: list[int] = []

    def watch(progress: Progress) -> None:
        steps.append(progress.num_done)
        if progress.live is not None and progress.live.is_violation and not received:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        run(config, watch=watch)
    assert received == [signal.SIGTERM]
    assert not (Path(config.output) / "result.json").exists()
    assert run(config).values["num_done"] == max(steps)


@pytest.mark.parametrize("fault", ["unclipped", "clipped-after-mean"])
def test_faults_of_clipping_are_violations(small: Small, fault: str) -> None:
    assert rehearse(small(f"training.fault.name={fault}"))["verdict"] == "VIOLATION"


@pytest.mark.parametrize("mode", ONE_MODE)
def test_the_noise_of_a_run_is_tested_with_a_share_of_the_error(small: Small, mode: str) -> None:
    values = rehearse(small(*changes_of(mode), "audit.confidence=0.999"))
    found = values["diagnosis"]
    assert found["findings"] == []
    assert (values["bound"]["confidence"], found["confidence"]) == pytest.approx((0.9992, 0.9998))
    assert {"noise-variance", "batch-sizes"} <= {one["name"] for one in found["tests"]}


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (["few-seeds", "training.fault.num_seeds=1"], "repeated-noise"),
        (["noise-too-small", "training.fault.factor=0.9"], "noise-variance"),
        pytest.param(
            ["shuffled-batches", "training.sample_rate=0.25"], "batch-sizes", marks=pytest.mark.long
        ),
    ],
)
def test_a_fault_that_no_score_shows_refutes_the_mechanism(small: Small, fault: list[str], name: str) -> None:
    mode = changes_of("end-to-end" if name == "batch-sizes" else "one-run")
    values = rehearse(small(f"training.fault.name={fault[0]}", *fault[1:], *mode))
    assert name in {one["name"] for one in values["diagnosis"]["findings"]}
    assert (values["verdict"], values["refuted"]) == ("VIOLATION", ["mechanism"])
    assert values["likely_causes"]


@pytest.mark.parametrize("mode", ONE_MODE)
def test_the_methods_that_are_asked_for_stand_beside_the_verdict(small: Small, mode: str) -> None:
    asked = '["f-DP(CP)", "(eps,delta)(ZB)", "eps-DP(Katz)"]'
    values = rehearse(small(*changes_of(mode), f"audit.methods={asked}"))
    kinds = {(row["name"], row["threshold_rule"]["type"]): row["kind"] for row in values["methods"]}
    assert kinds == {
        ("f-DP(CP)", "Fixed"): "confidence",
        ("(eps,delta)(ZB)", "Fixed"): "credible",
        ("eps-DP(Katz) delta=0", "Fixed"): "heuristic",
        ("f-DP(CP)", "SameData"): "heuristic",
        ("(eps,delta)(ZB)", "SameData"): "heuristic",
        ("eps-DP(Katz) delta=0", "SameData"): "heuristic",
    }
    composed = [row["training_epsilon"] is not None for row in values["methods"] if row["symbol"] == "mu"]
    assert all(composed) or mode == "end-to-end"


@pytest.mark.long
def test_a_canary_that_is_sometimes_in_is_judged_by_the_curve_of_such_a_step(small: Small) -> None:
    values = rehearse(small(*changes_of("paper"), "audit.canary_rate=0.5", "training.num_steps=5"))
    for bound in (values["bound"], values["methods"][0]):
        curve = bound["tradeoff"]
        assert (curve["type"], curve["sample_rate"], curve["num_steps"]) == ("SubsampledGaussian", 0.5, 1)


@pytest.mark.parametrize("kind", ["blank", "mislabelled", "adversarial"])
def test_every_input_canary_can_be_asked_for(small: Small, kind: str) -> None:
    changes = ["threat_model=input", f"audit.canary.kind={kind}", "audit.num_canaries=4"]
    assert rehearse(small(*changes, "audit.first_steps=2", "training.num_steps=3"))["num_done"] == 3


def test_input_canaries_are_coupled_so_that_counts_are_left_out(small: Small) -> None:
    changes = [*INPUT, "training.num_steps=5"]
    many = rehearse(small(*changes, 'audit.methods=["f-DP(CP)", "f-DP(betting)"]', "audit.num_canaries=4"))
    assert [row["name"] for row in many["methods"]] == ["f-DP(betting)"]
    assert "which other canaries were present" in many["notes"][0]
    one = rehearse(small(*changes, 'audit.methods=["f-DP(CP)"]', "audit.num_canaries=1"))
    assert {row["name"] for row in one["methods"]} == {"f-DP(CP)"}
    assert one["notes"] == []


def test_more_held_out_examples_than_there_are_for_test_get_a_sentence(small: Small) -> None:
    with pytest.raises(
        InputError, match=r"audit\.held_out must be below 1397, the number of test examples, got 5000"
    ):
        rehearse(small(*INPUT, "audit.held_out=5000"))


@pytest.mark.parametrize("data", ["digits", "random"])
def test_as_many_examples_are_for_test_as_the_config_says(small: Small, data: str) -> None:
    base = small().model_dump() | {"data": {"name": data, "num_examples": 60, "num_test": 7}}
    train, test = load_data(Config.model_validate(base).data)
    assert (len(train), len(test)) == (60, 7)
    base["data"].pop("num_test")
    all_of_them = load_data(Config.model_validate(base).data)[1]
    assert len(all_of_them) == (1797 - 60 if data == "digits" else 12)


def test_a_model_that_does_not_fit_is_told(small: Small) -> None:
    base = small().model_dump() | {"model": {"name": "purchase-mlp"}}
    with pytest.raises(
        InputError, match=r"purchase-mlp needs data with 600 features and 100 classes, got Data"
    ):
        rehearse(Config.model_validate(base))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["data.num_examples=1797"], r"data\.num_examples must be at most 1796, got 1797"),
        (["data.num_test=1398"], r"data\.num_test must be at most 1397, got 1398"),
        (
            ["audit.num_canaries=100000"],
            "num_canaries must be at most 1210, the number of model parameters, got",
        ),
        (["device=gpu"], "device='gpu' is not available to torch"),
        (["device=meta"], "device='meta' is not available to torch"),
    ],
)
def test_what_shows_only_later_is_told_before_the_run_begins(
    small: Small, changes: list[str], sentence: str
) -> None:
    config = small(*changes)
    with pytest.raises(InputError, match=sentence):
        run(config)
    assert [path.name for path in Path(config.output).iterdir()] == [".lock"]


def test_files_that_are_missing_are_named(small: Small, tmp_path: Path) -> None:
    for name in ("cifar10", "purchase100", "location", "idx"):
        base = small().model_dump() | {"data": {"name": name, "directory": str(tmp_path / "data")}}
        with pytest.raises(InputError, match=r"download it from"):
            rehearse(Config.model_validate(base))


def test_a_run_does_not_go_on_with_other_data(small: Small, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def write_examples() -> None:
        inputs, targets = rng.integers(0, 2, (200, 600)), rng.integers(0, 100, 200)
        np.savez(tmp_path / "purchase100.npz", features=inputs, labels=targets)

    write_examples()
    data = {"name": "purchase100", "directory": str(tmp_path), "num_examples": 100}
    config = Config.model_validate(small().model_dump() | {"data": data})
    with pytest.raises(CrashError):
        run(config, watch=crash_at(3))
    write_examples()
    with pytest.raises(InputError, match="the run started with 100 training examples"):
        run(config)


def test_what_a_killed_process_left_half_written_is_removed(small: Small) -> None:
    config = small()
    left = Path(config.output) / ".checkpoint.pt.abc.unfinished"
    left.parent.mkdir()
    left.write_bytes(b"half")
    run(config)
    assert not left.exists()


@pytest.mark.long
def test_a_whole_run_has_its_looser_bound_beside_the_verdict(small: Small) -> None:
    values = run(small("audit.mode=end-to-end", "audit.num_canaries=1000")).values
    assert values["num_canaries"] == 1000
    assert 0 < values["one_run_bound"]["epsilon"] <= values["bound"]["epsilon"]


def test_a_config_that_lacks_a_value_is_refused_by_its_name(small: Small) -> None:
    config = small()
    run(config)
    path = Path(config.output) / "config.json"
    values = json.loads(path.read_text())
    del values["resolved"]["data_digest"]
    path.write_text(json.dumps(values))
    forged(path.parent)
    with pytest.raises(InputError, match=r"config\.json has no data_digest"):
        run(config)
