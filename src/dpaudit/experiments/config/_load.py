"""Load a config from a TOML file; report all of its errors at once, each with its line number.

The file is untrusted: numbers and nesting that other code cannot handle are rejected. Pydantic errors are
translated into dpaudit's own sentences.
"""

from __future__ import annotations

import copy
import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dpaudit._interrupts import raise_if_machine
from dpaudit._io import open_file
from dpaudit.errors import InputError
from dpaudit.experiments.config._config import Config

KeyPath: TypeAlias = tuple[str, ...]
Mistake: TypeAlias = tuple[KeyPath, str]

_LARGEST_FILE = 1_000_000  # bytes
_MAX_DEPTH = 20
_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "finite_number": "a finite number",
}
_TABLE = re.compile(r"^\s*\[([^\[\]]+)\]\s*(?:#.*)?$")
_PART = r"""(?:[\w-]+|"[^"]*"|'[^']*')"""
# dots between parts are mandatory: otherwise a long line of letters causes catastrophic backtracking
_KEY = re.compile(rf"^\s*({_PART}(?:\s*\.\s*{_PART})*)\s*=")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config in this file, with ``overrides`` such as ``training.num_steps=50`` applied."""
    try:
        text = _content(Path(path)).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"Expected UTF-8 text in {path}: {error}.") from error
    return parse_config(text, str(path), overrides)


def _content(path: Path) -> bytes:
    try:
        with open_file(path) as file:
            content = file.read(_LARGEST_FILE + 1)
    except FileNotFoundError as error:
        raise InputError(f"Expected a config file, but {path} does not exist.") from error
    except OSError as error:
        raise_if_machine(error, f"Cannot read {path}")
        raise InputError(f"Cannot read {path}: {error.strerror or error}.") from error
    if len(content) > _LARGEST_FILE:
        raise InputError(f"Expected a config of at most {_LARGEST_FILE:,} bytes, but {path} is larger.")
    return content


def parse_config(text: str, name: str, overrides: Sequence[str] = ()) -> Config:
    """Return the config in this text; errors refer to it as ``name``."""
    raw = _parsed(text, name)
    changed = {_override(raw, override) for override in overrides}
    _require_plain(raw, name)
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        lines = _lines_of_keys(text)
        ordered = sorted(_all_mistakes(error, raw), key=lambda one: _line_of(lines, one[0]) or 0)
        sentences = [_located(path, sentence, lines, changed) for path, sentence in ordered]
    if len(sentences) == 1:
        raise InputError(f"{name}, {sentences[0]}")
    raise InputError(f"{name} has {len(sentences)} errors:\n" + "\n".join(f"  {text}" for text in sentences))


def _located(path: KeyPath, sentence: str, lines: dict[KeyPath, int], changed: set[KeyPath]) -> str:
    line = _line_of(lines, path)
    where = "--set " if path in changed else "" if line is None else f"line {line}, "
    key = f"{'.'.join(path)}: " if path else ""  # empty if the error concerns the whole config
    return f"{where}{key}{sentence}"


def _override(raw: dict[str, Any], text: str) -> KeyPath:
    """Set one value and return the path of its key."""
    key, equals, value = text.partition("=")
    path = tuple(name.strip() for name in key.split("."))
    if not equals or not all(path):
        raise InputError(f"Expected KEY=VALUE, such as training.num_steps=50, got {text!r}.")
    table: Any = raw
    for name in path[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            _require_plain(raw, "--set")  # an integer can be too long to be quoted
            raise InputError(f"Expected {name} in {_shown(text)} to be a table, but it is {_shown(table)}.")
    table[path[-1]] = _value(value.strip())
    return path


def _value(text: str) -> Any:
    """Return the value parsed as TOML, or the text unchanged if it is not valid TOML."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _parsed(text: str, name: str) -> dict[str, Any]:
    """Return the tables in this text; errors refer to it as ``name``."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"Expected TOML in {name}: {error}.") from error
    except ValueError as error:  # Python limits the digits of an integer
        raise InputError(f"Expected numbers with fewer digits in {name}.") from error
    except RecursionError as error:
        raise InputError(f"Expected at most {_MAX_DEPTH} levels of tables and lists in {name}.") from error


def _require_plain(raw: dict[str, Any], name: str) -> None:
    """Raise on numbers and nesting depths that would otherwise fail where they are first used."""
    level: list[Any] = [raw]
    for _ in range(_MAX_DEPTH):
        if any(isinstance(value, int) and abs(value) > 2**128 for value in level):
            raise InputError(f"Expected whole numbers up to 2^128 in {name}.")
        level = [inner for value in level for inner in _inside(value)]
    if level:
        raise InputError(f"Expected at most {_MAX_DEPTH} levels of tables and lists in {name}.")


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _lines_of_keys(text: str) -> dict[KeyPath, int]:
    """Return the line number of every table and key; keys of an inline table share its line."""
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _TABLE.match(line):
            table = _split(header[1])
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            lines.setdefault((*table, *_split(key[1])), number)
    return lines


def _line_of(lines: dict[KeyPath, int], path: Sequence[str]) -> int | None:
    """Return the line number of a key or else of its innermost table; None if neither is in the file."""
    for length in range(len(path), 0, -1):
        if tuple(path[:length]) in lines:
            return lines[tuple(path[:length])]
    return None


def _split(dotted: str) -> KeyPath:
    """Return the parts of a dotted key, as parsed by ``tomllib``."""
    try:
        nested = tomllib.loads(f"{dotted} = 0")
    except tomllib.TOMLDecodeError:  # a line of a multi-line string that only looks like a key
        return ()
    names: list[str] = []
    value: object = nested
    while isinstance(value, dict):
        [(name, value)] = value.items()
        names.append(name)
    return tuple(names)


def _all_mistakes(error: ValidationError, raw: Mapping[str, Any]) -> list[Mistake]:
    """Return each mistake with the path of its key.

    Pydantic does not check the rest of a table whose tag is unknown. A known tag is therefore substituted
    while the rest is checked; keys that are unknown or missing only under that tag are not reported.
    """
    mistakes = [_mistake(detail, raw) for detail in error.errors(include_url=False)]
    trial = copy.deepcopy(dict(raw))
    replaced: set[KeyPath] = set()
    while tags := [detail for detail in error.errors(include_url=False) if _is_tag_of_table(detail, trial)]:
        replaced |= {_replace_tag(trial, detail) for detail in tags}
        try:
            Config.model_validate(trial)
            break
        except ValidationError as next_error:
            error = next_error
        mistakes += [_mistake(detail, trial) for detail in _fair_errors(error, trial, replaced)]
    return list(dict.fromkeys(mistakes))


def _fair_errors(
    error: ValidationError, trial: Mapping[str, Any], replaced: set[KeyPath]
) -> Iterator[ErrorDetails]:
    """Yield the errors in tables with a substituted tag that do not come from the substitution."""
    for detail in error.errors(include_url=False):
        path = _key_path(detail["loc"], trial)
        is_guessed = any(path[: len(table)] == table for table in replaced)
        is_unfair = detail["type"] == "missing" or (
            detail["type"] == "extra_forbidden" and path[-1:] and path[-1] in _keys_of_any(path[:-1])
        )
        if is_guessed and not is_unfair:
            yield detail


def _is_tag_of_table(error: ErrorDetails, trial: Mapping[str, Any]) -> bool:
    """Return whether an unknown tag is in a table; a bare tag has no other keys to check."""
    if error["type"] != "union_tag_invalid":
        return False
    table: Any = trial
    for name in _key_path(error["loc"], trial):
        table = table.get(name) if isinstance(table, dict) else None
    return isinstance(table, dict)


def _replace_tag(trial: dict[str, Any], error: ErrorDetails) -> KeyPath:
    """Replace an unknown tag with the closest known one; return the path of its table."""
    *table, key = _unknown_tag(_key_path(error["loc"], trial), error)[0]
    tags = re.findall(r"'([^']*)'", error["ctx"]["expected_tags"])
    near = difflib.get_close_matches(error["ctx"]["tag"], tags, n=1, cutoff=0.0)
    inner: Any = trial
    for name in table:
        inner = inner[name]
    inner[key] = (near or tags)[0]
    return tuple(table)


def _mistake(error: ErrorDetails, raw: Mapping[str, Any]) -> Mistake:
    path = _key_path(error["loc"], raw)
    kind, got = error["type"], error["input"]
    if kind == "missing":
        return path, "Expected a value, got none."
    if kind == "extra_forbidden":
        return path, _unknown_key(path, error["loc"], raw)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _unknown_tag(path, error)
    if kind == "literal_error":
        return path, f"Expected {error['ctx']['expected']}, got {_shown(got)}."
    if kind in _TYPES:
        return path, f"Expected {_TYPES[kind]}, got {_shown(got)}."
    return path, error["msg"].removeprefix("Value error, ")


def _shown(value: object, longest: int = 100) -> str:
    """Return the repr of a value, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= longest else f"{text[:longest]}..."


