"""Batches that differ from a given one in a single example, changed in ways that reveal faults.

The last example is changed in all of these ways, the first one in some of them.

A batch is a tree of arrays whose first dimension is the example. Extreme examples matter most: long gradients
reveal what is not clipped, zeros and other labels reveal statistics that are computed over the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dpaudit.errors import InputError
from dpaudit.observers._arrays import as_numpy, is_jax, is_torch, leaves, like, map_tree

_MIN_EXAMPLES = 3  # with fewer, those that stay the same are too few to compare
_LARGE = 1000.0  # factor that makes the gradient of an example longer than any clipping norm


@dataclass(frozen=True, kw_only=True)
class Neighbor:
    """A batch that differs from the given one in one example."""

    change: str
    """The change in words, as the end of "one example is ..."."""
    batch: Any
    size_change: int = 0
    """The number of examples that were added: 0 if one was replaced, -1 if one was removed."""
    is_finite: bool = True
    is_natural: bool = True
    """Whether all examples are unchanged ones of the batch, so that every correct step accepts it."""
    is_variant: bool = False
    """Whether it differs from another neighbor only in its label."""

    @property
    def is_resized(self) -> bool:
        """Whether the batch has another number of examples."""
        return self.size_change != 0


def batch_size(batch: Any) -> int:
    """Return the number of examples; raise if the arrays disagree or there are too few."""
    sizes = {int(leaf.shape[0]) if len(leaf.shape) else 0 for leaf in leaves(batch)}
    if len(sizes) != 1:
        raise InputError(
            f"Expected a batch of arrays with one row per example, got first dimensions {sorted(sizes)}."
        )
    size = sizes.pop()
    if size < _MIN_EXAMPLES:
        raise InputError(f"Expected a batch of at least {_MIN_EXAMPLES} examples, got {size}.")
    return size


def neighbors_of(batch: Any, *, padding: Any = None) -> Iterator[Neighbor]:
    """Yield neighboring batches, finite ones first.

    ``padding`` is the key or index in the batch of a boolean array that marks rows that are no examples. If
    given, examples are removed and added by changing the marks, so that shapes stay the same.
    """
    size = batch_size(batch)
    first, last = (0, size - 1) if padding is None else _outermost(batch[padding])
    example = _rows(batch, last)
    relabeled, *variants = list(_relabeled(batch, last)) or [example]

    def replaced(change: str, row: Any, **options: Any) -> Neighbor:
        return Neighbor(change=change, batch=_with_row(batch, last, row), **options)

    yield replaced("replaced by another one of the batch", _rows(batch, first))
    if _differs(relabeled, example):
        yield replaced("given another label", relabeled)
    has_numbers = any(_is_float(leaf) for leaf in leaves(batch))
    long = _scaled(relabeled, _LARGE)
    if has_numbers:
        yield replaced("multiplied by 1,000", _scaled(example, _LARGE), is_natural=False)
        yield replaced("multiplied by 1,000 and given another label", long, is_natural=False)
        yield replaced("replaced by zeros", _scaled(example, 0.0), is_natural=False)
    yield from _at_start(batch, first, example, has_numbers)
    yield from _resized(batch, last, example, long if has_numbers else None, padding)
    for variant in variants:
        yield from _label_variants(batch, last, variant, padding)
    if has_numbers:
        for change, factor in (("replaced by NaN", np.nan), ("multiplied by 1e30", 1e30)):
            yield replaced(change, _scaled(example, factor), is_finite=False, is_natural=False)


def _at_start(batch: Any, first: int, other: Any, has_numbers: bool) -> Iterator[Neighbor]:
    """Yield batches with another first example, on which later ones may depend, as in a queue."""
    yield Neighbor(change="replaced at the start of the batch", batch=_with_row(batch, first, other))
    if has_numbers:
        long = _scaled(next(_relabeled(batch, first), _rows(batch, first)), -_LARGE)
        change = "multiplied by -1,000 at the start of the batch and given another label"
        yield Neighbor(change=change, batch=_with_row(batch, first, long), is_natural=False)


def _label_variants(batch: Any, last: int, example: Any, padding: Any) -> Iterator[Neighbor]:
    """Yield the neighbors in which a label can count most: replaced by a long example, and one more."""
    long = _scaled(example, _LARGE)
    is_natural = not any(_is_float(leaf) for leaf in leaves(batch))
    size = "" if is_natural else "multiplied by 1,000 and "
    change, relabeled = f"{size}given yet another label", _with_row(batch, last, long)
    yield Neighbor(change=change, batch=relabeled, is_natural=is_natural, is_variant=True)
    for neighbor in _resized(batch, last, long, None, padding):
        if neighbor.size_change > 0:
            change = f"added that {'' if is_natural else 'is 1,000 times as large and '}has yet another label"
            yield replace(neighbor, change=change, is_natural=is_natural, is_variant=True)


def other_batches(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yield batches of the same size whose examples all differ, each after its description."""
    yield "labels are exchanged", map_tree(lambda leaf: _rotated(leaf) if _is_label(leaf) else leaf, batch)
    yield "all inputs are multiplied by -1", _scaled(batch, -1.0)
    yield "all inputs are zero", _scaled(batch, 0.0)


