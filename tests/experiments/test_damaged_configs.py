"""Configs of anybody: read or refused in sentences, soon."""

from __future__ import annotations

from pathlib import Path

import pytest
from damage import damaged, examples
from digits_config import digits_config
from hypothesis import given
from hypothesis import strategies as st

from dpaudit.errors import InputError
from dpaudit.experiments import Config, load_config, parse_config

TEXT = digits_config("run")
KEYS = (
    "seed",
    "output",
    "device",
    "training",
    "training.num_steps",
    "training.fault.name",
    "model",
    "model.hidden",
    "audit",
    "audit.mode",
    "audit.canary",
    "audit.canary.kind",
    "audit.initialization",
    "pool",
    "pool.kind",
    "data.num_examples",
    "data.num_test",
    "training.delta",
    "threat_model",
    "a.b.c",
    ".".join("a" * 3000),
    "\x1b[2J",
)
VALUES = (
    "1",
    "-1",
    "0",
    "1e400",
    "nan",
    "true",
    '"x"',
    "[]",
    "{}",
    "[{}]",
    "1979-05-27",
    '"\\u0000"',
    "0x" + "f" * 9000,
    "1" * 5000,
    "[" * 2000 + "]" * 2000,
    '{name = "mlp"}',
    '{kind = "blank"}',
    "black-box",
    "~nobody/x",
)


def _read_or_refuse(text: str, changes: list[str]) -> None:
    try:
        found: object = parse_config(text, "c.toml", changes)
    except InputError as error:
        found = str(error)
    assert isinstance(found, Config | str)
    assert len(str(found)) < 10_000


@examples(80)
@given(content=damaged(TEXT.encode()))
def test_a_damaged_config_is_read_or_refused(content: bytes) -> None:
    _read_or_refuse(content.decode(errors="replace"), [])


@examples(150)
@given(st.lists(st.builds("{}={}".format, st.sampled_from(KEYS), st.sampled_from(VALUES)), max_size=4))
def test_a_strange_change_is_made_or_refused(changes: list[str]) -> None:
    _read_or_refuse(TEXT, changes)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("x = " + "1" * 5000, "Expected numbers with fewer digits in c.toml."),
        ("x = 0x" + "f" * 9000, "Expected whole numbers up to 2^128 in c.toml."),
        ("x = " + "[" * 3000 + "]" * 3000, "Expected at most 20 levels of tables and lists in c.toml."),
        (".".join("x" * 3000) + " = 1", "Expected at most 20 levels of tables and lists in c.toml."),
        # a pattern that tries every way to cut the line in pieces would not end before the sun does
        ("x = '''\n" + "a" * 100 + "\n'''", "c.toml, line 2, x: Unknown key"),
    ],
)
def test_what_would_be_too_much_for_the_rest_is_refused(more: str, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_config(f"\n{more}\n{TEXT}", "c.toml")
    assert str(caught.value).startswith(sentence)


def test_a_table_that_was_replaced_by_an_endless_number_is_refused() -> None:
    changes = ["training=0x" + "f" * 9000, "training.num_steps=1"]
    with pytest.raises(InputError, match=r"Expected whole numbers up to 2\^128 in --set"):
        parse_config(TEXT, "c.toml", changes)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("training.num_steps=100000000000", "Expected num_steps=100000000000 to be at most 10000000."),
        ("training.noise_multiplier=1" + "0" * 400, "Expected whole numbers up to 2^128"),
        ("pool=nothing", "Expected one of 'serial', 'processes', 'ray', got 'nothing'"),
    ],
)
def test_a_value_that_cannot_be_is_refused(change: str, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_config(TEXT, "c.toml", [change])
    assert sentence in str(caught.value)


def test_a_config_of_many_megabytes_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(b"#" * 1_000_001)
    with pytest.raises(InputError, match=r"at most 1,000,000 bytes, but .*c\.toml is larger"):
        load_config(tmp_path / "c.toml")


def test_an_endless_file_is_no_config() -> None:
    with pytest.raises(InputError, match="Expected /dev/zero to be a file, but it is a pipe or a device"):
        load_config("/dev/zero")
