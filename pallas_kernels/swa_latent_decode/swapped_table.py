"""What is static about a call of the swapped body, and the table columns that one of its blocks walks."""

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.swa_latent_decode import visible
from pallas_kernels.swa_latent_decode.config import PAGE_SIZE
from pallas_kernels.swa_latent_decode.ring import RingShape


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static about one call of the kernel."""

    shape: RingShape
    seq: int
    heads: int
    window: int | None
    scale: float
    splits: int


class Table(NamedTuple):
    """The table columns that this block walks.

    Attributes:
      pages: Ref to the whole page table, int32 [B, P].
      num_physical: Pages of the cache.
      span: Keys its queries can see and columns that hold them.
      length: Tokens the sequence holds.
      new_tokens: New ones among them.
    """

    pages: Any
    num_physical: int
    span: visible.Span
    length: jax.Array
    new_tokens: jax.Array

    @classmethod
    def of_block(cls, pages, lengths, counts, num_physical: int, call: Call) -> Self:
        """The columns of the calling block."""
        batch = lax.axis_index("batch")
        # A length far below 0 less the count would wrap to a position that exists.
        length, count = jnp.maximum(lengths[batch], 0), jnp.clip(counts[batch], 0, call.seq)
        span = visible.tile_span(
            length,
            count,
            first_row=lax.axis_index("tile") * call.shape.rows,
            tile_rows=call.shape.rows,
            heads=call.heads,
            window=call.window,
            split=lax.axis_index("split"),
            splits=call.splits,
            table_width=pages.shape[1],
        )
        return cls(pages, num_physical, span, length, count)

    @property
    def columns(self) -> jax.Array:
        """How many columns to walk."""
        return jnp.maximum(self.span.end - self.span.start, 0)

    def entry(self, i) -> tuple[jax.Array, jax.Array]:
        """Physical page (0 if absent) and presence of the i-th column; reading past the last one is harmless."""
        column = jnp.clip(self.span.start + i, 0, self.pages.shape[1] - 1)
        page = self.pages[lax.axis_index("batch"), column]
        present = (page >= 0) & (page < self.num_physical)
        return jnp.where(present, page, 0), present

    def first_key(self, i) -> jax.Array:
        """Position of the first token of the i-th column."""
        return (self.span.start + i) * PAGE_SIZE

    def seen_tokens(self, i) -> tuple[jax.Array, jax.Array]:
        """First and one past the last token of the i-th column that some query of the tile sees, if it is present."""
        start = self.first_key(i)
        return self.span.first_key - start, self.span.last_key + 1 - start
