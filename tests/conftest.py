"""Settings of the whole test run."""

import os

# Two threads of torch that share one core wait for each other; tests run in parallel processes instead.
os.environ.setdefault("OMP_NUM_THREADS", "1")
