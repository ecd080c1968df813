"""Turning slots into moves: equal runs of tokens, each inside one host page.

A run is a whole page where the slots allow it and one token otherwise. The number of moves is a value, not a shape:
eager calls pad their vectors to a power of two (or to a whole chunk), so that few sizes are ever compiled, and traced
slots that may not move are sorted behind the ones that may.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int, Int32

from dots_jax.host.slots import SlotPair

# Vectors that cost no memory are at least this long, so that short transfers share one compiled function.
_FEWEST = 8


class Moves(NamedTuple):
    """Runs to copy.

    Attributes:
      host: int32[n] first host slot of each run.
      device: int32[n] first device slot of each run.
      total: int32 scalar: how many of the n are to be made.
    """

    host: Any
    device: Any
    total: Any


def plan(pair: SlotPair, *, num_host: int, num_device: int, page_size: int, need_pages: bool) -> tuple[Moves, int]:
    """The moves of a transfer, and the tokens of each.

    Args:
      pair: slots that `check_pair` has seen.
      num_host: slots of the host buffer.
      num_device: slots of the device arrays.
      page_size: tokens of one page.
      need_pages: whether only whole pages may move.
    """
    if not pair.checked:
        run = page_size if need_pages else 1
        return _plan_traced(pair, num_host, num_device, run), run
    run = page_size if pair.by_page else 1
    host, device = (np.asarray(slots)[::run] for slots in (pair.host, pair.device))
    return _padded(host, device, _power_of_two(max(host.size, _FEWEST))), run


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _padded(host: np.ndarray, device: np.ndarray, length: int) -> Moves:
    padding = length - host.size
    return Moves(np.pad(host, (0, padding)), np.pad(device, (0, padding)), np.int32(host.size))


def chunks(moves: Moves, size: int) -> Iterator[Moves]:
    """Known moves in pieces of at most `size` runs, padding included; at least one piece, which may be empty.

    Each piece becomes a block of as many runs, so that padding costs memory and time here: only the last piece has any.
    """
    total = int(moves.total)
    for start in range(0, max(total, 1), size):
        stop = min(start + size, total)
        length = min(_power_of_two(stop - start), size)
        yield _padded(moves.host[start:stop], moves.device[start:stop], length)


def _in_range(slots: Int[Array, " n"], size: int) -> tuple[Int32[Array, " n"], Bool[Array, " n"]]:
    """Slots that are safe to use, and which of them were given so."""
    slots = jnp.asarray(slots)
    if slots.dtype.itemsize < 4:
        slots = slots.astype(jnp.int32)
    ok = (slots >= 0) & (slots < size)
    return jnp.where(ok, slots, 0).astype(jnp.int32), ok


def _plan_traced(pair: SlotPair, num_host: int, num_device: int, run: int) -> Moves:
    if not pair.host.size:  # a loop over no moves may not index an empty vector either
        return _padded(np.zeros(0, np.int32), np.zeros(0, np.int32), 1)
    host, host_ok = _in_range(pair.host, num_host)
    device, device_ok = _in_range(pair.device, num_device)
    groups = [slots.reshape(-1, run) for slots in (host, device)]
    ok = (host_ok & device_ok).reshape(-1, run).all(axis=1)
    for group in groups:
        ok &= (group == group[:, :1] + jnp.arange(run, dtype=jnp.int32)).all(axis=1)
    ok &= groups[0][:, 0] % run == 0
    order = jnp.argsort(~ok, stable=True)
    return Moves(groups[0][order, 0], groups[1][order, 0], ok.sum(dtype=jnp.int32))
