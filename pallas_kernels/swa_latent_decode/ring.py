"""What the swapped body's shared memory and warpgroups are cut into: Python integers, readable without a GPU."""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.swa_latent_decode.config import PAGE_SIZE, SMEM_BYTES_PER_BLOCK

CHUNK = 64
"""Columns of one chunk of a page: with 16-bit elements, one of its rows is one 128-byte swizzle row."""

_ITEMSIZE = 2
_ALIGNMENT = 1024  # of every allocation, given by Mosaic GPU
_MAX_SLOTS = 32  # Mosaic GPU's limit on the barriers of a group


@dataclasses.dataclass(frozen=True)
class RingShape:
    """A ring of 64-token x 64-column chunks, walked in loading order.

    The columns that are no values are loaded first: they take part in the scores alone, so their slots are free first.

    Args:
      width: Elements of a cache row.
      v_dim: Leading elements of a cache row that are values.
      rows: Query rows of a tile, a multiple of 8.
    """

    width: int
    v_dim: int
    rows: int

    @property
    def chunks(self) -> int:
        """Chunks of a page."""
        return self.width // CHUNK

    @property
    def key_only(self) -> int:
        """Chunks of a page that are no values."""
        return (self.width - self.v_dim) // CHUNK

    @property
    def output_groups(self) -> int:
        """Warpgroups that share the output columns."""
        return 2

    @property
    def chunks_per_group(self) -> int:
        """Output chunks (64 columns x rows, float32) that one warpgroup keeps in registers."""
        return self.v_dim // CHUNK // self.output_groups

    @property
    def products_in_flight(self) -> int:
        """Products of V that a warpgroup issues before it waits; with 32 rows registers hold no more than one."""
        return {8: 4, 16: 4, 24: 2, 32: 1}[self.rows]

    @property
    def reduction_bytes(self) -> int:
        """Scratch of the maximum over tokens: 4 warps x 32 lanes x 2 values for every 8 query rows."""
        return 4 * 32 * 2 * 4 * (self.rows // 8)

    @property
    def fixed_bytes(self) -> int:
        """Shared memory apart from the ring: Q, P twice, the statistics, the scratch and the barriers."""
        q = _aligned(self.rows * self.width * _ITEMSIZE)
        probabilities = 2 * self.rows * PAGE_SIZE * _ITEMSIZE
        statistics = _aligned(2 * self.rows * 4) + _aligned(self.rows * 4)
        barriers = _ALIGNMENT
        return q + probabilities + statistics + _aligned(self.reduction_bytes) + barriers

    @property
    def slots(self) -> int:
        """Chunks in the ring: as many as fit, so that loading runs ahead of the page being worked on."""
        return min((SMEM_BYTES_PER_BLOCK - self.fixed_bytes) // (PAGE_SIZE * CHUNK * _ITEMSIZE), _MAX_SLOTS)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one block."""
        return self.fixed_bytes + self.slots * PAGE_SIZE * CHUNK * _ITEMSIZE

    def column(self, chunk):
        """First column of the chunk that is loaded `chunk`-th; may be traced."""
        return jnp.where(chunk < self.key_only, self.v_dim + chunk * CHUNK, (chunk - self.key_only) * CHUNK)

    def slot(self, base, chunk):
        """Slot of the `chunk`-th chunk of the page whose first one lies in slot `base`; may be traced."""
        slot = base + chunk
        return jnp.where(slot >= self.slots, slot - self.slots, slot)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
