"""Writing and reading the paged latent cache by logical position."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dots_jax.decode.checks import check_cache, check_counts, check_unsharded
from dots_jax.decode.positions import locate
from dots_jax.pages import PageTable
from dots_jax.pages.checks import as_int32


def write_latent(
    kv_pages: Float[Array, "N page_size D"],
    table: PageTable,
    latent: Float[Array, "B S D"],
    *,
    counts: Int[Array, " B"] | None = None,
) -> Float[Array, "N page_size D"]:
    """Writes this step's latent rows: token j of row b goes to position `lengths[b] - counts[b] + j`.

    Args:
      kv_pages: the cache of one layer.
      table: page table whose lengths already include the tokens written here (as `extend` returns it).
      latent: the rows; converted to the cache's dtype.
      counts: tokens written per row, the first `counts[b]` of S; default S. Values outside 0..S act as the nearest
        bound.

    Returns:
      The new cache. A token whose page is absent is dropped; every other byte is as it was.

    Pure. Under `jax.jit(..., donate_argnums=0)` the write happens in place and its cost does not depend on N; the array
    that was passed is then deleted.

    Raises:
      TypeError: if `table` is not a `PageTable`, or `counts` not of an integer dtype.
      ValueError: if the shapes do not belong together.
    """
    check_cache(kv_pages, table)
    kv_pages, latent = jnp.asarray(kv_pages), jnp.asarray(latent)
    if latent.ndim != 3 or latent.shape[0] != table.pages.shape[0] or latent.shape[2] != kv_pages.shape[2]:
        raise ValueError(
            f"latent must be [B={table.pages.shape[0]}, S, D={kv_pages.shape[2]}] for this table and cache, "
            f"got {latent.shape}"
        )
    check_unsharded(kv_pages, table.pages, table.lengths, latent)
    counts = check_counts(counts, latent.shape[0], latent.shape[1])
    return _write(kv_pages, table, latent.astype(kv_pages.dtype), counts)


def _write(kv_pages: jax.Array, table: PageTable, latent: jax.Array, counts: jax.Array) -> jax.Array:
    num_pages, page_size, _ = kv_pages.shape
    step = jnp.arange(latent.shape[1], dtype=jnp.int32)[None]
    page, offset, present = locate(table.pages, (table.lengths - counts)[:, None] + step, page_size, num_pages)
    # An index past the end is the one that a scatter drops; -1 would wrap.
    page = jnp.where(present & (step < counts[:, None]), page, num_pages)
    return kv_pages.at[page, offset].set(latent, mode="drop")


def gather_latent(
    kv_pages: Float[Array, "N page_size D"], table: PageTable, starts: Int[Array, " B"], num_tokens: int
) -> tuple[Float[Array, "B num_tokens D"], Bool[Array, "B num_tokens"]]:
    """Reads `num_tokens` consecutive cache rows of each request.

    Args:
      kv_pages: the cache of one layer.
      table: its page table.
      starts: the first logical position of each row; may be negative or past the end.
      num_tokens: how many positions to read from there; static.

    Returns:
      `(rows, valid)`. A row is valid when its position lies in `0 .. lengths[b] - 1` and its page is present; the
      others are 0, whatever the cache holds.

    Raises:
      TypeError: if `table` is not a `PageTable`, or `starts` not of an integer dtype.
      ValueError: if the shapes do not belong together, `num_tokens` is negative, or a known start does not fit int32.
    """
    check_cache(kv_pages, table)
    kv_pages, starts = jnp.asarray(kv_pages), as_int32("starts", starts)
    if starts.shape != table.lengths.shape:
        raise ValueError(f"starts must be [B={table.lengths.shape[0]}] for this table, got {starts.shape}")
    if num_tokens < 0:
        raise ValueError(f"num_tokens must be at least 0, got {num_tokens}")
    check_unsharded(kv_pages, table.pages, table.lengths, starts)
    positions = starts[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None]
    page, offset, present = locate(table.pages, positions, table.page_size, kv_pages.shape[0])
    valid = present & (positions < table.lengths[:, None])
    if not kv_pages.shape[0]:
        return jnp.zeros((*positions.shape, kv_pages.shape[2]), kv_pages.dtype), valid
    return jnp.where(valid[..., None], kv_pages[page, offset], 0), valid