def _unknown_key(path: KeyPath, loc: Sequence[str | int], raw: Mapping[str, Any]) -> str:
    """Return the error message for a key that its table does not have."""
    if path[-1] in _keys_of_any(path[:-1]):
        return f"This key is not used{_tag_of(path[:-1], raw)}; remove it."
    return f"Unknown key; {_suggestion(loc)}"


def _unknown_tag(path: KeyPath, error: ErrorDetails) -> Mistake:
    """Return the mistake for an unknown or missing tag."""
    context = error["ctx"]
    key = context["discriminator"].strip("'")
    key = "mode" if key.endswith("()") else key  # the only discriminator that is a function
    if error["type"] == "union_tag_not_found":
        if not isinstance(error["input"], Mapping):
            return path, f"Expected a table, got {_shown(error['input'])}."
        return (*path, key), "Expected a value, got none."
    got, tags = context["tag"], context["expected_tags"]
    near = difflib.get_close_matches(got, re.findall(r"'([^']*)'", tags), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return (*path, key), f"Expected one of {tags}, got {_shown(got)}{hint}"


def _key_path(loc: Sequence[str | int], raw: Mapping[str, Any]) -> KeyPath:
    """Return the keys as in the file, without the tags that pydantic inserts between them."""
    path: list[str] = []
    value: Any = raw
    for index, name in enumerate(loc):
        inside = isinstance(value, Mapping) and name in value
        if inside:
            value = value[name]
        if inside or (index == len(loc) - 1 and isinstance(value, Mapping)):
            path.append(str(name))
    return tuple(path)


def _suggestion(loc: Sequence[str | int]) -> str:
    keys = _keys(Config, [str(name) for name in loc[:-1]])
    near = difflib.get_close_matches(str(loc[-1]), keys, n=1, cutoff=0.75)
    return f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(keys)}."


