"""Configs: what they hold, and what is said of mistakes."""

from __future__ import annotations

import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pydantic
import pytest

from dpaudit import Adversarial, Crafted, InputError, ThreatModel
from dpaudit.experiments import EXAMPLES, example, load_config, parse_config
from dpaudit.experiments.config._schema import AdversarialConfig, CanaryConfig, CraftedConfig, ManyRunsConfig

BEGIN = 'output = "out"\nmodel = {name = "mlp"}\ndata = {name = "digits"}\n[training]\n'
GOOD = BEGIN + "noise_multiplier = 1.0\nsample_rate = 0.1\nnum_steps = 10\n"
POOLS = ["serial", "processes", "ray"]


def refused(text: str, *changes: str) -> str:
    with pytest.raises(InputError) as caught:
        parse_config(text, "c.toml", changes)
    return str(caught.value)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_is_a_config(name: str) -> None:
    assert parse_config(example(name), name).output == f"runs/{name}"


def test_the_digits_example_shows_every_key_with_its_default() -> None:
    shown = tomllib.loads(example("digits"))
    shown["data"].pop("num_examples")
    shown["audit"].pop("num_canaries")
    minimal = 'output = "runs/digits"\nmodel = {name = "mlp"}\ndata = {name = "digits"}\n[training]\n'
    minimal += "target_epsilon = 8\nsample_rate = 0.1\nnum_steps = 1000\n"
    full = parse_config(minimal, "minimal").model_dump(mode="json", exclude_none=True)
    full["audit"] = {key: full["audit"][key] for key in shown["audit"]}  # the order of keys is free
    full["training"]["optimizer"].pop("weight_decay")
    full["audit"]["canary"] = {key: full["audit"]["canary"][key] for key in shown["audit"]["canary"]}
    assert shown == full


def test_an_unknown_example_is_answered_by_the_known_ones() -> None:
    with pytest.raises(
        InputError, match=r"example must be 'digits', 'paper-cifar10', 'end-to-end', .* got 'mnist'"
    ):
        example("mnist")


def test_a_config_does_not_change_afterwards() -> None:
    config = parse_config(GOOD, "c.toml")
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.training.num_steps = 3  # type: ignore[misc]


