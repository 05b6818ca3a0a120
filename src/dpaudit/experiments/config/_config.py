"""The config of an experiment: its tables together, and how it is loaded from a TOML file.

``_OPTIONS`` lists the modes and canaries of each threat model. The file is untrusted: numbers and nesting
that other code cannot handle are rejected. All errors are reported at once, with their line numbers.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import ErrorDetails

from dpaudit import _validate
from dpaudit._io import open_file, reading
from dpaudit.canaries import ThreatModel
from dpaudit.errors import InputError, quoted
from dpaudit.experiments.config import _schema as schema

KeyPath: TypeAlias = tuple[str, ...]
Mistake: TypeAlias = tuple[KeyPath, str]

_LARGEST_FILE = 1_000_000  # bytes
_TAGS = "name", "mode", "kind"  # keys that select a table
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
_FINAL_MODEL_KEYS = "score", "initialization", "num_guesses"


@dataclass(frozen=True)
class _AuditOptions:
    """Modes, canaries and defaults of a threat model."""

    modes: tuple[type[schema.Section], ...]
    canaries: tuple[type[schema.Section], ...]
    unused: tuple[str, ...]
    """Keys of its modes that apply only to other threat models."""
    defaults: Mapping[str, Any]
    """Defaults of keys; ``held_out`` is the number of held-out examples."""


def _tags(*sections: type[BaseModel]) -> list[str]:
    """Return the tags that select one of these tables."""
    fields = [section.model_fields.get(key) for section in sections for key in _TAGS]
    return [tag for field in fields if field is not None for tag in get_args(field.annotation)]


_OPTIONS: Mapping[str, _AuditOptions] = {
    ThreatModel.GRADIENT.value: _AuditOptions(
        (schema.OneRunConfig, schema.PaperConfig, schema.EndToEndConfig),
        (schema.CanaryConfig,),
        unused=("held_out", *_FINAL_MODEL_KEYS),
        defaults={"canary": schema.CanaryConfig()},
    ),
    ThreatModel.INPUT.value: _AuditOptions(
        (schema.OneRunConfig, schema.PaperConfig),
        (schema.CraftedConfig, schema.ExampleConfig, schema.AdversarialConfig),
        unused=_FINAL_MODEL_KEYS,
        defaults={"canary": schema.CraftedConfig(), "held_out": 128},
    ),
    ThreatModel.BLACK_BOX.value: _AuditOptions(
        (schema.ManyRunsConfig, schema.OneRunConfig),
        (schema.ExampleConfig, schema.ClipBkdConfig, schema.GivenConfig),
        unused=("first_steps", "stop_on_violation"),
        defaults={
            "canary": schema.ExampleConfig(kind="mislabelled"),
            "held_out": 128,
            "score": "log-odds",
            "initialization": schema.RandomWeightsConfig(),
        },
    ),
}


def _with_mode(raw: Any, info: ValidationInfo) -> Any:
    """Return the audit table; the default mode of black-box audits is ``many-runs``."""
    if info.data.get("threat_model") != ThreatModel.BLACK_BOX.value:
        return raw
    if isinstance(raw, schema.OneRunConfig) and not raw.model_fields_set:  # the file has no audit table
        return schema.ManyRunsConfig()
    return {"mode": "many-runs", **raw} if isinstance(raw, dict) else raw


def _with_defaults(audit: Any, info: ValidationInfo) -> Any:
    """Return the audit with the defaults of its threat model; raise if the two are incompatible."""
    name = info.data.get("threat_model")
    if name is None:  # its own error is reported
        return audit
    options = _OPTIONS[name]
    if type(audit) not in options.modes:
        raise InputError(
            f"mode must be {_validate.either(_tags(*options.modes))} with threat_model = {name!r}, got "
            f"{audit.mode!r}."
        )
    if audit.canary is not None and not isinstance(audit.canary, options.canaries):
        raise InputError(
            f"canary.kind must be {_validate.either(_tags(*options.canaries))} with threat_model = "
            f"{name!r}, got {audit.canary.kind!r}."
        )
    _require_no_unused(name, options, audit)
    missing = {key: value for key, value in options.defaults.items() if getattr(audit, key, "") is None}
    return audit.model_copy(update=missing)


def _require_no_unused(name: str, options: _AuditOptions, audit: Any) -> None:
    """Raise on a key that applies only to other threat models."""
    unused = options.unused
    if name == ThreatModel.BLACK_BOX.value and isinstance(audit, schema.OneRunConfig):
        unused = (*unused, "methods")  # it always reports the same two bounds
    for key in unused:
        if value := getattr(audit, key, None):
            shown = getattr(value, "kind", value)
            raise InputError(f"{key} cannot be used with threat_model = {name!r}, got {key} = {shown}.")


def _conflicts(config: Config) -> Iterator[str]:
    """Yield sentences on tables that are inconsistent with each other."""
    if isinstance(config.model, schema.FunctionModel):
        yield from _function_conflicts(config)
    if config.threat_model == ThreatModel.BLACK_BOX.value:
        yield from _black_box_conflicts(config)
    elif config.training.noise_multiplier == 0:
        yield (
            "training.noise_multiplier must be positive, got 0: without noise nothing is claimed; only "
            "threat_model = 'black-box' reports a bound without a claim."
        )
    if config.pool is not None and not isinstance(config.audit, schema.ManyRunsConfig):
        yield f"pool cannot be used with mode = {config.audit.mode!r}, which trains a single model."


def _function_conflicts(config: Config) -> Iterator[str]:
    if not isinstance(config.audit, schema.ManyRunsConfig):
        yield "A training function needs threat_model = 'black-box' and mode = 'many-runs'."
    elif isinstance(config.audit.initialization, schema.PretrainedConfig):
        yield "A training function builds its own models; remove the pre-trained initialization."
    if isinstance(config.audit.canary, schema.ClipBkdConfig):
        yield "canary.kind = 'clip-bkd' needs the model, which a training function does not provide."
    if config.training.fault is not None:
        yield "training.fault cannot be used with a training function: no fault can be injected into it."


def _black_box_conflicts(config: Config) -> Iterator[str]:
    if isinstance(config.training.fault, schema.ShuffledBatchesConfig):
        yield "The fault 'shuffled-batches' cannot be used with threat_model = 'black-box'."
    canary = config.audit.canary
    sources = [key for key in ("index", "file") if getattr(canary, key, None) is not None]
    if isinstance(config.audit, schema.ManyRunsConfig):
        if isinstance(canary, schema.GivenConfig):
            yield from _given_conflicts(canary, sources)
        return
    if sources or getattr(canary, "kind", None) not in ("mislabelled", "example"):
        yield (
            "canary.kind must be 'mislabelled', or 'example' without an index and a file, with mode = "
            "'one-run', which needs many different canaries."
        )
    if config.training.noise_multiplier == 0:
        yield "noise_multiplier = 0 needs mode = 'many-runs'."


def _given_conflicts(canary: schema.GivenConfig, sources: list[str]) -> Iterator[str]:
    if len(sources) != 1:
        yield "canary.kind = 'example' needs exactly one of index and file."
    if canary.file is not None and canary.target is None:
        yield "canary.file needs a target, the class of the canary."


class Config(schema.Section):
    """Config of one ``dpaudit run``.

    If ``seed`` is omitted, the operating system provides one. ``output`` is the run's directory.
    """

    output: schema.PathText
    seed: schema.NonNegativeInt | None = None
    threat_model: Literal["gradient", "input", "black-box"] = "gradient"
    device: str = "cpu"
    checkpoint_seconds: schema.NonNegative = 30.0
    model: schema.ModelConfig
    data: schema.DataConfig
    training: schema.TrainingConfig
    audit: Annotated[schema.AuditConfig, AfterValidator(_with_defaults), BeforeValidator(_with_mode)] = Field(
        schema.OneRunConfig(), validate_default=True
    )
    pool: schema.PoolConfig | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for sentence in _conflicts(self):
            raise InputError(sentence)
        return self

    def identity(self) -> dict[str, Any]:
        """Return the values that identify a run: all except output, checkpoint interval and pool."""
        return self.model_dump(mode="json", exclude={"output", "checkpoint_seconds", "pool"})


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config in a file.

    Args:
        path: The file, in TOML.
        overrides: Values that replace those of the file, such as "training.num_steps=50".

    Returns:
        The config with its defaults.

    Raises:
        InputError: The file cannot be read or has errors; all of them are listed, with their lines.

    Example:
        ``load_config("config.toml", ["seed=1"])``

    """
    if not Path(path).exists():
        raise InputError(f"{path} does not exist.")
    with reading(Path(path)), open_file(path) as file:
        content = file.read(_LARGEST_FILE + 1)
    if len(content) > _LARGEST_FILE:
        raise InputError(f"{path} is too large for a config: it may have at most {_LARGEST_FILE:,} bytes.")
    try:
        return parse_config(content.decode(), str(path), overrides)
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}.") from error


