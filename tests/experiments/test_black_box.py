"""Audits of final models: what is kept of them, what does not matter, and what is said of failures."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from digits_config import models_config
from pydantic import ValidationError
from statistical_limits import count_range

from dpaudit import InputError
from dpaudit.experiments import Config, Running, parse_config, rehearse, run
from dpaudit.experiments._build import Resolved, load_data, resolve
from dpaudit.experiments._directory import with_checksum
from dpaudit.experiments._recompute import verify
from dpaudit.experiments.black_box import FinalModel, ManyRuns, _many_runs
from dpaudit.experiments.black_box._canary import canaries_for
from dpaudit.experiments.config._schema import ExampleConfig, GivenConfig
from dpaudit.experiments.trials import Finished, Group, Task
from dpaudit.report import Format, Report, schema
from dpaudit.stats import Guesses
from dpaudit.training import DPSGD, SGD
from dpaudit.training.broken import NoiseTooSmall
from dpaudit.training.data import digits, hold_out

CLAIM = "training.noise_multiplier=4"
FORGOTTEN = ("training.fault.name=noise-too-small", "training.fault.factor=0.0")
HERE = Path(__file__).parent

Make = Callable[..., Config]


@pytest.fixture
def tiny(tmp_path: Path) -> Make:
    """A black-box audit of a moment, with changes."""

    def make(*changes: str, output: str = "run") -> Config:
        return parse_config(models_config(tmp_path / output, num_steps=5), "tiny.toml", changes)

    return make


@pytest.fixture
def of_function(tiny: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    """The same of a user's function."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.chdir(tmp_path)

    def make(name: str, *changes: str) -> Config:
        return tiny("model.name=function", f"model.function=black_box_functions:{name}", *changes)

    return make


def scores(config: Config) -> dict[str, bytes]:
    folder = Path(config.output)
    return {name: np.load(folder / f"{name}.npy").tobytes() for name in ("with_canary", "without_canary")}


def runs(config: Config) -> ManyRuns:
    data = load_data(config.data)
    return ManyRuns(config=config, resolved=resolve(config, data[0]), data=data)


def test_a_run_keeps_its_scores_and_its_result(tiny: Make) -> None:
    config, seen = tiny(CLAIM), list[Running]()
    found = run(config, trials=seen.append)
    folder = Path(config.output)
    assert {path.name for path in folder.iterdir()} >= {"config.json", "manifest.json", "trials.jsonl"}
    assert found.values == json.loads((folder / "result.json").read_text())
    assert found.values["verdict"] == "UNDERPOWERED"  # 40 models do not detect twice the claimed epsilon
    assert found.values["threat_model"] == "black-box"
    assert [found.values[key] for key in ("num_models", "num_failed", "num_parameters")] == [40, 0, 650]
    assert found.values["shapes"] == {"with_canary": [20], "without_canary": [20]}
    assert [np.load(folder / f"{name}_canary.npy").shape for name in ("with", "without")] == [(20,)] * 2
    assert seen[0].progress.num_done == 0
    assert seen[-1].progress.num_done == 40
    again = run(config)
    assert again.was_finished
    assert again.values == found.values


def test_forgotten_noise_is_a_violation_of_the_claim(tiny: Make) -> None:
    lively = "training.optimizer={name='sgd', learning_rate=1.0}"
    start = "audit.initialization={kind='pre-trained', num_steps=50}"
    values = run(tiny(CLAIM, *FORGOTTEN, lively, start)).values
    assert values["verdict"] == "VIOLATION"
    assert values["claim"]["epsilon"] < values["bound"]["epsilon"] <= values["largest_epsilon"]


def test_without_noise_there_is_a_bound_and_no_verdict(tiny: Make) -> None:
    start = "audit.initialization={kind='pre-trained', num_steps=50}"
    values = run(tiny(start)).values
    assert values["verdict"] is None
    assert values["claim"]["epsilon"] == "inf"
    # all models start from the same weights and see the same batches: nothing but the canary differs
    assert values["bound"]["epsilon"] == pytest.approx(values["largest_epsilon"])
    assert values["largest_epsilon"] < math.inf
    assert "nothing is claimed" in values["notes"][0]


def test_the_loss_orders_models_as_the_log_odds_do(tiny: Make) -> None:
    found = [run(tiny(f"audit.score={score}", output=score)).values for score in ("log-odds", "loss")]
    assert found[0]["bound"]["epsilon"] == found[1]["bound"]["epsilon"]
    assert found[0]["bound"]["threshold"] > found[1]["bound"]["threshold"]


