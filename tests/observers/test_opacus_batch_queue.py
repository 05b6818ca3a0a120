"""The sizes of its backward passes say which batches a step used."""

import numpy as np
import pytest

import dpaudit
from dpaudit.observers.opacus._sampling import BatchQueue


def queue_of(*sizes, num_prefetched=0, fills_empty=False):
    """Batches of these sizes, each with its place as the number of its only canary."""
    queue = BatchQueue(num_prefetched, fills_empty)
    queue.start_epoch([])
    for place, size in enumerate(sizes):
        queue.push(np.array([place]), size)
    return queue


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
    queue = queue_of(*sizes)
    for one in passes:
        queue.note_backward([one])
    assert queue.pop_step(0).tolist() == canaries


@pytest.mark.parametrize(
    ("sizes", "passes", "reason"),
    [
        ((10, 7), [7], "skips a batch, but .* every batch in a step, including empty ones"),
        ((10, 9, 7), [7], "skips 2 batches"),
        ((0, 10), [10], "skips an empty batch"),
        ((10, 7), [4], "examples of the batch are left out"),
        ((10, 7), [10, 7, 1], "more rows than examples were drawn"),
        ((10, 7), [20], "each example has 2 rows"),
        ((10,), [0, 10], "backward pass without examples"),
        ((10,), [0], "backward pass without examples"),
    ],
)
def test_passes_that_no_batches_make_up_are_refused_for_their_reason(sizes, passes, reason):
    queue = queue_of(*sizes)
    queue.note_backward(passes)
    with pytest.raises(dpaudit.InputError, match=reason):
        queue.pop_step(0)


def test_a_batch_that_is_used_twice_is_refused():
    queue = queue_of(10)
    queue.note_backward([10])
    queue.pop_step(0)
    queue.note_backward([10])
    with pytest.raises(
        dpaudit.InputError, match="No batch of the loader was drawn before step 1: is a batch used twice, or"
    ):
        queue.pop_step(1)


def test_an_empty_batch_that_is_filled_up_is_one_of_a_single_example():
    queue = queue_of(0, fills_empty=True)
    queue.note_backward([1])
    assert queue.pop_step(0).tolist() == [0]


def test_gradients_that_wait_for_the_next_epoch_keep_their_batch():
    queue = queue_of(10)
    queue.end_epoch()
    queue.start_epoch([10])
    queue.push(np.array([1]), 6)
    queue.note_backward([10, 6])
    assert queue.pop_step(0).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("ended", "num_prefetched", "left"), [(True, 0, 0), (False, 0, 1), (True, 4, 4), (False, 4, 5)]
)
def test_batches_may_be_left_only_where_a_loop_was_broken_off(ended, num_prefetched, left):
    for more in (0, 1):
        queue = queue_of(*[10] * (left + more), num_prefetched=num_prefetched)
        if ended:
            queue.end_epoch()
        if more:
            with pytest.raises(dpaudit.InputError, match=f"did not use {left + 1} batches"):
                queue.start_epoch([])
        else:
            queue.start_epoch([])
            queue.check_consumed([])
