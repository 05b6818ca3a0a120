"""Settings of the whole test run."""

import os

from hypothesis import settings

# Two threads of torch that share one core wait for each other; tests run in parallel processes instead.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples every time: a check that passes here passes everywhere.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