def test_all_mistakes_are_told_at_once_each_with_its_line() -> None:
    text = GOOD.replace("num_steps = 10", 'num_steps = "ten"').replace("1.0", "-1.0") + "sample_rat = 2\n"
    assert refused(text + "[audit]\nconfidence = 1.2\n").splitlines() == [
        "c.toml has 4 errors:",
        "  line 5, training.noise_multiplier: noise_multiplier must be at least 0, got -1.",
        "  line 7, training.num_steps: Must be a whole number, got 'ten'.",
        "  line 8, training.sample_rat: Unknown key. Did you mean 'sample_rate'?",
        "  line 10, audit.confidence: confidence must be at least 0.5 and below 1, got 1.2.",
    ]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            ["training.target_epsilon=8"],
            "--set training.target_epsilon: Exactly one of noise_multiplier and target_epsilon is required, "
            "got both.",
        ),
        (
            ["training.batch_size=8"],
            "--set training.batch_size: Exactly one of sample_rate and batch_size is required, got both.",
        ),
        (["training.num_steps=0"], "training.num_steps: num_steps must be at least 1, got 0."),
        (["training.num_steps=true"], "training.num_steps: Must be a whole number, got True."),
        (["training.delta=0"], "training.delta: delta must be above 0 and below 1, got 0."),
        (["training.max_grad_norm=nan"], "training.max_grad_norm: Must be a finite number, got nan."),
        (
            ["threat_model=black-box", "audit.canary.kind=crafted"],
            "audit: canary.kind must be 'blank', 'mislabelled', 'clip-bkd' or 'example' with "
            "threat_model = 'black-box', got 'crafted'.",
        ),
        (
            ["threat_model=black-box", "audit.num_models=1"],
            "audit.num_models: num_models must be at least 2, got 1.",
        ),
        (
            ["threat_model=black-box", "audit.mode=one-run", "audit.first_steps=3"],
            "audit: first_steps cannot be used with threat_model = 'black-box', got first_steps = 3.",
        ),
        (
            ["audit.initialization=pre-trained"],
            "audit: initialization cannot be used with threat_model = 'gradient', "
            "got initialization = pre-trained.",
        ),
        (
            ["audit.mode=many-runs"],
            "audit: mode must be 'one-run', 'paper' or 'end-to-end' with threat",
        ),
        (["training.noise_multiplier=0"], "training.noise_multiplier must be positive, got 0: without"),
        (["pool=serial"], "c.toml, pool cannot be used with mode = 'one-run', which trains a single model."),
        (
            ["threat_model=black-box", "pool.kind=ray", "pool.num_workers=2"],
            '--set pool.num_workers: This key is not used with kind = "ray"; remove it.',
        ),
        (
            ["model.name=function", "model.function=a:b"],
            "c.toml, A training function needs threat_model = 'black-box' and",
        ),
        (
            ["threat_model=black-box", "audit.canary.kind=example"],
            "c.toml, canary.kind = 'example' needs exactly one of index and file.",
        ),
        (
            ["threat_model=black-box", "training.fault.name=shuffled-batches"],
            "c.toml, The fault 'shuffled-batches' cannot be used with threat_model = 'black-box'.",
        ),
        (
            ["threat_model=magic"],
            "threat_model: Must be 'gradient', 'input' or 'black-box', got 'magic'.",
        ),
        (["model.name=mpl"], "'mlp', 'function', got 'mpl'. Did you mean 'mlp'?"),
        (["model.hidden=[16, 0]"], "model.hidden: hidden must be at least 1, got 0."),
        (["data.name=cifar10"], "data.directory: This key is required."),
        (["audit.mode=paper", "audit.num_canaries=3"], "audit.num_canaries: Must be 1, got 3."),
        (["audit.canary_rate=0.5"], "--set audit.canary_rate: This key is not used here; remove it."),
        (
            ["audit.mode=end-to-end", "audit.stop_on_violation=true"],
            'audit.stop_on_violation: This key is not used with mode = "end-to-end"; remove it.',
        ),
        (["audit.canary.kind=dirc"], "'crafted', 'clip-bkd', 'example', got 'dirc'. Did you mean 'dirac'?"),
        (
            ["audit.canary.kind=crafted"],
            "with threat_model = 'gradient', got 'crafted'.",
        ),
        (
            ["audit.held_out=9"],
            "audit: held_out cannot be used with threat_model = 'gradient', got held_out = 9.",
        ),
        (
            ["threat_model=input", "audit.mode=end-to-end"],
            "audit: mode must be 'one-run' or 'paper' with threat_model = 'input', got 'end-to-end'.",
        ),
        (
            ["threat_model=input", "audit.canary.kind=dirac"],
            "audit: canary.kind must be 'crafted', 'blank', 'mislabelled' or 'adversarial' with "
            "threat_model = 'input', got 'dirac'.",
        ),
        (
            ["threat_model=input", "audit.canary.kind=blank", "audit.canary.long=true"],
            '--set audit.canary.long: This key is not used with kind = "blank"; remove it.',
        ),
        (
            ["threat_model=input", "audit.canary.kind=crafted", "audit.canary.every=0"],
            "every must be at least 1, got 0",
        ),
        (["audit.first_steps=0"], "audit.first_steps: first_steps must be at least 1, got 0."),
        (['audit.methods=["CP"]'], "got 'CP'."),
        (["audit=3"], "audit: Must be a table, got 3."),
        (["model=3"], "model: Must be a table, got 3."),
        (["seed=-1"], "seed: seed must be at least 0, got -1."),
    ],
)
def test_a_mistake_is_told_in_a_sentence_with_its_place(changes: list[str], sentence: str) -> None:
    told = refused(GOOD, *changes)
    assert sentence in told
    assert told.startswith("c.toml, ")
    assert "\n" not in told


def test_neither_noise_nor_a_target_is_a_mistake() -> None:
    assert "got neither" in refused(BEGIN + "sample_rate = 0.1\nnum_steps = 10\n")


def test_threat_models_are_those_of_the_library() -> None:
    for model in ThreatModel:
        assert parse_config(GOOD, "c.toml", [f"threat_model={model.value}"]).threat_model == model.value


def test_a_black_box_audit_is_of_many_models_unless_it_says_otherwise() -> None:
    plain = parse_config(GOOD, "c.toml", ["threat_model=black-box"]).audit
    assert isinstance(plain, ManyRunsConfig)
    assert plain.num_models == 2_000
    assert plain == parse_config(GOOD, "c.toml", ["threat_model=black-box", "audit.score=log-odds"]).audit
    one = parse_config(GOOD, "c.toml", ["threat_model=black-box", "audit.mode=one-run"]).audit
    assert one.mode == "one-run"


