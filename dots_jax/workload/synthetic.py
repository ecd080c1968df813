"""Requests of mixed lengths from a seed."""

import numpy as np

from dots_jax.workload.request import Request


def synthetic_requests(count: int, *, context: int, output: int, seed: int) -> tuple[Request, ...]:
    """Contexts spread evenly on a logarithmic scale, shuffled: some below the window, some far above it.

    Args:
      count: how many.
      context: the longest one, tokens; the shortest is an eighth of a window's page or so (about 1/512 of it).
      output: tokens that each one decodes.
      seed: of the shuffle and of the jitter that keeps lengths from being multiples of a page.
    """
    random = np.random.default_rng(seed)
    shortest = max(1.0, context / 512)
    lengths = np.geomspace(shortest, context, count) if count > 1 else np.array([float(context)])
    lengths[:-1] *= random.uniform(0.9, 1.0, count - 1)
    return tuple(Request(max(1, round(length)), output) for length in random.permutation(lengths))
