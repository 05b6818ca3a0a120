"""Settings of the whole test run."""

import os

import pytest
from hypothesis import settings

# Two threads of torch that share one core wait for each other; tests run in parallel processes instead.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples every time: a check that passes here passes everywhere.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def seeds() -> range:
    """Of tests that repeat a training: few, because all have to end soon; 40 in `make test-long`."""
    return range(int(os.environ.get("DPAUDIT_TEST_SEEDS", "10")))
