"""The state of a training step in PyTorch: saved and restored in place, and made comparable.

:class:`TorchSnapshot` saves models, optimizers and other objects with all random number generators, and
restores them as often as needed. :func:`state_digests` names everything that an object holds.
"""

from __future__ import annotations

import hashlib
import inspect
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class TorchSnapshot:
    """Objects and random number generators, saved when created; ``restore`` undoes all later changes.

    Tensors among the ``ignored`` ones are not saved.
    """

    def __init__(self, roots: Iterable[Any], ignored: Iterable[Tensor] = ()) -> None:
        self._undo: list[Callable[[], object]] = []
        # held, so that no identity is used twice
        self._saved: dict[int, Any] = {id(tensor): tensor for tensor in ignored}
        numpy_random: Any = np.random
        python_random: Any = random
        self._generators = [torch.default_generator, numpy_random.mtrand._rand, python_random._inst]
        if torch.cuda.is_available():
            torch.cuda.init()  # type: ignore[no-untyped-call]
            self._generators += torch.cuda.default_generators
        for root in roots:
            self._save(root, is_root=True)
        self._random = self.random_state()

    def restore(self) -> None:
        """Restore all objects and random number generators."""
        with torch.no_grad():
            for undo in self._undo:
                undo()
        self.set_random_state(self._random)

    def random_state(self) -> list[Any]:
        """Return the states of all random number generators."""
        return [read() for read, _ in map(_state_of, self._generators)]

    @property
    def has_used_randomness(self) -> bool:
        """Whether random numbers were drawn since the state was saved or restored."""
        return not all(map(_is_same_state, self.random_state(), self._random))

    def set_random_state(self, states: list[Any]) -> None:
        """Set the states of all random number generators."""
        for (_, write), state in zip(map(_state_of, self._generators), states, strict=True):
            write(state)

    def _save(self, value: Any, *, is_root: bool = False) -> None:
        """Save a value and, if it is a container or a known kind of object, everything in it."""
        if isinstance(value, _PLAIN) or id(value) in self._saved:
            return
        self._saved[id(value)] = value
        if isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random):
            self._generators.append(value)
        elif isinstance(value, Tensor):
            self._save_tensor(value)
        elif isinstance(value, np.ndarray):
            before = value.copy()
            self._undo.append(lambda: np.copyto(value, before))
        elif isinstance(value, dict | list | set | deque | tuple):
            self._save_container(value)
        elif has_state_dict(value) or (is_root and is_object(value)):
            self._save_container(vars(value))

    def _save_tensor(self, tensor: Tensor) -> None:
        if tensor.grad_fn is None:  # others are results of an earlier step, which nothing writes to
            values, before = tensor.data, tensor.detach().clone()  # without a new version for autograd
            self._undo.append(lambda: values.copy_(before))
        if tensor.is_leaf:
            gradient = tensor.grad
            self._save(gradient)
            self._undo.append(lambda: setattr(tensor, "grad", gradient))
        self._save_container(vars(tensor))

    def _save_container(self, container: Any) -> None:
        for entry in list(container.values()) if isinstance(container, dict) else list(container):
            self._save(entry)
        if isinstance(container, tuple):
            return  # its entries may change, but not the tuple
        before = container.copy()

        def refill() -> None:
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(before)

        self._undo.append(refill)


def _state_of(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Return the functions that read and write the state of a random number generator."""
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return generator.get_state, generator.set_state


def _is_same_state(first: Any, second: Any) -> bool:
    """Return whether two states of one random number generator are the same."""
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return repr(first) == repr(second)
    return all(map(np.array_equal, first, second))


def is_object(value: Any) -> bool:
    """Return whether a value has attributes that are state, unlike code."""
    is_code = inspect.ismodule(value) or inspect.isclass(value) or inspect.isroutine(value)
    return hasattr(value, "__dict__") and not is_code


def has_state_dict(value: Any) -> bool:
    """Return whether an object can save its state, as models, optimizers and schedulers can."""
    return is_object(value) and callable(getattr(value, "state_dict", None))


def attribute_digests(model: Any) -> dict[str, str]:
    """Return digests of what modules keep besides their state: attributes, and buffers that are not saved."""
    ignored = {"_parameters", "_modules", "_buffers", "activations", "max_batch_len"}  # of torch and Opacus
    digests = {}
    for path, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if type(module).__module__.partition(".")[0] == "opacus":
            continue
        prefix = ".".join(name for name in ("model", *path.split(".")) if name not in ("", "_module"))
        unsaved = {key: module._buffers.get(key) for key in module._non_persistent_buffers_set}
        for key, value in {**vars(module), **unsaved}.items():
            if key not in ignored:
                digests[f"{prefix}.{key}"] = repr(list(_digests("", value)))
    return digests


def state_digests(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the names of all numbers and tensors in an object, each with a digest of its value."""
    is_array = isinstance(value, Tensor | np.ndarray)
    is_plain_object = is_object(value) and not has_state_dict(value) and not is_array
    yield from _digests(name, vars(value) if is_plain_object else value)


def _digests(name: str, value: Any) -> Iterator[tuple[str, str]]:
    entries = _entries(value)
    if entries is not None:
        for key, entry in entries:
            yield from _digests(f"{name}.{key}" if name else str(key), entry)
    elif isinstance(value, Tensor):
        yield name, digest(value)
    elif isinstance(value, np.ndarray):
        yield name, hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest()
    elif isinstance(value, _PLAIN):
        yield name, repr(value)


def _entries(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the keys and values of a container or of the state of an object, None for other values."""
    if has_state_dict(value):
        value = value.state_dict()
    if isinstance(value, set | frozenset):
        return enumerate(sorted(map(repr, value)))
    if isinstance(value, list | tuple | deque):
        return enumerate(value)
    return value.items() if isinstance(value, Mapping) else None


def digest(tensor: Tensor) -> str:
    """Return a digest of the bytes of a tensor."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(raw.tobytes(), digest_size=16).hexdigest()
