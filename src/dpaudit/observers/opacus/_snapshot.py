"""The state of a training step in PyTorch: what it reads and writes, saved and restored in place.

:class:`TorchSnapshot` saves models, optimizers and other objects with all random number generators, and
restores them as often as needed. :func:`step_objects` finds the objects that a step function refers to, and
:func:`state_digests` makes what they hold comparable.
"""

from __future__ import annotations

import hashlib
import inspect
import random
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    MutableSet,
)
from itertools import islice
from types import CellType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (dict, list, set, deque)
_MOST_NUMBERS = 2**22  # of an array that is compared; larger ones are data
_MOST_ENTRIES = 4096  # of a variable that is compared
_MOST_NESTED = 4  # containers in containers, or objects in objects
# of modules: what torch and Opacus keep there
_OWN_ATTRIBUTES = {"_parameters", "_modules", "_buffers", "activations", "max_batch_len"}


class TorchSnapshot:
    """Objects and random number generators, saved when created; ``restore`` undoes all later changes."""

    def __init__(self, roots: Mapping[str, Any], step: Callable[..., Any]) -> None:
        self._undo: list[Callable[[], object]] = []
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # so that no identity is used twice
        self._generators: list[Any] = []
        for value in (*roots.values(), *variables(step).values()):
            self._save(value, is_root=True)
        for function in _functions(step):
            self._save_container(vars(function))
        self._undo.append(_rebind(step))
        self._random = self.random_state()

    def restore(self) -> None:
        """Restore all objects and random number generators."""
        with torch.no_grad():
            for undo in self._undo:
                undo()
        self.set_random_state(self._random)

    def random_state(self) -> list[Any]:
        """Return the states of all random number generators."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        own = [_generator_state(generator) for generator in self._generators]
        return [torch.get_rng_state(), cuda, np.random.get_state(), random.getstate(), own]  # noqa: NPY002

    def random_digest(self) -> tuple[tuple[str, str], ...]:
        """Return what identifies the states of all random number generators."""
        return tuple(_digests("", self.random_state()))

    def set_random_state(self, state: list[Any]) -> None:
        """Set the states of all random number generators."""
        torch.set_rng_state(state[0])
        if state[1]:
            torch.cuda.set_rng_state_all(state[1])
        np.random.set_state(state[2])  # noqa: NPY002
        random.setstate(state[3])
        for generator, own in zip(self._generators, state[4], strict=True):
            _set_generator_state(generator, own)

    def _save(self, value: Any, *, is_root: bool = False) -> None:
        """Save a value and, if it is a container or a known kind of object, everything in it."""
        if isinstance(value, _PLAIN) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random):
            self._generators.append(value)
        elif isinstance(value, Tensor):
            self._save_tensor(value)
        elif isinstance(value, np.ndarray):
            self._undo.append(_copier(value, value.copy()))
        elif isinstance(value, MutableMapping | MutableSequence | MutableSet) and isinstance(
            value, _CONTAINERS
        ):
            self._save_container(value)
        elif isinstance(value, tuple):
            for part in value:
                self._save(part)
        elif hasattr(value, "__dict__") and (is_root or _holds_state(value)) and not _is_code(value):
            self._save_container(vars(value))

    def _save_tensor(self, tensor: Tensor) -> None:
        if tensor.grad_fn is None:  # others are results of an earlier step, which nothing writes to
            self._undo.append(_copier(tensor.detach(), tensor.detach().clone()))
        if tensor.is_leaf:
            gradient = tensor.grad
            self._save(gradient)
            self._undo.append(lambda: setattr(tensor, "grad", gradient))
        self._save_container(vars(tensor))

    def _save_container(self, container: Any) -> None:
        before = container.copy()
        for part in list(container.values()) if isinstance(container, dict) else list(container):
            self._save(part)
        self._undo.append(lambda: _refill(container, before))


def _refill(container: Any, before: Any) -> None:
    container.clear()
    if isinstance(container, list | deque):
        container.extend(before)
    else:
        container.update(before)


def _copier(target: Any, source: Any) -> Callable[[], object]:
    if isinstance(target, Tensor):
        return lambda: target.copy_(source)
    return lambda: np.copyto(target, source)


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return (
        generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()
    )


def _set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _holds_state(value: Any) -> bool:
    return isinstance(value, nn.Module) or has_state_dict(value)


def has_state_dict(value: Any) -> bool:
    """Return whether an object can save its state, as models, optimizers and schedulers can."""
    return not _is_code(value) and callable(getattr(value, "state_dict", None))


def _is_code(value: Any) -> bool:
    return inspect.ismodule(value) or inspect.isclass(value) or inspect.isroutine(value)


def _rebind(step: Callable[..., Any]) -> Callable[[], None]:
    """Return a function that restores variables outside of ``step`` that the step assigns to."""
    cells = [
        (cell, cell.cell_contents)
        for function in _functions(step)
        for cell in function.__closure__ or ()
        if _is_filled(cell)
    ]
    scopes = [(function.__globals__, _globals(function)) for function in _functions(step)]

    def restore() -> None:
        for cell, value in cells:
            cell.cell_contents = value
        for scope, names in scopes:
            scope.update(names)

    return restore


def variables(step: Callable[..., Any]) -> dict[str, Any]:
    """Return the variables that the step refers to, by name, and the attributes of its owner."""
    found: dict[str, Any] = {}
    owners = [getattr(step, "__self__", None)]
    if not inspect.isroutine(step):
        owners += [step, *getattr(step, "args", ()), *getattr(step, "keywords", {}).values()]
    for function in _functions(step):
        found = _globals(function) | found
        found |= {f"{function.__name__}.{name}": value for name, value in _kept(function).items()}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if _is_filled(cell):
                found.setdefault(name, cell.cell_contents)
    owners.append(found.get("self"))
    for owner in owners:
        if hasattr(owner, "__dict__") and not _is_code(owner):
            found = dict(vars(owner)) | found
    level, opened = found, set[int]()
    for _ in range(_MOST_NESTED):
        objects: dict[int, tuple[str, Any]] = {}  # each once: they may refer to each other
        for name, value in level.items():
            if id(value) not in opened and _is_plain_object(value):
                objects.setdefault(id(value), (name, value))
        opened |= set(objects)
        level = {
            f"{name}.{key}": part for name, value in objects.values() for key, part in vars(value).items()
        }
        found = level | found
    return {name: value for name, value in found.items() if not _is_code(value)}


def _is_plain_object(value: Any) -> bool:
    """Return whether an object is of a class of the user, without a ``state_dict``."""
    library = type(value).__module__.partition(".")[0]
    is_object = hasattr(value, "__dict__") and not _is_code(value) and not has_state_dict(value)
    return is_object and library not in {"builtins", "numpy", "opacus", "torch"}


def _globals(function: FunctionType) -> dict[str, Any]:
    """Return the global variables of a function that it refers to."""
    scope = function.__globals__
    return {name: scope[name] for name in function.__code__.co_names if name in scope}


def _kept(function: FunctionType) -> dict[str, Any]:
    """Return what a function keeps between calls: its attributes and the defaults of its arguments."""
    defaults = {f"defaults.{index}": value for index, value in enumerate(function.__defaults__ or ())}
    return {**vars(function), **defaults, **(function.__kwdefaults__ or {})}


def _functions(step: Any) -> list[FunctionType]:
    """Return the function of the step and those of the same module that it calls."""
    waiting, found, home = [step], list[FunctionType](), None
    while waiting:
        inner = waiting.pop()
        inner = getattr(inner, "func", inner)  # partial
        inner = inspect.unwrap(getattr(inner, "__func__", inner))
        if not isinstance(inner, FunctionType) or inner in found:
            continue
        home = inner.__globals__ if home is None else home
        if inner.__globals__ is home:
            found.append(inner)
            cells = [cell.cell_contents for cell in inner.__closure__ or () if _is_filled(cell)]
            waiting += [*_globals(inner).values(), *cells]
    return found


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # raises if the variable is not assigned yet
    except ValueError:
        return False
    return True


def step_objects(step: Callable[..., Any]) -> dict[str, Any]:
    """Return the objects with a state that the step refers to: models, optimizers, schedulers, averages."""
    return {name: value for name, value in _nested(variables(step)) if has_state_dict(value)}


def step_weights(step: Callable[..., Any], objects: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return trained tensors that the step refers to, or that optimizers among ``objects`` update.

    They need not belong to a module.
    """
    found = {name: value for name, value in _nested(variables(step)) if isinstance(value, Tensor)}
    found = {name: value for name, value in found.items() if value.requires_grad and value.is_leaf}
    for name, value in objects.items():
        for number, group in enumerate(getattr(value, "param_groups", ())):
            parts = enumerate(group["params"])
            found |= {f"{name}.param_groups.{number}.{index}": part for index, part in parts}
    return found


