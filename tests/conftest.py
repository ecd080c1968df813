"""Set-up shared by all tests."""

import os

# The GPU interpreter runs each simulated warpgroup on a thread of the CPU client and deadlocks when there are too few,
# so this has to be in the environment before anything imports jax.
os.environ.setdefault("NPROC", "64")
