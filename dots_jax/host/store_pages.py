"""Reading and writing whole pages of a host buffer as bytes, many at a time.

On a CPU backend the leaves are ordinary memory, and pages are copied straight from and to it. Elsewhere each page goes
through `get_page` and `set_page`.
"""

import ctypes
import threading
from typing import Any

import jax
import numpy as np
from jax import Array

from dots_jax.host.layouts import AXES, Side
from dots_jax.host.placement import Place, update

_BLOCK = ("layer", "offset", "head", "width")  # the order of a page's bytes on either side


class PageReader:
    """Bytes of pages of one buffer. Safe to use from several threads.

    While it lives, it shares the buffer's memory: donating the buffer then copies instead of reusing the memory.
    """

    def __init__(self, host_kv: Any):
        self._host = host_kv
        self._sides = None
        if all(_is_plain_memory(leaf) for leaf in host_kv.leaves.values()):
            leaves = {name: _bytes_of(leaf) for name, leaf in host_kv.leaves.items()}
            self._sides = [_blocks(leaves[side.leaf], side, host_kv) for side in host_kv.sides]

    def read(self, page: int, out: np.ndarray) -> None:
        """Copies the page's bytes to `out`, `uint8[page_bytes]`: K, then V."""
        if self._sides is None:
            out[...] = self._host.get_page(page)
            return
        start = 0
        for blocks in self._sides:
            block = blocks[page]
            out[start : start + block.size].reshape(block.shape)[...] = block
            start += block.size


class PageWriter:
    """Replaces pages of one buffer; `finish` gives the new buffer. Safe to use from several threads.

    Args:
      host_kv: the buffer, which stays as it is, or is deleted at the first write if it is donated.
      donate: take over the buffer's memory instead of copying the buffer. If anything else still looks at the memory,
        XLA copies it all the same, so nobody ever sees it change.
    """

    def __init__(self, host_kv: Any, *, donate: bool):
        self._host = host_kv
        self._donate = donate
        self._lock = threading.Lock()
        self._sides: list[np.ndarray] | None = None
        self._plain = all(_is_plain_memory(leaf) for leaf in host_kv.leaves.values())

    def write(self, page: int, payload: np.ndarray) -> None:
        """Puts `uint8[page_bytes]` (K, then V) in a page's place. Two threads must not write the same page."""
        if not self._plain:
            with self._lock:
                # A copy, because JAX may read it later than the caller keeps it.
                self._host = self._host.set_page(page, payload.copy(), donate=self._donate)
                self._donate = True  # from the second page on the buffer is this writer's own
            return
        start = 0
        for blocks in self._own():
            block = blocks[page]
            block[...] = payload[start : start + block.size].reshape(block.shape)
            start += block.size

    def finish(self) -> Any:
        """The buffer with everything written so far; the original one if nothing was. The writer is of no use after."""
        self._sides = []
        return self._host

    def _own(self) -> list[np.ndarray]:
        with self._lock:
            if self._sides is None:
                # XLA hands out memory that nothing else refers to: the donated buffer's, or a copy. Nobody but this
                # writer has the arrays until `finish`, so that writing to them changes no value that anyone has seen.
                own = (
                    update(_same, self._host.spec.dtype, self._host, donate=True)
                    if self._donate
                    else jax.tree.map(_copy, self._host)
                )
                self._host = jax.block_until_ready(own)
                leaves = {name: _writable(_bytes_of(leaf)) for name, leaf in self._host.leaves.items()}
                self._sides = [_blocks(leaves[side.leaf], side, self._host) for side in self._host.sides]
            return self._sides


def _same(host_kv: Any, *, place: Place) -> Any:
    del place  # nothing is sliced
    return host_kv


def _copy(leaf: Array) -> Array:
    return jax.device_put(leaf, leaf.sharding, may_alias=False)


def _is_plain_memory(leaf: Any) -> bool:
    if not isinstance(leaf, Array):  # a NumPy leaf may be read-only or not XLA's to hand on
        return False
    return len(leaf.sharding.device_set) == 1 and all(d.platform == "cpu" for d in leaf.sharding.device_set)


def _bytes_of(leaf: Array) -> np.ndarray:
    """A leaf's memory as uint8 with a widened last axis.

    Through DLPack, whose reference ends with the view: `np.asarray` leaves one in the array (jax 0.11), and every later
    donation of it would copy.
    """
    exporter: Any = jax.block_until_ready(leaf)
    return np.from_dlpack(exporter).view(np.uint8)


def _writable(view: np.ndarray) -> np.ndarray:
    memory = (ctypes.c_uint8 * view.nbytes).from_address(view.ctypes.data)
    memory.keep = view  # pyright: ignore[reportAttributeAccessIssue]
    return np.frombuffer(memory, np.uint8).reshape(view.shape)


def _blocks(leaf: np.ndarray, side: Side, host_kv: Any) -> np.ndarray:
    """One side of a leaf as `[page, layer, token, head, width in bytes]`, without a copy."""
    side_view = leaf if side.index is None else leaf[side.index]
    axes = list(AXES[host_kv.layout])
    if "slot" in axes:
        place = axes.index("slot")
        page_size = host_kv.spec.page_size
        shape = side_view.shape
        side_view = side_view.reshape(*shape[:place], -1, page_size, *shape[place + 1 :])
        axes[place : place + 1] = ["page", "offset"]
    return side_view.transpose([axes.index(axis) for axis in ("page", *_BLOCK)])