def variable_digests(step: Callable[..., Any], model: Any, compared: Collection[int]) -> dict[str, str]:
    """Return a digest of each variable of the step and attribute of the model that holds data, by name.

    ``compared`` are the identities of those that are compared in another way.
    """
    found = dict[str, str]()
    for name, value in {**variables(step), **dict(_attributes(model))}.items():
        if id(value) in compared or isinstance(value, nn.Module) or has_state_dict(value):
            continue
        digests = list(islice(_data_digests(value, _MOST_NESTED), _MOST_ENTRIES + 1))
        if digests and len(digests) <= _MOST_ENTRIES:
            found[name] = hashlib.blake2b(repr(digests).encode(), digest_size=16).hexdigest()
    return found


def _data_digests(value: Any, depth: int) -> Iterator[str]:
    """Yield digests of the numbers and arrays in a value, which may be large or contain itself."""
    if isinstance(value, Mapping):
        value = [part for pair in value.items() for part in pair]
    elif isinstance(value, set | frozenset):
        value = sorted(map(repr, value))
    if isinstance(value, list | tuple | deque):
        yield f"{len(value)} entries"
        for part in value if depth else ():
            yield from _data_digests(part, depth - 1)
    elif isinstance(value, np.ndarray):
        if value.size <= _MOST_NUMBERS:
            yield from (text for _, text in _digests("", value))
    elif isinstance(value, Tensor):
        if value.layout is torch.strided and value.device.type != "meta" and value.numel() <= _MOST_NUMBERS:
            yield digest(value)
    elif isinstance(value, _PLAIN):
        yield repr(value)


