"""Growing rows: taking pages, copy-on-write of a shared last page, and applying the copies."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from dots_jax.pages.checks import INT32_MAX, as_int32, on_host, per_row, refuse_rows
from dots_jax.pages.pool import PagePool, check_types, holder_counts
from dots_jax.pages.table import PageTable, pages_for


class Extension(NamedTuple):
    """What `extend` returns.

    Attributes:
      pool: the pool after the growth.
      table: the table after the growth.
      granted: bool[B]; False where a row did not fit and is unchanged.
      copies: int32[B, 2], (source, destination) pages for `copy_pages`, -1 where none.
    """

    pool: PagePool
    table: PageTable
    granted: Bool[Array, " B"]
    copies: Int[Array, "B 2"]


def extend(pool: PagePool, table: PageTable, new_tokens: Any) -> Extension:
    """Grows each row by `new_tokens` tokens, taking pages from the pool as needed.

    All or nothing per row: a row that does not fit, because the pool has too few pages left or the table too few
    columns, is unchanged and not granted. Rows are served in order, and a refused one does not stop those after it. A
    row that grows by 0 is always granted and unchanged.

    A partly filled last page that another entry also holds is replaced by a fresh page, which counts among the pages
    the row needs. Rows that share one page and grow in the same call are served in order too: each gets a page of its
    own until only one entry is left, and that one keeps the shared page. Give `copies` to `copy_pages` for every cache
    that this table indexes before anything is written.

    A partly filled last page that is absent stays absent, because a fresh one would show whatever it held before as the
    row's earlier tokens; new tokens in it are dropped by the write. A column past the length that already holds a page
    keeps it; if another entry holds that page too, the row is refused.

    Args:
      pool: the pool.
      table: [B, P] table of this pool.
      new_tokens: int32[B], tokens to add, 0 or more; one number stands for all rows.

    Returns:
      An `Extension`. Shapes are those of the arguments, so the call is jit-able; its work is O(B P), and
      O(B) more for each forked row that an almost empty pool refuses.

    Raises:
      TypeError: if `new_tokens` is not of an integer dtype, or pool or table is of another type.
      ValueError: if its shape is not [B], or it is negative (a traced negative number is not granted).
    """
    check_types(pool, table)
    counts = per_row("new_tokens", new_tokens, table.num_rows)
    if (known := on_host(new_tokens, table.num_rows)) is not None:
        refuse_rows("new_tokens must not be negative", known < 0, new_tokens=known)
    return _extend(pool, table, counts)


@jax.jit
def _extend(pool: PagePool, table: PageTable, new_tokens: Int[Array, " B"]) -> Extension:
    pages, lengths, page_size = table.pages, table.lengths, table.page_size
    capacity = min(table.num_columns * page_size, INT32_MAX)
    # Written as a difference: the sum may pass the end of int32.
    grows = (new_tokens > 0) & (lengths >= 0) & (new_tokens <= capacity - lengths)
    new_lengths = jnp.where(grows, lengths + new_tokens, lengths)

    column = jnp.arange(table.num_columns, dtype=jnp.int32)[None, :]
    holders = holder_counts(pool, pages)
    first, end = pages_for(lengths, page_size)[:, None], pages_for(new_lengths, page_size)[:, None]
    reached = (column >= first) & (column < end)  # nothing where a row does not grow
    grows &= ~jnp.any(reached & (holders > 1), axis=1)
    absent = reached & (holders == 0) & grows[:, None]
    is_tail = (
        (column == (lengths // page_size)[:, None]) & ((lengths % page_size != 0) & grows)[:, None] & (holders > 0)
    )
    tail = jnp.max(jnp.where(is_tail, pages, -1), axis=1, initial=-1)
    tail_holders = jnp.max(jnp.where(is_tail, holders, 0), axis=1, initial=0)

    served, replaced = _admit(pool.num_free, grows, jnp.sum(absent, axis=1, dtype=jnp.int32), tail, tail_holders)
    takes = (absent & served[:, None]) | (is_tail & replaced[:, None])
    per_row_count = jnp.sum(takes, axis=1, dtype=jnp.int32)
    before = jnp.cumsum(per_row_count, dtype=jnp.int32) - per_row_count
    rank = before[:, None] + jnp.cumsum(takes, axis=1, dtype=jnp.int32) - 1
    taken = pool.free_pages[jnp.where(takes, pool.num_free - 1 - rank, 0)]
    grown = PageTable(jnp.where(takes, taken, pages), jnp.where(served, new_lengths, lengths), page_size)

    nowhere = pool.num_pages
    counts = pool.holders.at[jnp.where(takes, taken, nowhere)].set(1, mode="drop")
    counts = counts.at[jnp.where(replaced, tail, nowhere)].add(-1, mode="drop")
    smaller = PagePool(pool.free_pages, pool.num_free - jnp.sum(per_row_count, dtype=jnp.int32), counts)
    destination = jnp.max(jnp.where(is_tail & takes, taken, -1), axis=1, initial=-1)
    copies = jnp.stack([jnp.where(replaced, tail, -1), destination], axis=1)
    return Extension(smaller, grown, served | (new_tokens == 0), copies)


def _admit(
    num_free: Int[Array, ""],
    grows: Bool[Array, " B"],
    absent: Int[Array, " B"],
    tail: Int[Array, " B"],
    tail_holders: Int[Array, " B"],
) -> tuple[Bool[Array, " B"], Bool[Array, " B"]]:
    """Decides in row order who is served and whose shared last page is replaced.

    A scan over rows would say the same in B dependent steps. Here every round takes all rows that are not refused yet
    to be served, which is exact up to the first one that does not fit; that one is refused, and with it all later ones
    that cannot fit even without a replacement, because the pool only gets emptier. One round serves a batch that fits.

    Args:
      num_free: free pages.
      grows: rows to serve if pages allow.
      absent: pages each row needs beside a replacement.
      tail: the partly filled last page, or -1.
      tail_holders: entries that hold it.

    Returns:
      (served, replaced).
    """
    rows = grows.shape[0]
    index = jnp.arange(rows, dtype=jnp.int32)
    shares = grows & (tail_holders > 1)
    # Rows with the same last page lie side by side in `order`, still in row order.
    key = jnp.where(shares, tail, -1)
    order = jnp.argsort(key, stable=True)
    place = jnp.zeros_like(index).at[order].set(index)
    starts = (index == 0) | (key[order] != key[order[index - 1]])
    start = jax.lax.cummax(jnp.where(starts, index, 0))

    def one_round(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        served, _, _ = state
        sharing = (served & shares)[order].astype(jnp.int32)
        earlier = jnp.cumsum(sharing, dtype=jnp.int32) - sharing
        rank = (earlier - earlier[start])[place]
        replaced = served & shares & (rank < tail_holders - 1)
        need = jnp.where(served, absent, 0) + replaced.astype(jnp.int32)
        total = jnp.cumsum(need, dtype=jnp.int32)
        over = served & (total > num_free)
        first = jnp.min(jnp.where(over, index, rows), initial=rows)
        left = num_free - jnp.max(jnp.where(index < first, total, 0), initial=0)
        refused = (index == first) | ((index > first) & (absent > left))
        return served & ~refused, replaced, jnp.any(over)

    # In `jax.shard_map` a loop has to start with values that differ between devices wherever its results do.
    grows &= num_free >= 0
    state = (grows, jnp.zeros_like(grows), jnp.any(grows))
    served, replaced, _ = jax.lax.while_loop(lambda state: state[2], one_round, state)
    return served, replaced


def copy_pages(kv_pages: Shaped[Array, "N ..."], copies: Any) -> Shaped[Array, "N ..."]:
    """Copies whole pages of a cache array as `extend` asks for.

    Args:
      kv_pages: [N, ...], any cache whose first axis is the physical page.
      copies: int32[B, 2], (source, destination) pages. A row of which either is absent or outside the cache
        does nothing.

    Returns:
      The cache after the copies. The cost follows the number of copies, and under donation not the size of the cache.

    Raises:
      TypeError: if `copies` is not of an integer dtype.
      ValueError: if its shape is not [B, 2].
    """
    copies = as_int32("copies", copies)
    if len(copies.shape) != 2 or copies.shape[1] != 2:
        raise ValueError(f"copies must have shape [rows, 2], got {tuple(copies.shape)}")
    return _copy_pages(jnp.asarray(kv_pages), copies)


@jax.jit
def _copy_pages(kv_pages: Shaped[Array, "N ..."], copies: Int[Array, "B 2"]) -> Shaped[Array, "N ..."]:
    if copies.shape[0] == 0:
        return kv_pages
    valid = jnp.all((copies >= 0) & (copies < kv_pages.shape[0]), axis=1)
    chosen = jnp.nonzero(valid, size=copies.shape[0], fill_value=0)[0]

    # A loop with as many turns as there are copies: most steps have none, and a gather would read B pages in each.
    def copy_one(turn: Int[Array, ""], cache: Shaped[Array, "N ..."]) -> Shaped[Array, "N ..."]:
        source, destination = copies[chosen[turn]]
        page = jax.lax.dynamic_index_in_dim(cache, source, keepdims=True)
        return jax.lax.dynamic_update_slice_in_dim(cache, page, destination, axis=0)

    return jax.lax.fori_loop(0, jnp.sum(valid, dtype=jnp.int32), copy_one, kv_pages)