def _keys(section: type[BaseModel], path: Sequence[str]) -> list[str]:
    """Return the keys of the table at this path, which consists of fields and tags."""
    sections = [section]
    for name in path:
        inner = [
            inner_section
            for s in sections
            if name in s.model_fields
            for inner_section in _sections(s.model_fields[name])
        ]
        sections = inner or [s for s in sections if name in _names(s)] or sections
    return list(sections[0].model_fields)


def _keys_of_any(path: Sequence[str]) -> set[str]:
    """Return the keys of all tables allowed at this path, regardless of tag."""
    sections: list[type[BaseModel]] = [Config]
    for name in path:
        sections = [
            inner_section
            for s in sections
            if name in s.model_fields
            for inner_section in _sections(s.model_fields[name])
        ]
    return {key for section in sections for key in section.model_fields}


def _tag_of(path: Sequence[str], raw: Mapping[str, Any]) -> str:
    """Return the tag of the table at this path as part of a sentence: `` with name = "mlp"``."""
    table: Any = raw
    for name in path:
        table = table.get(name, {})
    tags = [f' with {key} = "{table[key]}"' for key in ("name", "mode", "kind") if key in table]
    return tags[0] if tags else " here"


def _sections(field: Any) -> list[type[BaseModel]]:
    """Return the section types that a field accepts."""

    def inside(hint: Any) -> list[type[BaseModel]]:
        if isinstance(hint, type) and issubclass(hint, BaseModel):
            return [hint]
        return [section for argument in get_args(hint) for section in inside(argument)]

    return inside(field.annotation)


def _names(section: type[BaseModel]) -> list[str]:
    """Return the tags that select this section."""
    fields = (section.model_fields[key] for key in ("name", "mode", "kind") if key in section.model_fields)
    return [tag for field in fields for tag in get_args(field.annotation)]