def _attributes(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield what modules keep besides their state: attributes, and buffers that are not saved."""
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if type(module).__module__.partition(".")[0] == "opacus":
            continue
        prefix = ".".join(part for part in ("model", *name.split(".")) if part not in ("", "_module"))
        unsaved = {key: module._buffers.get(key) for key in module._non_persistent_buffers_set}
        own = {key: value for key, value in vars(module).items() if key not in _OWN_ATTRIBUTES}
        for key, value in {**own, **unsaved}.items():
            yield f"{prefix}.{key}", value


def _nested(found: Mapping[Any, Any], prefix: str = "", depth: int = 2) -> Iterator[tuple[str, Any]]:
    """Yield named values, and those in dictionaries, lists and tuples."""
    for key, value in found.items():
        name = f"{prefix}{key}"
        yield name, value
        if depth and isinstance(value, dict | list | tuple):
            parts = value if isinstance(value, dict) else dict(enumerate(value))
            yield from _nested(parts, f"{name}.", depth - 1)


def state_digests(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the names of all numbers and tensors in an object, each with a digest of its value."""
    if has_state_dict(value):
        value = value.state_dict()
    elif hasattr(value, "__dict__") and not isinstance(value, Tensor | np.ndarray) and not _is_code(value):
        value = vars(value)
    yield from _digests(name, value)


def _digests(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _digests(f"{name}.{key}" if name else str(key), part)
    elif isinstance(value, list | tuple | deque):
        for index, part in enumerate(value):
            yield from _digests(f"{name}.{index}", part)
    elif isinstance(value, Tensor):
        yield name, digest(value)
    elif isinstance(value, np.ndarray):
        yield name, hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=16).hexdigest()
    elif isinstance(value, _PLAIN):
        yield name, repr(value)


def digest(tensor: Tensor) -> str:
    """Return a digest of the bytes of a tensor."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(raw.tobytes(), digest_size=16).hexdigest()
