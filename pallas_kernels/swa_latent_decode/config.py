"""Which kernel body runs, how the work is cut, and what it costs in shared memory.

A `Config` holds only static choices; everything here is arithmetic on Python integers, so it can be read and tested
without a GPU.
"""

import dataclasses
from typing import Literal, get_args

import numpy as np

PAGE_SIZE = 64
"""Tokens per page. Every body reads whole pages of this size."""

MAX_WIDTH = 1088
MAX_HEADS = 128
MAX_SEQ = 8
MAX_GRID = 65_535
"""Most blocks along the slower axes of a launch grid."""

SMEM_BYTES_PER_BLOCK = 232_448
"""Shared memory one block can opt into on compute capability 9.0 (227 KiB)."""

NUM_SMS = 132
"""Multiprocessors of an H100/H200 SXM, used to size the grid."""

Plan = Literal["column_split", "swapped"]

SWAPPED_MAX_ROWS = 32
"""Most query rows (seq * heads) the swapped body keeps on the N side of one tensor-core instruction."""

_BARRIER_BYTES = 256  # mbarriers and their alignment, rounded up
_REDUCTION_BYTES = 2048  # Mosaic GPU's default scratch for reductions across warps


@dataclasses.dataclass(frozen=True)
class Config:
    """One way of running the decode kernel.

    Attributes:
      plan: `"column_split"`: a cluster of two blocks, each owning half of the latent columns, for tiles of 64 query
        rows. `"swapped"`: tokens on the M side and at most 32 query rows on the N side, one block each.
      splits: Into how many parts the visible pages of a row are cut (split-KV). More than one needs a combine.
      stages: Steps in flight per block of `"column_split"`; `"swapped"` fills what shared memory there is with chunks.
      block_tokens: Keys of one step of `"column_split"`, 32 or 64: half a page where whole ones do not fit.
      tile_rows: Query rows (seq * heads, packed) of one tile.
    """

    plan: Plan
    splits: int = 1
    stages: int = 4
    tile_rows: int = 64
    block_tokens: int = 32

    def __post_init__(self):
        if self.plan not in get_args(Plan):
            raise ValueError(f"plan must be one of {get_args(Plan)}, got {self.plan!r}")
        for name in ("splits", "stages", "tile_rows", "block_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            object.__setattr__(self, name, int(value))  # Pallas takes no NumPy integers in a grid
        if not 1 <= self.splits <= MAX_GRID:
            raise ValueError(f"splits must be in 1..{MAX_GRID}, got {self.splits}")
        if self.plan == "column_split" and self.tile_rows != 64:
            raise ValueError(f"column_split works on tiles of 64 rows, got tile_rows={self.tile_rows}")
        if self.plan == "column_split" and (self.stages < 2 or self.stages % 2):
            raise ValueError(f"column_split needs an even number of stages, got stages={self.stages}")
        if self.block_tokens not in (32, 64):
            raise ValueError(f"block_tokens must be 32 or 64, got {self.block_tokens}")
        if self.plan == "swapped" and (self.tile_rows % 8 or not 8 <= self.tile_rows <= SWAPPED_MAX_ROWS):
            raise ValueError(f"swapped needs tile_rows in 8, 16, 24, 32, got {self.tile_rows}")
        if self.stages < 1:
            raise ValueError(f"stages must be at least 1, got {self.stages}")

    @property
    def blocks_per_tile(self) -> int:
        """Thread blocks that work on one (row tile, split) together."""
        return 2 if self.plan == "column_split" else 1

    def num_tiles(self, seq: int, heads: int) -> int:
        """Row tiles per sequence for `seq` query tokens of `heads` heads."""
        return -(-seq * heads // self.tile_rows)

    def smem_bytes(self, width: int, v_dim: int, itemsize: int = 2) -> int:
        """Shared memory of one block, in bytes, for cache rows of `width` elements whose first `v_dim` are values."""
        if self.plan == "column_split":
            columns = width // 2
            q = self.tile_rows * columns * itemsize
            pages = self.stages * self.block_tokens * columns * itemsize
            scores = 2 * self.tile_rows * self.block_tokens * 4  # the peer's partial scores, later the weights
            statistics = 1024  # two floats a row, aligned
            return q + pages + scores + statistics + _BARRIER_BYTES + _REDUCTION_BYTES
        from pallas_kernels.swa_latent_decode.ring import RingShape  # it needs the constants of this module

        return RingShape(width, v_dim, self.tile_rows).smem_bytes


def window_pages(seq: int, window: int | None, table_width: int) -> int:
    """Most pages that can hold a key visible to one of `seq` consecutive queries."""
    if window is None:
        return max(table_width, 1)
    return max(min(-(-(window + seq - 2) // PAGE_SIZE) + 1, table_width), 1)


# Costs in page-times (one page through one pair of blocks), from the time model of docs/kernel.md.
_START = 2.0  # launch, barriers, first page in flight, output written
_COMBINE = 1.5  # one more launch that reads every split's partial output


def choose_splits(units: int, blocks_per_tile: int, pages: int) -> int:
    """Splits that finish soonest in the model `waves * (pages per split + start) + combine`.

    Args:
      units: (sequence, row tile) pairs.
      blocks_per_tile: Thread blocks each unit occupies.
      pages: Pages each unit walks through.
    """
    slots = NUM_SMS // blocks_per_tile

    def cost(splits: int) -> float:
        waves = -(-units * splits // slots)
        return waves * (-(-pages // splits) + _START) + (_COMBINE + 0.05 * splits if splits > 1 else 0.0)

    return min(range(1, min(pages, slots) + 1), key=cost)


def default_config(
    batch: int, seq: int, heads: int, width: int, v_dim: int, window: int | None, table_width: int, dtype
) -> Config:
    """The configuration picked from static shapes; pass your own `Config` to overrule it.

    Args:
      batch: Rows of the page table.
      seq: Query tokens per row.
      heads: Query heads.
      width: Elements of one cache row.
      v_dim: Leading elements of a cache row that are values.
      window: Visible keys per query, the current token counted; None is full attention.
      table_width: Columns of the page table.
      dtype: Element type of q and cache (2 bytes each).
    """
    del dtype  # bfloat16 and float16 take the same bytes
    pages = window_pages(seq, window, table_width)
    rows = seq * heads
    if rows <= SWAPPED_MAX_ROWS:
        base = Config("swapped", tile_rows=-(-rows // 8) * 8)
    else:
        base = Config("column_split", block_tokens=64)
        if base.smem_bytes(width, v_dim) > SMEM_BYTES_PER_BLOCK:
            base = Config("column_split", block_tokens=32)
    units = batch * base.num_tiles(seq, heads)
    return dataclasses.replace(base, splits=choose_splits(units, base.blocks_per_tile, pages))


def unsupported_reason(
    *,
    batch: int,
    seq: int,
    heads: int,
    width: int,
    v_dim: int,
    page_size: int,
    window: int | None,
    num_pages: int,
    table_width: int,
    dtype,
) -> str | None:
    """Why these static shapes cannot run on the kernel, or None when they can. Says nothing about the device."""
    name = np.dtype(dtype).name
    rope = width - v_dim
    checks = (
        (name not in ("bfloat16", "float16"), f"dtype {name} is not bfloat16 or float16"),
        (page_size != PAGE_SIZE, f"page size {page_size} is not {PAGE_SIZE}"),
        (not 1 <= heads <= MAX_HEADS, f"{heads} heads are not in 1..{MAX_HEADS}"),
        (not 1 <= seq <= MAX_SEQ, f"{seq} query tokens per row are not in 1..{MAX_SEQ}"),
        (width > MAX_WIDTH, f"row width {width} is more than {MAX_WIDTH}"),
        (v_dim % 128 != 0 or v_dim < 128, f"v_dim {v_dim} is not a positive multiple of 128"),
        (rope < 0 or rope % 64 != 0, f"the {rope} columns after v_dim are not a multiple of 64"),
        (window is not None and window < 1, f"window {window} is less than 1"),
        (not 1 <= batch <= MAX_GRID, f"a batch of {batch} rows is not in 1..{MAX_GRID}"),
        (num_pages < 1, "the cache has no pages"),
        (table_width < 1, "the page table has no columns"),
    )
    return next((reason for failed, reason in checks if failed), None)
