"""The data that a config names, in a part for training and one for test."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dpaudit import _files
from dpaudit.errors import InputError
from dpaudit.experiments.config import DataConfig, Digits, Random
from dpaudit.training.data import (
    Dataset,
    cifar10,
    digits,
    idx_images,
    location,
    purchase100,
    random_images,
)

__all__ = ["load_data"]

_WITH_TEST: Mapping[str, Callable[..., Dataset]] = {"cifar10": cifar10, "idx": idx_images}
_WHOLE: Mapping[str, Callable[..., Dataset]] = {"purchase100": purchase100, "location": location}
_TEST_SHARE = 6  # one in so many examples, where the data have no test part of their own


def load_data(config: DataConfig) -> tuple[Dataset, Dataset]:
    """The examples to train on, and those to test on."""
    train, test = _all_for_test(config)
    return train, _first(test, config.num_test, "num_test")


def _all_for_test(config: DataConfig) -> tuple[Dataset, Dataset]:
    if isinstance(config, Random):
        for_test = config.num_test or -(-config.num_examples // (_TEST_SHARE - 1))
        total = config.num_examples + for_test
        made = random_images(total, shape=config.shape, num_classes=config.num_classes, seed=config.seed)
        return made.split(config.num_examples)
    if isinstance(config, Digits):
        return _split(digits(), config.num_examples)
    folder = _files.expanded(config.directory)
    if config.name in _WHOLE:
        return _split(_WHOLE[config.name](folder), config.num_examples)
    read = _WITH_TEST[config.name]
    train = read(folder, train=True)
    return _first(train, config.num_examples, "num_examples"), read(folder, train=False)


def _split(data: Dataset, num_examples: int | None) -> tuple[Dataset, Dataset]:
    """The first examples, and the rest."""
    count = len(data) - len(data) // _TEST_SHARE if num_examples is None else num_examples
    _require_at_most("num_examples", count, len(data) - 1)
    return data.split(count)


def _first(data: Dataset, count: int | None, name: str) -> Dataset:
    if count is None or count == len(data):
        return data
    _require_at_most(name, count, len(data))
    return data.split(count)[0]


def _require_at_most(name: str, count: int, available: int) -> None:
    if count > available:
        raise InputError(f"Expected data.{name}={count} to be at most {available}.")