def test_another_threshold_rule_is_another_run(tiny: Make) -> None:
    run(tiny("audit.num_models=20"))
    with pytest.raises(InputError, match=r"audit.threshold is .held-out. instead of the stored null"):
        run(tiny("audit.num_models=20", "audit.threshold=held-out"))
    values = run(tiny("audit.num_models=20", "audit.threshold=held-out", output="other")).values
    assert values["bound"]["threshold_rule"]["type"] == "HeldOut"


def test_canaries_are_held_out_examples_or_what_is_given(tiny: Make, tmp_path: Path) -> None:
    plain, wrong = runs(tiny("audit.canary.kind=example", "audit.canary.index=5")), runs(tiny())
    held_out = plain._parts[1]
    assert plain.shared.canary.inputs.equal(held_out.inputs[5])
    assert plain.shared.canary.target == int(held_out.targets[5])
    matches = (held_out.inputs == wrong.shared.canary.inputs).flatten(1).all(dim=1)
    assert int(matches.sum()) == 1
    assert int(held_out.targets[matches]) != wrong.shared.canary.target
    assert runs(tiny("audit.canary.kind=clip-bkd")).shared.canary.inputs.shape == held_out.inputs.shape[1:]
    assert not runs(tiny("audit.canary.kind=blank")).shared.canary.inputs.any()
    np.save(tmp_path / "mine.npy", np.full((1, 8, 8), 0.25))
    given = f"audit.canary={{kind='example', file='{tmp_path / 'mine.npy'}', target=7}}"
    assert runs(tiny(given)).shared.canary.target == 7
    assert (runs(tiny(given)).shared.canary.inputs == 0.25).all()
    np.save(tmp_path / "mine.npy", np.full((1, 8, 8), 255, dtype=np.uint8))
    assert (runs(tiny(given)).shared.canary.inputs == 1.0).all()  # as bytes of the data are


def test_the_models_are_trained_with_the_settings_of_the_config(tiny: Make) -> None:
    plain, broken = runs(tiny()).ensemble, runs(tiny(*FORGOTTEN)).ensemble
    assert plain.settings == DPSGD(
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        sample_rate=1.0,
        num_steps=5,
        optimizer=SGD(learning_rate=1.0),
    )
    assert plain.mechanism is plain.initial_weights is None
    assert broken.mechanism == NoiseTooSmall(noise_multiplier=0.0, max_grad_norm=1.0, factor=0.0)
    assert plain.device == torch.device("cpu")
    assert len(plain.data) == 300


def test_pretrained_models_start_from_the_shared_weights(tiny: Make) -> None:
    table = "audit.initialization={kind='pre-trained', num_steps=2, batch_size=8, learning_rate=0.3}"
    found = runs(tiny(table))
    assert found.shared.weights is not None
    assert found.ensemble.initial_weights is found.shared.weights
    for change in ("num_steps=3", "batch_size=9", "learning_rate=0.4"):
        name = change.partition("=")[0]
        other = re.sub(rf"{name}=[\d.]+", change, table)
        assert not runs(tiny(other)).shared.weights.equal(found.shared.weights)


@pytest.mark.long
def test_a_run_keeps_its_canary_whatever_becomes_of_its_file(tiny: Make, tmp_path: Path) -> None:
    np.save(tmp_path / "mine.npy", np.full((1, 8, 8), 0.25))
    config = tiny(f"audit.canary={{kind='example', file='{tmp_path / 'mine.npy'}', target=7}}", CLAIM)
    whole = run(config).values
    folder = Path(config.output)
    for name in ("result.json", "trials.jsonl"):
        (folder / name).unlink()
    np.save(tmp_path / "mine.npy", np.full((1, 8, 8), -0.25))
    assert run(config).values["bound"] == whole["bound"]
    (folder / "result.json").unlink()
    (folder / "canary.json").unlink()
    with pytest.raises(InputError, match="canary_digest"):
        run(config)


