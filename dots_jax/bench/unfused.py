"""The unfused decode: gather the window, two batched products with a mask and a softmax between them.

This is what an engine without a fused kernel runs, and what the benchmark's ratios are taken to. It trusts its input
(pages present, finite bytes) and rounds the scores to the model's dtype before the softmax, as such paths do; the
contract's guarantees are those of `dots_jax.swa_latent_decode`, not of this.
"""

import jax
import jax.numpy as jnp

from dots_jax.bench.shapes import PAGE_SIZE, Shape
from dots_jax.pages import PageTable


def gather_extent(shape: Shape) -> int:
    """Consecutive keys gathered for each row: all that a query of the row sees, rounded up to 8."""
    return min(-(-shape.keys_read // 8) * 8, shape.context)


def unfused_decode(shape: Shape, kv_pages: jax.Array, q: jax.Array, table: PageTable) -> jax.Array:
    """`[B, S, H, v_dim]` by `jnp.take` and two batched products; arguments as in `swa_latent_decode`."""
    extent = gather_extent(shape)
    lengths = table.lengths[:, None]
    position = lengths - shape.seq + jnp.arange(shape.seq)
    key = jnp.maximum(lengths - extent, 0) + jnp.arange(extent)
    page = jnp.take_along_axis(table.pages, key // PAGE_SIZE, axis=1)
    rows = jnp.take(kv_pages.reshape(-1, shape.width), page * PAGE_SIZE + key % PAGE_SIZE, axis=0, mode="clip")
    scores = jnp.einsum("bshd,bkd->bshk", q, rows).astype(jnp.float32) * shape.scale
    visible = (key[:, None] <= position[..., None]) & (page[:, None] >= 0)
    if shape.window is not None:
        visible &= key[:, None] > position[..., None] - shape.window
    weights = jax.nn.softmax(jnp.where(visible[:, :, None], scores, jnp.finfo(jnp.float32).min), axis=-1)
    return jnp.einsum("bshk,bkv->bshv", weights.astype(q.dtype), rows[..., : shape.v_dim])