def test_who_trains_is_no_part_of_what_a_run_is() -> None:
    many = [parse_config(GOOD, "c.toml", ["threat_model=black-box", f"pool={kind}"]) for kind in POOLS]
    assert len({str(config.identity()) for config in many}) == 1
    assert [config.pool.kind for config in many if config.pool is not None] == POOLS


def test_a_threat_model_fills_in_its_canary() -> None:
    audit = parse_config(GOOD, "c.toml").audit
    assert audit.canary == CanaryConfig()
    assert getattr(audit, "held_out", 0) is None
    audit = parse_config(GOOD, "c.toml", ["threat_model=input"]).audit
    assert audit.canary == CraftedConfig()
    assert getattr(audit, "held_out", 0) == 128


def test_canaries_have_the_defaults_of_the_library() -> None:
    for config, canary in (
        (CraftedConfig(), Crafted()),
        (AdversarialConfig(kind="adversarial"), Adversarial()),
    ):
        assert config.model_dump(exclude={"kind"}) == asdict(canary)


def test_what_is_not_toml_is_told_with_its_line() -> None:
    told = refused('output = "a"\nmodel = = 3\n')
    assert told.startswith("c.toml is not valid TOML: ")
    assert "line 2" in told


@pytest.mark.parametrize("change", ["output=", "output=''", "output='  '"])
def test_an_empty_output_is_not_the_current_directory(change: str) -> None:
    assert refused(GOOD, change).startswith("c.toml, --set output: The path is empty")
    assert parse_config(GOOD, "c.toml", ["output=."]).output == "."


@pytest.mark.parametrize("change", ["num_steps", "=3", ".a=3", "output.a=3"])
def test_a_change_that_cannot_be_made_is_refused(change: str) -> None:
    assert repr(change) in refused(GOOD, change)


@pytest.mark.parametrize(
    ("change", "value"),
    [("output=a b", "a b"), ('output="quoted"', "quoted"), ("output=runs/a", "runs/a")],
)
def test_a_changed_text_needs_no_quotes(change: str, value: str) -> None:
    assert parse_config(GOOD, "c.toml", [change]).output == value


def test_lines_are_found_in_dotted_keys_and_inline_tables() -> None:
    text = (
        'output = "o"\nmodel.name = "mlp"\nmodel.hidden = [-1]\ndata = {name = "digits", num_examples = 0}\n'
    )
    told = refused(text + "[training]\nnoise_multiplier = 1\nsample_rate = 1\nnum_steps = 1\n").splitlines()
    assert [line.split(":")[0].strip() for line in told[1:]] == [
        "line 3, model.hidden",
        "line 4, data.num_examples",
    ]


def test_where_a_run_is_kept_is_not_part_of_what_it_is() -> None:
    def identity(*changes: str) -> dict[str, Any]:
        return parse_config(GOOD, "c.toml", changes).identity()

    assert identity("output=elsewhere", "checkpoint_seconds=1") == identity()
    assert identity("seed=1") != identity()


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("x = " + "1" * 5000, "A number in c.toml has too many digits."),
        ("x = 0x" + "f" * 9000, "Whole numbers in c.toml must be at most 2^128."),
        ("x = " + "[" * 3000 + "]" * 3000, "c.toml may have at most 20 levels of tables and lists."),
        (".".join("x" * 3000) + " = 1", "c.toml may have at most 20 levels of tables and lists."),
        # a pattern that tries every way to cut the line in pieces would not end before the sun does
        ("x = '''\n" + "a" * 100 + "\n'''", "c.toml, line 2, x: Unknown key"),
    ],
)
def test_what_would_be_too_much_for_the_rest_is_refused(more: str, sentence: str) -> None:
    assert refused(f"\n{more}\n{GOOD}").startswith(sentence)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            ["training=0x" + "f" * 9000, "training.num_steps=1"],
            "Whole numbers in --set must be at most 2^128",
        ),
        (["training.num_steps=100000000000"], "num_steps must be at most 10,000,000, got 100000000000."),
        (["training.noise_multiplier=1" + "0" * 400], "must be at most 2^128"),
        (["pool=nothing"], "Must be one of 'serial', 'processes', 'ray', got 'nothing'"),
    ],
)
def test_a_value_that_cannot_be_is_refused(changes: list[str], sentence: str) -> None:
    assert sentence in refused(GOOD, *changes)


def test_a_config_of_many_megabytes_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(b"#" * 1_000_001)
    with pytest.raises(InputError, match="is too large for a config: it may have at most 1,000,000 bytes"):
        load_config(tmp_path / "c.toml")
    with pytest.raises(InputError, match="/dev/zero is a pipe or a device, not a file"):
        load_config("/dev/zero")