def test_a_canary_is_that_of_its_run_even_before_the_first_trial(tiny: Make) -> None:
    config, other = tiny(), tiny("seed=4", output="other")
    for one in (config, other):
        run(one)
    folder, path = Path(config.output), Path(config.output) / "canary.json"
    for name in ("manifest.json", "result.json", "trials.jsonl"):
        (folder / name).unlink()
    whole = path.read_text()
    values = json.loads(whole)
    path.write_text(json.dumps(values | {"target": (values["target"] + 1) % 10}))
    assert verify(folder).status == "refused"
    with pytest.raises(
        InputError, match="was changed after the run wrote it: its checksum differs; restore it or"
    ):
        run(config)
    path.write_text((Path(other.output) / "canary.json").read_text())
    with pytest.raises(InputError, match="of another run"):
        run(config)
    for content in ("{", json.dumps(with_checksum({"run": values["run"]}))):
        path.write_text(content)
        with pytest.raises(InputError, match="does not contain the canary of the run"):
            run(config)
    path.write_text(whole)
    assert verify(folder).status == "unfinished"
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"it has canary\.json without a config\.json"):
        run(config)


def test_packages_that_only_workers_import_took_part_too(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        def map(self, task: Task, groups: Sequence[Group]) -> Iterator[tuple[Group, Finished]]:
            for group in groups:
                scored = Finished(**asdict(task(group)[1]))
                assert scored.packages["numpy"] == np.__version__
                yield group, replace(scored, packages={"ray": "1.2.3", "numpy": "0.0.1"})

    monkeypatch.delitem(sys.modules, "ray", raising=False)  # of a test of the pools
    monkeypatch.setattr(_many_runs, "pool_for", lambda _: Elsewhere())
    found = run(tiny()).values["provenance"]["packages"]
    assert (found["ray"], found["numpy"]) == ("1.2.3", np.__version__)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["audit.canary={kind='example', index=64}"], "audit.canary.index must be below 64"),
        (
            ["audit.canary={kind='example', index=0, target=10}"],
            r"audit\.canary\.target must be below 10, the number of classes, got 10",
        ),
        (["audit.canary={kind='example', file='none.npy', target=1}"], "does not exist"),
        (["audit.held_out=1497"], "audit.held_out must be below 1497"),
    ],
)
def test_a_mistake_is_told_before_anything_is_trained(
    changes: list[str], sentence: str, tiny: Make, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=sentence):
        run(tiny(*changes))
    assert not (tmp_path / "run" / "trials.jsonl").exists()


def test_a_function_that_returns_models_is_audited(of_function: Make) -> None:
    values = run(of_function("train")).values
    assert values["num_failed"] == 0
    assert values["accuracy"] is None
    assert values["shapes"] == {"with_canary": [20], "without_canary": [20]}


def test_failed_trials_are_told_and_count_against_the_audit(of_function: Make) -> None:
    values = run(of_function("train_sometimes", CLAIM)).values
    assert 0 < values["num_failed"] < 40
    assert any("RuntimeError: no luck today" in note for note in values["notes"])
    assert any(note.startswith(f"{values['num_failed']} of 40 trials failed") for note in values["notes"])
    # scores are right where there are any
    assert values["bound"]["epsilon"] == pytest.approx(values["largest_epsilon"])


def test_trials_that_failed_are_tried_again_if_somebody_asks_for_it(
    of_function: Make, tmp_path: Path
) -> None:
    (tmp_path / "broken").touch()
    config = of_function("train_unless_told")
    first = run(config).values
    assert first["num_failed"] > 0
    (tmp_path / "broken").unlink()
    assert run(config).values == first
    second = run(config, retry_failed=True)
    assert second.values["num_failed"] == 0
    told = [text for text in second.values["bound"]["assumptions"] if "were repeated" in text]
    assert len(told) == 1
    assert told[0].startswith("all randomness of a training run comes from its seed")
    (Path(config.output) / "result.json").unlink()
    assert run(config).values["bound"] == second.values["bound"]  # a store does not forget it
    assert second.values["bound"]["epsilon"] == pytest.approx(second.values["largest_epsilon"])


def test_a_function_that_changes_its_data_has_no_scores(of_function: Make) -> None:
    with pytest.raises(
        InputError, match="No training run returned a score: 40 of 40 trials failed, the first of them"
    ):
        run(of_function("train_and_change"))


def test_a_function_whose_code_has_changed_is_another_run(tiny: Make, tmp_path: Path) -> None:
    code = tmp_path / "changing.py"
    code.write_text("def train(data, seed):\n    return float(len(data))\n")
    config = tiny("model.name=function", "model.function=changing:train")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        found = run(config).values
        code.write_text("def train(data, seed):\n    return -float(len(data))\n")
        with pytest.raises(
            InputError, match=r"The file of model\.function='changing:train' has changed since the run"
        ):
            run(config)
        code.write_text("def train(data, seed):\n    return float(len(data))\n")
        assert run(config).values == found


