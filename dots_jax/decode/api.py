"""The decode's entry point: arguments checked once, then the implementation chosen."""

from functools import partial
from typing import Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dots_jax.decode import implementations
from dots_jax.decode.checks import check_counts, check_decode, check_unsharded
from dots_jax.pages import PageTable
from dots_jax.pages.checks import INT32_MAX, as_int32


@overload
def swa_latent_decode(
    q: jax.Array,
    kv_pages: jax.Array,
    table: PageTable,
    *,
    window: int | None,
    scale: float,
    v_dim: int,
    counts: jax.Array | None = None,
    return_lse: Literal[False] = False,
    implementation: str | None = None,
) -> jax.Array: ...


@overload
def swa_latent_decode(
    q: jax.Array,
    kv_pages: jax.Array,
    table: PageTable,
    *,
    window: int | None,
    scale: float,
    v_dim: int,
    counts: jax.Array | None = None,
    return_lse: Literal[True],
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]: ...


def swa_latent_decode(
    q: Float[Array, "B S H D"],
    kv_pages: Float[Array, "N page_size D"],
    table: PageTable,
    *,
    window: int | None,
    scale: float,
    v_dim: int,
    counts: Int[Array, " B"] | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Float[Array, "B S H v_dim"] | tuple[Float[Array, "B S H v_dim"], Float[Array, "B S H"]]:
    """Attention of this step's queries over the latent window that the page table names.

    Query j of row b sits at position `p = lengths[b] - S + j` and sees the keys `max(0, p - window + 1) .. p`. The
    values are the first `v_dim` columns of the same cache rows: out = softmax(scale q K^T) K[:, :v_dim], scores and
    softmax in float32. A key is absent when its page is outside the table, negative, or not in the pool. Keys that are
    absent, or that no query of their row can see in this step, never contribute, whatever their bytes are. A query
    without a visible key gives exactly 0 and LSE -inf.

    Args:
      q: absorbed queries, bfloat16, float16 or float32.
      kv_pages: the latent cache of one layer, in q's dtype, after this step's `write_latent`.
      table: page table of 64-token pages; its lengths include this step's S tokens.
      window: visible keys per query in tokens, the current one included (513 for the released model); None is full
        attention. Static.
      scale: softmax scale. Static.
      v_dim: value width in columns, 1..D. Static.
      counts: for ragged rows, how many of the S queries row b has: query j < counts[b] then sits at
        `lengths[b] - counts[b] + j`, the others give 0 and LSE -inf. Values outside 0..S act as the nearest bound.
      return_lse: also return the natural-log sum of exponentials.
      implementation: "xla" (any device), "mosaic_gpu" (the Pallas kernel, Hopper), "interpret" (the same kernel
        simulated on the CPU), or None: the best one for where the arrays live.

    Returns:
      The output in q's dtype, or `(out, lse)` with lse float32[B, S, H].

    Raises:
      RuntimeError: if the table's page size is not 64, or the table is None.
      ValueError: if the shapes do not belong together, `v_dim`, `window` or `scale` is out of range, or the
        implementation is unknown.
      TypeError: if q and the cache differ in dtype or have another than the three above.
      NotImplementedError: if the implementation asked for cannot run here; the message lists why.
    """
    check_decode(q, kv_pages, table, window, scale, v_dim)
    # Whoever maps a function over a table may have put anything in it.
    pages, lengths = as_int32("pages", table.pages), as_int32("lengths", table.lengths)
    counts = check_counts(counts, q.shape[0], q.shape[1])
    q, kv_pages = jnp.asarray(q), jnp.asarray(kv_pages)
    check_unsharded(q, kv_pages, pages, lengths, counts)
    # Positions are int32, so a window of that many tokens reaches everything.
    window = None if window is None or window >= INT32_MAX else int(window)
    scale, v_dim = float(scale), int(v_dim)
    decode = implementations.choose(implementation, q, kv_pages, table, window=window, v_dim=v_dim)
    arrays = (q, kv_pages, pages, lengths, counts)
    out, lse = _run(decode, *arrays, window=window, scale=scale, v_dim=v_dim)
    return (out, lse) if return_lse else out


@partial(jax.jit, static_argnums=0, static_argnames=("window", "scale", "v_dim"))
def _run(
    decode: implementations.Decode, *arrays: jax.Array, window: int | None, scale: float, v_dim: int
) -> tuple[jax.Array, jax.Array]:
    """Without this, a call outside `jit` would compile the loops of an implementation anew each time."""
    return decode(*arrays, window=window, scale=scale, v_dim=v_dim)