def exchanged(batch: Any) -> Any:
    """Return the batch with two adjacent examples exchanged, of different labels if there are any."""
    row = batch_size(batch) - 2
    for leaf in filter(_is_label, leaves(batch)):
        values = np.asarray(as_numpy(leaf))
        row = max(np.flatnonzero(values[1:] != values[:-1]).tolist(), default=row)
    swapped = _with_row(batch, row, _rows(batch, row + 1))
    return _with_row(swapped, row + 1, _rows(batch, row))


def _rotated(leaf: Any) -> Any:
    return _concatenated(leaf[1:], leaf[:1])


def _resized(batch: Any, last: int, example: Any, long: Any, padding: Any) -> Iterator[Neighbor]:
    """Yield batches with one example less and with one more, of which one is long unless it is None."""
    additions = [("duplicated", example, True)]
    if long is not None:
        additions.append(("added that is 1,000 times as large and has another label", long, False))
    if padding is None:
        yield Neighbor(change="removed", batch=map_tree(lambda leaf: leaf[:-1], batch), size_change=-1)
        for change, row, is_natural in additions:
            bigger = _zip(_concatenated, batch, row)
            yield Neighbor(change=change, batch=bigger, size_change=1, is_natural=is_natural)
        return
    yield Neighbor(change="removed", batch=_marked(batch, padding, last, value=True), size_change=-1)
    free = np.flatnonzero(as_numpy(batch[padding]))
    for change, row, is_natural in additions if len(free) else ():
        filled = _with_row(batch, int(free[0]), row)
        bigger = _marked(filled, padding, int(free[0]), value=False)
        yield Neighbor(change=change, batch=bigger, size_change=1, is_natural=is_natural)


def _outermost(marks: Any) -> tuple[int, int]:
    """Return the first and the last row that is an example."""
    real = np.flatnonzero(as_numpy(marks) == 0)
    if len(real) < _MIN_EXAMPLES:
        raise InputError(
            f"Expected a batch of at least {_MIN_EXAMPLES} examples that are not padding, got {len(real)}."
        )
    return int(real[0]), int(real[-1])


def _marked(batch: Any, padding: Any, row: int, *, value: bool) -> Any:
    """Return the batch with the mark of one row set or cleared."""
    marks = as_numpy(batch[padding]) != 0
    marks[row] = value
    new = like(batch[padding], marks)
    if isinstance(batch, dict):
        return {**batch, padding: new}
    arrays = [new if index == padding % len(batch) else array for index, array in enumerate(batch)]
    return type(batch)(*arrays) if hasattr(batch, "_fields") else type(batch)(arrays)


def _rows(tree: Any, row: int) -> Any:
    return map_tree(lambda leaf: leaf[row : row + 1], tree)


def _with_row(batch: Any, row: int, example: Any) -> Any:
    def changed(leaf: Any, new: Any) -> Any:
        return _concatenated(_concatenated(leaf[:row], new), leaf[row + 1 :])

    return _zip(changed, batch, example)


def _scaled(tree: Any, factor: float) -> Any:
    return map_tree(lambda leaf: leaf * factor if _is_float(leaf) else leaf, tree)


def _relabeled(batch: Any, row: int) -> Iterator[Any]:
    """Yield the row with each other label of the batch; none if there is no other."""
    arrays = _in_order(batch)
    candidates = [_other_labels(leaf, row) for leaf in arrays]
    for number in range(max(map(len, candidates), default=0)):
        chosen = [others[number % len(others)] if others else row for others in candidates]
        rows = [_rows(leaf, index) for leaf, index in zip(arrays, chosen, strict=True)]
        yield _zip(lambda _, row: row, batch, rows)


def _other_labels(leaf: Any, row: int, max_labels: int = 10) -> list[int]:
    """Return a row for each other label, if the array has one number per example; one if it is no class."""
    if not _is_label(leaf):
        return []
    values = np.asarray(as_numpy(leaf))
    rows = np.sort(np.unique(values, return_index=True)[1])
    others = [int(other) for other in rows if values[other] != values[row]]
    return others[: 1 if _is_float(leaf) else max_labels]


def _is_label(leaf: Any) -> bool:
    """Return whether an array has one number per example, which is no mark."""
    return len(leaf.shape) == 1 and "bool" not in str(leaf.dtype)


def _is_float(leaf: Any) -> bool:
    return "float" in str(leaf.dtype)


def _differs(tree: Any, other: Any) -> bool:
    pairs = zip(leaves(tree), leaves(other), strict=True)
    return any(not np.array_equal(as_numpy(left), as_numpy(right)) for left, right in pairs)


def _concatenated(first: Any, second: Any) -> Any:
    if is_torch(first):
        import torch  # noqa: PLC0415

        return torch.cat([first, second])
    if is_jax(first):
        import jax.numpy as jnp  # noqa: PLC0415

        return jnp.concatenate([first, second])
    return np.concatenate([first, second])


def _zip(function: Callable[[Any, Any], Any], tree: Any, other: Any) -> Any:
    """Return the tree with ``function`` applied to each array and its counterpart in ``other``."""
    counterparts = iter(_in_order(other))
    return map_tree(lambda leaf: function(leaf, next(counterparts)), tree)


def _in_order(tree: Any) -> list[Any]:
    """Return the arrays in the order in which ``map_tree`` visits them."""
    arrays: list[Any] = []
    map_tree(arrays.append, tree)
    return arrays
