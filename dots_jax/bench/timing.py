"""The clock: pipelined launches of rotating inputs, implementations taking turns.

Nothing here reads a device timer, so every framework is timed the same way: enough launches are queued that the device
is busy while the host prepares the next, and the clock stops when the last has finished. (JAX has no device events;
their times come only with a profile of the whole process.) On an accelerator one launch holds several calls, each made
to wait for the one before, so that the host's share hides behind the device's.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np


class Program:
    """Something to launch again and again, over rotating arguments.

    Args:
      launch: starts the work on one tuple of arguments and returns what `block` waits for.
      arguments: taken in turn by successive launches.
      calls: how many calls of the timed function one launch makes.
      block: waits for a result, and with it for everything launched before.
    """

    def __init__(
        self,
        launch: Callable[..., Any],
        arguments: Sequence[tuple],
        calls: int = 1,
        block: Callable[[Any], Any] = jax.block_until_ready,
    ):
        self._launch, self._arguments, self._block = launch, arguments, block
        self.calls = calls
        self._turn = 0

    def run(self, launches: int) -> float:
        """Seconds for one call, over `launches` launches."""
        started = time.perf_counter()
        result = None
        for _ in range(launches):
            result = self._launch(*self._arguments[self._turn])
            self._turn = (self._turn + 1) % len(self._arguments)
        self._block(result)
        return (time.perf_counter() - started) / (launches * self.calls)


def interleave(programs: Mapping[str, Program], rounds: int, round_s: float) -> dict[str, np.ndarray]:
    """Times the programs in turns, so that a drifting clock or a busy machine meets all of them.

    Args:
      programs: by name.
      rounds: turns.
      round_s: seconds that one program's turn aims at; always at least one launch.

    Returns:
      float64[rounds] seconds for one call, by name.
    """
    launches = {}
    for name, program in programs.items():
        program.run(2)  # compiling, loading and first touches
        once = program.run(1) * program.calls
        launches[name] = max(1, min(1000, round(round_s / once)))
    times = {name: np.zeros(rounds) for name in programs}
    for turn in range(rounds):
        for name, program in programs.items():
            times[name][turn] = program.run(launches[name])
    return times


def chain(call: Callable[..., jax.Array], calls: int) -> Callable[..., list[jax.Array]]:
    """A function that makes `calls` calls, each waiting for the one before.

    Args:
      call: takes the shared argument and one element of the list, both pytrees.
      calls: length of the list.

    Returns:
      A function of (shared, list of elements) that returns every result, so that no part of any can be left out.
    """

    def run(shared: Any, elements: Sequence[Any]) -> list[jax.Array]:
        results: list[jax.Array] = []
        for element in elements:
            if results:  # without the dependency XLA may fuse or overlap neighbouring calls
                element, results[-1] = jax.lax.optimization_barrier((element, results[-1]))
            results.append(call(shared, element))
        return results

    if calls < 1:
        raise ValueError(f"calls must be at least 1, got {calls}")
    return run