def parse_config(text: str, name: str, overrides: Sequence[str] = ()) -> Config:
    """Return the config in a text.

    Args:
        text: The config, in TOML.
        name: How errors call it.
        overrides: As in :func:`load_config`.

    Returns:
        The config with its defaults.

    Raises:
        InputError: The text has errors; all are listed.

    Example:
        ``parse_config(example("digits"), "digits.toml")``

    """
    raw = _parsed(text, name)
    changed = {_override(raw, override) for override in overrides}
    _require_plain(raw, name)
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        lines = _lines_of_keys(text)
        mistakes = (_mistake(detail, raw) for detail in error.errors(include_url=False))
        ordered = sorted(dict.fromkeys(mistakes), key=lambda mistake: _line_of(lines, mistake[0]) or 0)
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
        raise InputError(f"--set needs KEY=VALUE, such as training.num_steps=50, got {text!r}.")
    table: Any = raw
    for name in path[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            _require_plain(raw, "--set")  # an integer can be too long to be quoted
            raise InputError(f"{name} in {quoted(text)} must be a table, but it is {quoted(table)}.")
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
        raise InputError(f"{name} is not valid TOML: {error}.") from error
    except ValueError as error:  # Python limits the digits of an integer
        raise InputError(f"A number in {name} has too many digits.") from error
    except RecursionError as error:
        raise InputError(f"{name} may have at most {_MAX_DEPTH} levels of tables and lists.") from error


def _require_plain(raw: dict[str, Any], name: str) -> None:
    """Raise on numbers and nesting depths that would otherwise fail where they are first used."""
    level: list[Any] = [raw]
    for _ in range(_MAX_DEPTH):
        if any(isinstance(value, int) and abs(value) > 2**128 for value in level):
            raise InputError(f"Whole numbers in {name} must be at most 2^128.")
        tables = [list(value.values()) if isinstance(value, dict) else value for value in level]
        level = [inner for table in tables if isinstance(table, list) for inner in table]
    if level:
        raise InputError(f"{name} may have at most {_MAX_DEPTH} levels of tables and lists.")


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


def _mistake(error: ErrorDetails, raw: Mapping[str, Any]) -> Mistake:
    path = _key_path(error["loc"], raw)
    kind, got = error["type"], error["input"]
    if kind == "missing":
        return path, "This key is required."
    if kind == "extra_forbidden":
        return path, _unknown_key(path, error["loc"], raw)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _unknown_tag(path, error)
    if kind == "literal_error":
        return path, f"Must be {error['ctx']['expected']}, got {quoted(got)}."
    if kind in _TYPES:
        return path, f"Must be {_TYPES[kind]}, got {quoted(got)}."
    return path, error["msg"].removeprefix("Value error, ")


def _unknown_key(path: KeyPath, loc: Sequence[str | int], raw: Mapping[str, Any]) -> str:
    """Return the error message for a key that its table does not have."""
    *outer, name = path
    if name in _keys_at(outer):
        table: Any = raw
        for key in outer:
            table = table.get(key, {})
        tags = [f' with {key} = "{table[key]}"' for key in _TAGS if key in table]
        return f"This key is not used{tags[0] if tags else ' here'}; remove it."
    keys = _keys_at(outer, tags=[str(tag) for tag in loc])
    hint = _validate.suggestion(name, keys, 0.75) or f" Known keys: {', '.join(keys)}."
    return f"Unknown key.{hint}"


def _unknown_tag(path: KeyPath, error: ErrorDetails) -> Mistake:
    """Return the mistake for an unknown or missing tag."""
    context = error["ctx"]
    key = context["discriminator"].strip("'")
    key = "mode" if key.endswith("()") else key  # the only discriminator that is a function
    if error["type"] == "union_tag_not_found":
        if not isinstance(error["input"], Mapping):
            return path, f"Must be a table, got {quoted(error['input'])}."
        return (*path, key), "This key is required."
    got, tags = context["tag"], context["expected_tags"]
    hint = _validate.suggestion(got, re.findall(r"'([^']*)'", tags))
    return (*path, key), f"Must be one of {tags}, got {quoted(got)}.{hint}"


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


def _keys_at(path: Sequence[str], tags: Collection[str] = ()) -> list[str]:
    """Return the keys of all tables allowed at this path, or of those that one of ``tags`` selects."""
    sections: list[type[BaseModel]] = [Config]
    for name in path:
        fields = (section.model_fields[name] for section in sections if name in section.model_fields)
        sections = [inner for field in fields for inner in _sections(field.annotation)]
    selected = [section for section in sections if {*_tags(section)} & {*tags}]
    return list(dict.fromkeys(key for section in selected or sections for key in section.model_fields))


def _sections(hint: Any) -> list[type[BaseModel]]:
    """Return the tables that a type hint accepts."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return [hint]
    return [section for argument in get_args(hint) for section in _sections(argument)]
