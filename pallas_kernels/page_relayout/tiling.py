"""How pages are cut into tiles that pass through shared memory: Python integers, readable without a GPU."""

import dataclasses
from typing import Literal

import numpy as np

Order = Literal["token_major", "layer_major"]

MAX_LAYERS = 64
"""Layers of one call: each has its own code and its own copy descriptor."""

STAGES = 4
"""Tiles in flight per block."""

_MAX_BOX = 256  # elements of a tile along one dimension, the copy engine's limit
# Three blocks still fit one multiprocessor, and a page of 64 tokens of a quarter of the released latent is one tile.
_MAX_TILE_BYTES = 17 * 1024
_COPY_BYTES = 16  # the copy engine's granularity
_ARRIVAL_BYTES = 128  # one byte at least for each thread that arrives


@dataclasses.dataclass(frozen=True)
class Tiling:
    """A relayout of `pages` pages; a token of one layer is a row of `columns` elements."""

    num_layers: int
    slots: int
    page_size: int
    columns: int
    itemsize: int
    pages: int
    order: Order

    @property
    def tile_columns(self) -> int:
        """Columns of a tile: the most that divide a row and that one copy may carry."""
        return _largest_divisor(self.columns, _MAX_BOX, multiple_of=_COPY_BYTES // self.itemsize)

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        limit = min(_MAX_BOX, _MAX_TILE_BYTES // (self.tile_columns * self.itemsize))
        return _largest_divisor(self.page_size, limit)

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile."""
        return self.tile_tokens * self.tile_columns * self.itemsize

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks: (page, tile of tokens, tile of columns); each walks all layers."""
        return self.pages, self.page_size // self.tile_tokens, self.columns // self.tile_columns

    @property
    def block_shape(self) -> tuple[int, int, int, int]:
        """Shape of the block with heads and widths as one axis of columns."""
        token_major = self.order == "token_major"
        inner = (self.page_size, self.num_layers) if token_major else (self.num_layers, self.page_size)
        return self.pages, *inner, self.columns


def unsupported_reason(*, num_layers: int, slots: int, page_size: int, heads: int, width: int, dtype) -> str | None:
    """Why these static shapes cannot go through the kernels, or None when they can. Says nothing about the device."""
    dtype = np.dtype(dtype)
    row = heads * width * dtype.itemsize
    if not 1 <= num_layers <= MAX_LAYERS:
        return f"{num_layers} layers are not in 1..{MAX_LAYERS}"
    if dtype.itemsize not in (1, 2, 4):
        return f"dtype {dtype.name} is not 1, 2 or 4 bytes wide"
    if page_size < 1 or slots % page_size or slots < page_size:
        return f"{slots} slots are not whole pages of {page_size}"
    if row < _COPY_BYTES or row % _COPY_BYTES:
        return f"a token of {row} bytes is not a multiple of {_COPY_BYTES}"
    tiling = Tiling(num_layers, slots, page_size, heads * width, dtype.itemsize, 1, "token_major")
    if tiling.tile_bytes % _ARRIVAL_BYTES:
        return f"a tile of {tiling.tile_bytes} bytes is not a multiple of {_ARRIVAL_BYTES}"
    return None


def _largest_divisor(number: int, limit: int, multiple_of: int = 1) -> int:
    return max(d for d in range(1, min(number, limit) + 1) if number % d == 0 and d % multiple_of == 0)