def test_one_training_run_is_refused_what_it_cannot_do(tiny: Make, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="methods cannot be used with threat_model = 'black-box'"):
        one_run(tiny, 'audit.methods=["f-DP(CP)"]')
    for change, most in (("num_guesses=41", 40), ("num_canaries=65", 64)):
        with pytest.raises(InputError, match=rf"audit\.{change.partition('=')[0]} must be at most {most}"):
            run(one_run(tiny, f"audit.{change}"))
    with pytest.raises(InputError, match="use run"):
        rehearse(tiny())
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_run_without_a_claim_has_a_report(tiny: Make) -> None:
    config = tiny("audit.num_models=20")
    assert run(config).values["verdict"] is None
    report = Report.read([config.output])
    jsonschema.validate(json.loads(report.to_text(Format.JSON)), schema())
    assert report.runs[0].verdict is None
    assert "NO CLAIM TESTED" in report.to_text()
    assert "No verdict" in report.to_text(Format.MARKDOWN)


def test_where_every_trial_fails_the_first_error_is_the_answer(of_function: Make) -> None:
    with pytest.raises(InputError, match=r"ValueError: .* examples are not enough"):
        run(of_function("train_never"))


def one_run(tiny: Make, *changes: str) -> Config:
    config = tiny("audit.num_models=2")  # the tables of the other mode are replaced as a whole
    values = config.model_dump(mode="json", exclude={"pool"})
    values["audit"] = {"mode": "one-run", "num_canaries": 40, "held_out": 64}
    values["training"] |= {"noise_multiplier": 4.0}
    for change in changes:
        table, _, rest = change.partition(".")
        key, _, value = rest.partition("=")
        values[table][key] = json.loads(value)
    return Config.model_validate(values)


def test_one_training_with_many_canaries_gives_both_one_run_bounds(tiny: Make) -> None:
    config = one_run(tiny)
    values = run(config).values
    assert [row["name"] for row in values["methods"]] == ["f-DP(one-run)", "(eps,delta)(one-run)"]
    assert values["bound"]["inference"] == {"type": "one-run f-DP (Mahloujifar 2024)"}
    assert values["bound"]["counts"]["num_guesses"] == 40
    assert values["verdict"] in {"NO_VIOLATION", "UNDERPOWERED"}
    kept = [np.load(Path(config.output) / f"{name}.npy") for name in ("scores", "present")]
    assert [one.shape for one in kept] == [(40,), (40,)]
    assert values["shapes"]["with_canary"] == [int(kept[1].sum())]
    assert run(config).was_finished


def test_the_present_canaries_and_no_others_are_in_the_data(tiny: Make) -> None:
    config = one_run(tiny)
    data = load_data(config.data)
    resolved: Resolved = resolve(config, data[0])
    final = FinalModel.of(config, resolved, data)
    seen = {row.numpy().tobytes() for row in final.training.data.inputs}
    there = np.array([row.numpy().tobytes() in seen for row in final.canaries.inputs])
    assert (there == final.present).all()
    assert len(final.training.data) == 300 + final.present.sum()
    fewest, most = count_range(40, 0.5)
    assert fewest <= final.present.sum() <= most


def test_one_training_without_noise_gives_its_canaries_away(tiny: Make) -> None:
    fault = 'training.fault={"name": "noise-too-small", "factor": 0.0}'
    config = one_run(tiny, fault, "training.num_steps=150", "training.max_grad_norm=8.0", 'model.name="mlp"')
    data = load_data(config.data)
    final = FinalModel.of(config, resolve(config, data[0]), data)
    for _ in final.training.run():
        pass
    assert Guesses.from_scores(final.scores, final.present, num_guesses=40).num_correct >= 32


@pytest.mark.parametrize("config", [ExampleConfig(kind="mislabelled"), GivenConfig(kind="example", index=0)])
def test_the_canaries_of_one_training_follow_from_its_seed(config: ExampleConfig | GivenConfig) -> None:
    held_out = hold_out(digits(), 64)[1]
    first, again, other = (canaries_for(config, held_out, seed, 8)[0] for seed in (1, 1, 2))
    assert first.equal(again)
    assert not first.equal(other)
