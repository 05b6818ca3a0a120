"""Batches that differ from a given one in a single example, changed in ways that reveal faults.

The last example is changed in all of these ways, the first one in some of them.

A batch is a tree of arrays whose first dimension is the example. Extreme examples matter most: long gradients
reveal what is not clipped, zeros and other labels reveal statistics that are computed over the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from dpaudit._types import FloatArray
from dpaudit.errors import InputError
from dpaudit.observers._arrays import as_numpy, leaves, like, map_tree

_MIN_EXAMPLES = 3  # with fewer, those that stay the same are too few to compare
_LARGE = 1000.0  # factor that makes the gradient of an example longer than any clipping norm
Example: TypeAlias = list[FloatArray]
"""The row of an example in each array of a batch."""


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
            f"A batch must be arrays with one row per example, got first dimensions {sorted(sizes)}."
        )
    size = sizes.pop()
    if size < _MIN_EXAMPLES:
        raise InputError(f"A batch must have at least {_MIN_EXAMPLES} examples, got {size}.")
    return size


class _Examples:
    """The examples of a batch, which are changed one by one and put together again.

    ``padding`` is the key or index in the batch of a boolean array that marks rows that are no examples.
    """

    def __init__(self, batch: Any, padding: Any = None) -> None:
        arrays: list[Any] = []
        map_tree(arrays.append, batch)
        self._tree, self._arrays = batch, arrays
        self.rows: list[Example] = [list(row) for row in zip(*map(as_numpy, arrays), strict=True)]
        self._is_float = ["float" in str(array.dtype) for array in arrays]
        # one number per example, which is no mark
        self._is_label = [len(array.shape) == 1 and "bool" not in str(array.dtype) for array in arrays]
        marks = None if padding is None else batch[padding]
        self._mark = next((number for number, array in enumerate(arrays) if array is marks), None)

    @property
    def has_numbers(self) -> bool:
        """Whether examples have anything that can be scaled."""
        return any(self._is_float)

    def batch(self, rows: Sequence[Example]) -> Any:
        """Return a batch of these examples, in the library and data types of the given one."""
        columns = iter([np.stack(column) for column in zip(*rows, strict=True)])
        return map_tree(lambda array: like(array, next(columns)), self._tree)

    def replaced(self, number: int, example: Example) -> Any:
        """Return the batch with another example at this place."""
        return self.batch([*self.rows[:number], example, *self.rows[number + 1 :]])

    def scaled(self, example: Example, factor: float) -> Example:
        """Return an example whose numbers, but not its labels and marks of integers, are multiplied."""
        pairs = zip(example, self._is_float, strict=True)
        with np.errstate(invalid="ignore", over="ignore"):
            return [row * factor if is_float else row for row, is_float in pairs]

    def relabeled(self, number: int) -> list[Example]:
        """Return the example with each other label of the batch; none if there is no other."""
        candidates = [self._other_labels(leaf, number) for leaf in range(len(self._arrays))]
        return [
            [
                self.rows[others[turn % len(others)] if others else number][leaf]
                for leaf, others in enumerate(candidates)
            ]
            for turn in range(max(map(len, candidates), default=0))
        ]

    def _other_labels(self, leaf: int, number: int, max_labels: int = 10) -> list[int]:
        """Return an example for each other label, or just one if the label is no class."""
        if not self._is_label[leaf]:
            return []
        values = [float(row[leaf]) for row in self.rows]
        places = np.sort(np.unique(values, return_index=True)[1])
        others = [int(place) for place in places if values[place] != values[number]]
        return others[: 1 if self._is_float[leaf] else max_labels]

    def with_labels_of_next(self) -> list[Example]:
        """Return the examples, each with the label of the next one."""
        pairs = zip(self.rows, [*self.rows[1:], self.rows[0]], strict=True)
        return [
            [b if is_label else a for a, b, is_label in zip(*pair, self._is_label, strict=True)]
            for pair in pairs
        ]

    def last_change_of_label(self) -> int:
        """Return the last example with another label than the next one, or the last but one."""
        numbers = range(len(self.rows) - 1)
        labels = [leaf for leaf, is_label in enumerate(self._is_label) if is_label]
        number = len(self.rows) - 2
        for leaf in labels:
            changes = [i for i in numbers if self.rows[i][leaf] != self.rows[i + 1][leaf]]
            number = max(changes, default=number)
        return number

    def outermost(self) -> tuple[int, int]:
        """Return the first and the last row that is an example."""
        real = [number for number, row in enumerate(self.rows) if self._mark is None or not row[self._mark]]
        if len(real) < _MIN_EXAMPLES:
            raise InputError(
                f"A batch must have at least {_MIN_EXAMPLES} examples that are not padding, got {len(real)}."
            )
        return real[0], real[-1]

    def without(self, number: int) -> Any:
        """Return the batch without this example, or with a mark that it is none."""
        if self._mark is None:
            return self.batch([*self.rows[:number], *self.rows[number + 1 :]])
        return self.replaced(number, self._marked(self.rows[number], value=1.0))

    def added(self, change: str, example: Example, **options: Any) -> list[Neighbor]:
        """Return the batch with one more example, in place of padding if it is marked; none if it is full."""
        if self._mark is None:
            return [
                Neighbor(change=change, batch=self.batch([*self.rows, example]), size_change=1, **options)
            ]
        free = [number for number, row in enumerate(self.rows) if row[self._mark]]
        example = self._marked(example, value=0.0)
        return [
            Neighbor(change=change, batch=self.replaced(number, example), size_change=1, **options)
            for number in free[:1]
        ]

    def _marked(self, example: Example, *, value: float) -> Example:
        return [np.asarray(value) if leaf == self._mark else row for leaf, row in enumerate(example)]


def neighbors_of(batch: Any, *, padding: Any = None) -> Iterator[Neighbor]:
    """Yield neighboring batches, finite ones first.

    ``padding`` is the key or index in the batch of a boolean array that marks rows that are no examples. If
    given, examples are removed and added by changing the marks, so that shapes stay the same.
    """
    batch_size(batch)
    examples = _Examples(batch, padding)
    first, last = examples.outermost()
    example, has_numbers = examples.rows[last], examples.has_numbers
    labels = examples.relabeled(last)
    long = examples.scaled(labels[0] if labels else example, _LARGE)

    def replaced(change: str, row: Example, number: int = last, **options: Any) -> Neighbor:
        return Neighbor(change=change, batch=examples.replaced(number, row), **options)

    yield replaced("replaced by another one of the batch", examples.rows[first])
    if labels:
        yield replaced("given another label", labels[0])
    if has_numbers:
        yield replaced("multiplied by 1,000", examples.scaled(example, _LARGE), is_natural=False)
        yield replaced("multiplied by 1,000 and given another label", long, is_natural=False)
        yield replaced("replaced by zeros", examples.scaled(example, 0.0), is_natural=False)
    # later examples may depend on the first one, as in a queue
    yield replaced("replaced at the start of the batch", example, first)
    if has_numbers:
        start = examples.scaled([*examples.relabeled(first), examples.rows[first]][0], -_LARGE)
        change = "multiplied by -1,000 at the start of the batch and given another label"
        yield replaced(change, start, first, is_natural=False)
    yield Neighbor(change="removed", batch=examples.without(last), size_change=-1)
    yield from examples.added("duplicated", example)
    if has_numbers:
        yield from examples.added(
            "added that is 1,000 times as large and has another label", long, is_natural=False
        )
    for variant in labels[1:]:  # in which a label can count most
        row, options = examples.scaled(variant, _LARGE), {"is_natural": not has_numbers, "is_variant": True}
        yield replaced(f"{'multiplied by 1,000 and ' * has_numbers}given yet another label", row, **options)
        change = f"added that {'is 1,000 times as large and ' * has_numbers}has yet another label"
        yield from examples.added(change, row, **options)
    if has_numbers:
        for change, factor in (("replaced by NaN", np.nan), ("multiplied by 1e30", 1e30)):
            yield replaced(change, examples.scaled(example, factor), is_finite=False, is_natural=False)


def other_batches(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yield batches of the same size whose examples all differ, each after its description."""
    examples = _Examples(batch)
    yield "labels are exchanged", examples.batch(examples.with_labels_of_next())
    for condition, factor in (("all inputs are multiplied by -1", -1.0), ("all inputs are zero", 0.0)):
        yield condition, examples.batch([examples.scaled(row, factor) for row in examples.rows])


def exchanged(batch: Any) -> Any:
    """Return the batch with two adjacent examples exchanged, of different labels if there are any."""
    batch_size(batch)
    examples = _Examples(batch)
    number, rows = examples.last_change_of_label(), list(examples.rows)
    rows[number], rows[number + 1] = rows[number + 1], rows[number]
    return examples.batch(rows)
