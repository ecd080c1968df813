"""Threads for transfers on a CPU backend, where a call returns only when its copy is done.

XLA releases the interpreter while it copies, so that two calls on two threads really run at the same time. On an
accelerator calls return at once and nothing here is used.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from dots_jax.host.placement import is_traced, platform_of

# Below this many bytes a copy takes less time than handing it to a thread is worth.
MIN_BYTES = 4 << 20

# Two pools, because a layer's load waits for its sides.
_LAYERS = ThreadPoolExecutor(1, "host-layer")
_SIDES = ThreadPoolExecutor(1, "host-side")


def blocking_bytes(tree: Any, nbytes: int) -> int:
    """Bytes whose copy a call on these arrays waits for: all on a CPU, none on an accelerator or while tracing."""
    return nbytes if platform_of(tree) == "cpu" and not is_traced(tree) else 0


def run_together(calls: list[Callable[[], Any]], nbytes: int) -> list[Any]:
    """Results of independent calls, in order; a large second one runs beside the first.

    Args:
      calls: what to call.
      nbytes: what `blocking_bytes` said of the bytes they move together; 0 keeps them on this thread.
    """
    if len(calls) < 2 or nbytes < MIN_BYTES:
        return [call() for call in calls]
    others = [_SIDES.submit(call) for call in calls[1:]]
    try:
        first = calls[0]()
    finally:
        results = [other.result() for other in others]
    return [first, *results]


def start(call: Callable[[], Any], nbytes: int) -> Future:
    """Starts a call that the caller will want later: on a thread where it would block, at once otherwise.

    Args:
      call: what to call.
      nbytes: what `blocking_bytes` said of the bytes it moves.
    """
    if nbytes >= MIN_BYTES:
        return _LAYERS.submit(call)
    future: Future = Future()
    future.set_result(call())
    return future
