"""The page table: which physical page holds each logical page of each row."""

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dots_jax.pages.checks import as_int32, integer, is_concrete
from dots_jax.pages.draw import table_html, table_text
from dots_jax.pytree import frozen_pytree


@frozen_pytree(static=("page_size",))
class PageTable:
    """The pages of a batch of rows (requests), as a frozen pytree.

    Token `t` of row `b` lives at offset `t % page_size` of physical page `pages[b, t // page_size]`.

    Attributes:
      pages: int32[B, P], the physical page of each logical page; -1 is absent. Any other id outside the pool or the
        cache counts as absent too: it is never wrapped or clamped into another page.
      lengths: int32[B], tokens held *after* this step's write.
      page_size: tokens in a page, a power of two; static.

    Raises:
      TypeError: if `pages` or `lengths` is not of an integer dtype, or `page_size` is not an integer.
      ValueError: if the ranks are not 2 and 1, their row counts differ, or `page_size` is not a positive power of two.
    """

    pages: Int[Array, "B P"]
    lengths: Int[Array, " B"]
    page_size: int = 64

    def __post_init__(self) -> None:
        pages, lengths = as_int32("pages", self.pages), as_int32("lengths", self.lengths)
        if len(pages.shape) != 2:
            raise ValueError(f"pages must have shape [rows, columns], got {tuple(pages.shape)}")
        if len(lengths.shape) != 1:
            raise ValueError(f"lengths must have shape [rows], got {tuple(lengths.shape)}")
        if pages.shape[0] != lengths.shape[0]:
            raise ValueError(f"pages has {pages.shape[0]} rows, but lengths has {lengths.shape[0]}")
        object.__setattr__(self, "pages", pages)
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "page_size", check_page_size(self.page_size))

    @classmethod
    def empty(cls, num_rows: int, num_columns: int, page_size: int = 64) -> Self:
        """Returns a table of `num_rows` empty rows that can each grow to `num_columns` pages."""
        pages = jnp.full((num_rows, num_columns), -1, jnp.int32)
        return cls(pages, jnp.zeros((num_rows,), jnp.int32), page_size)

    @property
    def num_rows(self) -> int:
        """Rows (requests) in the table."""
        return self.pages.shape[0]

    @property
    def num_columns(self) -> int:
        """Logical pages a row can have."""
        return self.pages.shape[1]

    def pad_rows(self, num_rows: int) -> Self:
        """Returns the table with exactly `num_rows` rows: empty ones are appended, or the last ones cut off.

        Planned lengths stay as they are. Rows that are cut off still hold their pages as far as the pool knows: free
        them first, or keep the wider table.

        Args:
          num_rows: rows wanted, at least 0.

        Raises:
          ValueError: if `num_rows` is negative.
        """
        if num_rows < 0:
            raise ValueError(f"a table cannot have {num_rows} rows")
        missing = max(0, num_rows - self.num_rows)
        pages = jnp.pad(self.pages[:num_rows], ((0, missing), (0, 0)), constant_values=-1)
        return dataclasses.replace(self, pages=pages, lengths=jnp.pad(self.lengths[:num_rows], (0, missing)))

    def __repr__(self) -> str:
        values = host_values(self)
        if values is None:
            leaves = f"pages={_describe(self.pages)}, lengths={_describe(self.lengths)}"
            return f"PageTable({leaves}, page_size={self.page_size})"
        return table_text(*values, self.page_size)

    def _repr_html_(self) -> str | None:
        values = host_values(self)
        return None if values is None else table_html(*values, self.page_size)


def check_table(table: Any) -> None:
    """Raises `TypeError` if it is no `PageTable`."""
    if not isinstance(table, PageTable):
        raise TypeError(f"table must be a PageTable, got {type(table).__name__}")


def check_page_size(page_size: Any) -> int:
    """Returns the page size as an int, or raises: `TypeError` for no integer, `ValueError` for no power of two."""
    size = integer("page_size", page_size)
    if size <= 0 or size & (size - 1):
        raise ValueError(f"page_size must be a positive power of two, got {size}")
    return size


def host_values(table: PageTable) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns pages and lengths as numpy arrays; None for tracers, placeholders, stacked tables and donated arrays."""
    leaves = (table.pages, table.lengths)
    if not is_concrete(*leaves) or (np.ndim(table.pages), np.ndim(table.lengths)) != (2, 1):
        return None
    return np.asarray(table.pages), np.asarray(table.lengths)


def pages_for(lengths: Int[Array, " B"], page_size: int) -> Int[Array, " B"]:
    """Returns the pages that `lengths` tokens reach into, rounded up, without overflow near the end of int32."""
    return lengths // page_size + (lengths % page_size != 0).astype(jnp.int32)


def _describe(leaf: Any) -> str:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return type(leaf).__name__
