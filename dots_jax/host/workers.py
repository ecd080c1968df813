"""Threads for transfers on a CPU backend, where a call returns only when its copy is done.

XLA releases the interpreter while it copies, so that two calls on two threads really run at the same time. On an
accelerator calls return at once and nothing here is used.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

# Below this many bytes a copy takes less time than handing it to a thread is worth.
MIN_BYTES = 4 << 20

# Two pools, because a layer's load waits for its sides.
_LAYERS = ThreadPoolExecutor(1, "host-layer")
_SIDES = ThreadPoolExecutor(1, "host-side")


def _blocks(nbytes: int) -> bool:
    return nbytes >= MIN_BYTES and jax.default_backend() == "cpu"


def run_together(calls: list[Callable[[], Any]], nbytes: int) -> list[Any]:
    """Results of independent calls, in order; a large second one runs beside the first.

    Args:
      calls: what to call.
      nbytes: bytes they move together; 0 keeps them on this thread.
    """
    if len(calls) < 2 or not _blocks(nbytes):
        return [call() for call in calls]
    others = [_SIDES.submit(call) for call in calls[1:]]
    try:
        first = calls[0]()
    finally:
        results = [other.result() for other in others]
    return [first, *results]


def start(call: Callable[[], Any], nbytes: int) -> Future:
    """Starts a call that the caller will want later: on a thread where it would block, at once otherwise."""
    if _blocks(nbytes):
        return _LAYERS.submit(call)
    future: Future = Future()
    future.set_result(call())
    return future
