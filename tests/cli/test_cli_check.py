"""``dpaudit check`` prints what the settings of a prepared training run show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dpaudit.diagnostics import finding_kinds

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning"),
    pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated:DeprecationWarning"),
]

CODE = """
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

print("loading")


def prepare(noise_multiplier=1.0):
    print("preparing")
    torch.seed()
    model = nn.Linear(4, 2)
    data = TensorDataset(torch.randn(70, 4), torch.zeros(70).long())
    return PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=noise_multiplier,
        max_grad_norm=1.0,
    )


def silent():
    return prepare(0.0)


def failing():
    raise ValueError("no data.\\nsecond line")


def leaving():
    raise SystemExit(0)


def with_argument(config):
    return prepare()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "training_to_check.py"
    path.write_text(CODE)
    return path


def test_a_correct_training_run_has_no_finding(run: Any, file: Path) -> None:
    result = run("check", f"{file}:prepare")
    assert (result.exit_code, result.stdout) == (0, "No findings in the settings.\n")


def test_a_finding_has_status_1_and_a_cause(run: Any, file: Path) -> None:
    result = run("check", f"{file}:silent")
    assert result.exit_code == 1
    first, second, third = result.stdout.splitlines()
    assert first == "1 finding in the settings."
    assert second.startswith("  noise-multiplier: The optimizer's noise multiplier is 0")
    assert third.startswith("  possible cause: ")


def test_the_claim_is_compared(run: Any, file: Path) -> None:
    options = ["--noise-multiplier", "1", "--sample-rate", "0.12"]
    assert run("check", f"{file}:prepare", *options).exit_code == 0
    for name, value in (("noise-multiplier", "1.5"), ("sample-rate", "0.05")):
        assert run("check", f"{file}:prepare", f"--{name}", value).exit_code == 1


def test_json_is_the_only_output(run: Any, file: Path) -> None:
    result = run("check", f"{file}:silent", "--json")
    assert result.exit_code == 1
    assert [one["name"] for one in json.loads(result.stdout)["findings"]] == ["noise-multiplier"]


def test_a_module_in_the_current_directory_can_be_checked(
    run: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    assert run("check", "training_to_check:prepare").exit_code == 0


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("training.py", "Pass FILE.py:FUNCTION or package.module:FUNCTION, got 'training.py'."),
        ("{folder}/none.py:prepare", "does not exist."),
        ("no_such_module:prepare", "raised ModuleNotFoundError: No module named 'no_such_module'."),
        ("{file}:prepared", "has no function 'prepared' (found: prepare, silent, failing, leaving,"),
        ("{file}:failing", "raised ValueError: no data."),
        ("{file}:leaving", "raised SystemExit: 0."),
        ("{file}:with_argument", "must take no arguments (missing a required argument: 'config')."),
        ("{file}:torch", "has no function"),
        ("json:JSONDecoder", "optimizer, module and loader, got a JSONDecoder."),
    ],
)
def test_a_mistake_is_one_sentence(run: Any, file: Path, target: str, sentence: str) -> None:
    result = run("check", target.format(folder=file.parent, file=file))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert sentence in result.stderr.splitlines()[-1]


def test_explain_says_what_a_finding_means(run: Any) -> None:
    text = " ".join(run("explain", "repeated-noise").stdout.split())
    kind = finding_kinds()["repeated-noise"]
    for phrase in (kind.tests[1:], kind.matters, kind.question[1:], kind.advice, "zoo noise-100-seeds: "):
        assert phrase in text
    values = json.loads(run("explain", "repeated-noise", "--json").stdout)
    assert [entry["name"] for entry in values["zoo"]] == [
        "noise-100-seeds",
        "seed-constant",
        "ddp-rank-noise",
    ]
    assert values["may_follow_from"] == ["low-rank-noise"]


def test_explain_lists_all_findings_in_a_line_each(run: Any) -> None:
    lines = run("explain").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(finding_kinds())
    assert max(map(len, lines)) <= 80
    values = json.loads(run("explain", "--json").stdout)
    assert [kind["name"] for kind in values["findings"]] == list(finding_kinds())


def test_an_unknown_finding_gets_suggestions(refused: Any) -> None:
    assert refused("explain", "noise-varience").startswith(
        "There is no finding 'noise-varience'. Did you mean 'noise-variance'"
    )
    assert refused("explain", "zzz", "--json").endswith("List all with: dpaudit explain")
