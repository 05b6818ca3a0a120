"""Which batches a step used is told by the sizes of its backward passes."""

import numpy as np
import pytest

import dpaudit
from dpaudit.observers.opacus._sampling import Line


def line_of(*sizes, ahead=0, filled=False):
    """Batches of these sizes, each with its place as the number of its only canary."""
    line = Line(ahead, filled)
    line.begin([])
    for place, size in enumerate(sizes):
        line.add(np.array([place]), size)
    return line


@pytest.mark.parametrize(
    ("sizes", "passes", "canaries"),
    [
        ((10, 7), [10], [0]),
        ((10, 7), [4, 3, 3], [0]),  # split
        ((10, 7), [10, 7], [0, 1]),  # two batches
        ((10, 7), [4, 6, 4, 3], [0, 1]),
        ((0, 10, 0), [0], [0]),
        ((0, 10, 0), [0, 10], [0, 1]),
        ((10, 0, 5), [10], [0]),
        ((10, 0, 5), [10, 0], [0, 1]),
    ],
)
def test_a_step_gets_the_canaries_of_the_batches_that_it_used(sizes, passes, canaries):
    line = line_of(*sizes)
    for one in passes:
        line.used([one])
    assert line.of_step(0).tolist() == canaries


@pytest.mark.parametrize(
    ("sizes", "passes"),
    [((10, 7), [7]), ((10, 7), [4]), ((10, 7), [10, 7, 1]), ((0, 10), [10]), ((10,), [0, 10]), ((10,), [0])],
)
def test_passes_that_no_batches_make_up_are_refused(sizes, passes):
    line = line_of(*sizes)
    line.used(passes)
    with pytest.raises(dpaudit.InputError, match="a step of every batch, also of an empty one"):
        line.of_step(0)


def test_an_empty_batch_that_is_filled_up_is_one_of_a_single_example():
    line = line_of(0, filled=True)
    line.used([1])
    assert line.of_step(0).tolist() == [0]


def test_gradients_that_wait_for_the_next_epoch_keep_their_batch():
    line = line_of(10)
    line.end()
    line.begin([10])
    line.add(np.array([1]), 6)
    line.used([10, 6])
    assert line.of_step(0).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("ended", "ahead", "left"), [(True, 0, 0), (False, 0, 1), (True, 4, 4), (False, 4, 5)]
)
def test_batches_may_be_left_only_where_a_loop_was_broken_off(ended, ahead, left):
    for more in (0, 1):
        line = line_of(*[10] * (left + more), ahead=ahead)
        if ended:
            line.end()
        if more:
            with pytest.raises(dpaudit.InputError, match=f"got {left + 1} batches without"):
                line.begin([])
        else:
            line.begin([])
            line.require_used([])
