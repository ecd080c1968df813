"""The page pool: which pages are free, and how many table entries hold each of the others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from dots_jax.pages.checks import as_int32, is_concrete, positive_int
from dots_jax.pages.table import PageTable, check_table
from dots_jax.pytree import frozen_pytree


class PagePoolError(RuntimeError):
    """A pool and its tables do not agree; the message names the page."""


@frozen_pytree()
class PagePool:
    """The free pages and the holders of the used ones, as a frozen pytree. Make one with `PagePool.create`.

    The free list is a stack inside a fixed array: taking pages lowers `num_free` and writes nothing, and giving pages
    up writes only their own places. No operation sorts, clears or copies the N entries.

    Attributes:
      free_pages: int32[N]; the first `num_free` entries are the free pages, the next one to be taken last. What follows
        them is left over and means nothing.
      num_free: int32 scalar.
      holders: int32[N], table entries that hold each page; 0 for a free one.
    """

    free_pages: Int[Array, " N"]
    num_free: Int[Array, ""]
    holders: Int[Array, " N"]

    def __post_init__(self) -> None:
        for name, rank in (("free_pages", 1), ("num_free", 0), ("holders", 1)):
            value = as_int32(name, getattr(self, name))
            if len(value.shape) != rank:
                raise ValueError(f"{name} must have {rank} dimensions, got shape {tuple(value.shape)}")
            object.__setattr__(self, name, value)
        if self.free_pages.shape != self.holders.shape:
            raise ValueError(f"free_pages has shape {self.free_pages.shape}, but holders has {self.holders.shape}")

    @classmethod
    def create(cls, num_pages: int) -> "PagePool":
        """Returns a pool of `num_pages` free pages, 0 to `num_pages - 1`; none is reserved. Page 0 is taken first.

        Raises:
          TypeError: if `num_pages` is not an integer.
          ValueError: if it is below 1 or does not fit int32.
        """
        num_pages = positive_int("num_pages", num_pages)
        return cls(
            jnp.arange(num_pages - 1, -1, -1, dtype=jnp.int32),
            jnp.asarray(num_pages, jnp.int32),
            jnp.zeros((num_pages,), jnp.int32),
        )

    @property
    def num_pages(self) -> int:
        """Pages in the pool, free or not."""
        return self.holders.shape[0]

    def __repr__(self) -> str:
        leaves = (self.free_pages, self.num_free, self.holders)
        if not is_concrete(*leaves) or np.ndim(self.num_free):
            return f"PagePool({getattr(self.holders, 'shape', '?')})"
        shared = int(np.sum(np.asarray(self.holders) > 1))
        return f"PagePool({int(self.num_free)} of {self.num_pages} pages free, {shared} shared)"


def check_types(pool: Any, *tables: Any) -> None:
    """Raises `TypeError` if the pool is no `PagePool` or a table no `PageTable`, as when the two are exchanged."""
    if not isinstance(pool, PagePool):
        raise TypeError(f"pool must be a PagePool, got {type(pool).__name__}")
    for table in tables:
        check_table(table)


def holder_counts(pool: PagePool, pages: Int[Array, "..."]) -> Int[Array, "..."]:
    """Returns how many entries hold each of `pages`: 0 for an absent one, one outside the pool, and a free one."""
    inside = (pages >= 0) & (pages < pool.num_pages)
    return jnp.where(inside, pool.holders[jnp.where(inside, pages, 0)], 0)


def give_up(pool: PagePool, pages: Int[Array, "..."], mask: Bool[Array, "..."]) -> PagePool:
    """Takes one holder away per masked entry of `pages`, and frees the pages that have none left.

    Entries that hold nothing (absent, outside the pool, already free) are skipped, so no id can damage the free list.
    A page may appear several times. The cost follows the number K of entries, not the size of the pool.
    """
    pages, mask = pages.reshape(-1), mask.reshape(-1)
    nowhere = pool.num_pages  # scatters with mode="drop" leave this index out
    # Each barrier keeps the compiler from reading the counts again after they were changed, which would cost a copy of
    # all N of them instead of an update in place.
    mask, before = jax.lax.optimization_barrier((mask & (holder_counts(pool, pages) > 0), pool.holders))
    safe = jnp.where(mask, pages, 0)
    holders = before.at[jnp.where(mask, pages, nowhere)].add(-1, mode="drop")
    emptied, holders = jax.lax.optimization_barrier((mask & (holders[safe] <= 0), holders))
    # Several entries may have held a page that is now free, and one of them has to push it. They settle it in the
    # page's own count: each writes its number, below anything the subtraction can have left, and the lowest stays.
    count = pages.shape[0]
    ticket = -(count + 1) - jnp.arange(count, dtype=jnp.int32)
    targets = jnp.where(emptied, pages, nowhere)
    holders = holders.at[targets].min(ticket, mode="drop")
    pushes, holders = jax.lax.optimization_barrier((emptied & (holders[safe] == ticket), holders))
    holders = holders.at[targets].set(0, mode="drop")
    places = pool.num_free + jnp.cumsum(pushes, dtype=jnp.int32) - 1
    free_pages = pool.free_pages.at[jnp.where(pushes, places, nowhere)].set(pages, mode="drop")
    return PagePool(free_pages, pool.num_free + jnp.sum(pushes, dtype=jnp.int32), holders)


def check_pool(pool: PagePool, *tables: PageTable) -> None:
    """Checks on the host that the pool and all tables of its current value agree.

    Every entry of every table counts as one holder of its page, and entries outside the pool count as absent. Pass each
    table that is in use with this value of the pool, and no older ones.

    Args:
      pool: the pool, with concrete arrays.
      *tables: the tables that hold its pages.

    Raises:
      PagePoolError: naming the page, if a page is both free and held, is on the free list twice, is held by nobody and
        not free, or has another number of holders than the pool says.
    """
    check_types(pool, *tables)
    num_pages, num_free = pool.num_pages, int(pool.num_free)
    if not 0 <= num_free <= num_pages:
        raise PagePoolError(f"the pool says that {num_free} of its {num_pages} pages are free")
    free = np.asarray(pool.free_pages)[:num_free]
    if (outside := free[(free < 0) | (free >= num_pages)]).size:
        raise PagePoolError(f"page {outside[0]} is on the free list of a pool of {num_pages} pages")
    times_free = np.bincount(free, minlength=num_pages)
    entries = np.concatenate([np.asarray(table.pages).reshape(-1) for table in tables] or [np.zeros(0, np.int32)])
    held = np.bincount(entries[(entries >= 0) & (entries < num_pages)], minlength=num_pages)
    counted = np.asarray(pool.holders)

    wrong = (times_free + (held > 0) != 1) | (counted != held)
    if not wrong.any():
        return
    page = int(np.argmax(wrong))
    where = _places(page, tables)
    if times_free[page] and held[page]:
        raise PagePoolError(f"page {page} is both free and held: {where}")
    if times_free[page] > 1:
        raise PagePoolError(f"page {page} is on the free list {times_free[page]} times")
    if not held[page] and not times_free[page]:
        raise PagePoolError(
            f"page {page} is held by nobody and not free either; the pool counts {counted[page]} holders"
        )
    raise PagePoolError(
        f"page {page} is counted wrongly: the pool says {counted[page]} holders, there are {held[page]}: {where}"
    )


def _places(page: int, tables: tuple[PageTable, ...]) -> str:
    """Says where a page is held, for at most a few entries."""
    found = [
        f"table {number} row {row} column {column}"
        for number, table in enumerate(tables)
        for row, column in np.argwhere(np.asarray(table.pages) == page)[:4]
    ]
    return ", ".join(found[:8]) or "no table entry"
