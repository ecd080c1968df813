"""The decode in plain XLA operations: any device, any shape.

For each row only the tokens its window can reach are gathered, in blocks of bounded size, so neither time nor memory
depends on the context length, the table's width or the pool's size. `window=None` visits the blocks that the row's
length reaches.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dots_jax.decode.positions import locate

# One block holds any window up to 4 k tokens; longer ones are visited block by block with a running softmax.
BLOCK_TOKENS = 4096 + 64

# A CPU takes rows in groups of so many keys, four rows of the released model: their products run side by side, and
# what they gather stays in its cache.
GROUP_TOKENS = 4 * 544

# The products are fastest on a CPU when the number of keys is a multiple of its vector width.
TOKEN_MULTIPLE = 16


class _Softmax(NamedTuple):
    """A softmax in progress over the keys seen so far, for the float32 rows [S, H]."""

    top: Float[Array, "S H"]
    total: Float[Array, "S H"]
    out: Float[Array, "S H v_dim"]


def decode(
    q: Float[Array, "B S H D"],
    kv_pages: Float[Array, "N page_size D"],
    pages: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    counts: Int[Array, " B"],
    *,
    window: int | None,
    scale: float,
    v_dim: int,
) -> tuple[Float[Array, "B S H v_dim"], Float[Array, "B S H"]]:
    """`swa_latent_decode` on checked arguments; returns `(out, lse)`."""
    if not kv_pages.shape[0] or not pages.shape[1]:
        return jnp.zeros((*q.shape[:3], v_dim), q.dtype), jnp.full(q.shape[:3], -jnp.inf, jnp.float32)
    capacity = pages.shape[1] * kv_pages.shape[1]
    reach = capacity if window is None else min(window + q.shape[1] - 1, capacity)
    tokens = -(-reach // TOKEN_MULTIPLE) * TOKEN_MULTIPLE
    row = partial(_decode_row, kv_pages=kv_pages, tokens=tokens, window=window, scale=scale, v_dim=v_dim)
    group = GROUP_TOKENS // tokens
    # Rows one by one where the group is a single one: under `vmap` a loop over blocks would run as long as its longest.
    by_group = partial(jax.lax.map, lambda operands: row(*operands), batch_size=group if group > 1 else None)
    return jax.lax.platform_dependent(
        q,
        pages,
        lengths,
        counts,
        cpu=lambda *rows: by_group(rows),
        default=lambda *rows: jax.vmap(row)(*rows),
    )


def _decode_row(
    q: Float[Array, "S H D"],
    pages: Int[Array, " P"],
    length: Int[Array, ""],
    count: Int[Array, ""],
    *,
    kv_pages: Float[Array, "N page_size D"],
    tokens: int,
    window: int | None,
    scale: float,
    v_dim: int,
) -> tuple[Float[Array, "S H v_dim"], Float[Array, "S H"]]:
    """One row; `tokens` is the most keys that its queries can reach together."""
    steps, heads, _ = q.shape
    step = jnp.arange(steps)
    # Where the row's first query sits; a length far below 0 would wrap to a position that exists.
    origin = jnp.maximum(length, 0) - count
    position = jnp.where(step < count, origin + step, -1)
    # The oldest position that any query of this row sees.
    start = jnp.zeros_like(length) if window is None else jnp.maximum(jnp.maximum(origin, 0) - (window - 1), 0)
    block = partial(_attend_block, q, kv_pages, pages, position, window=window, scale=scale, v_dim=v_dim)
    state = _Softmax(
        jnp.full((steps, heads), -jnp.inf, jnp.float32),
        jnp.zeros((steps, heads), jnp.float32),
        jnp.zeros((steps, heads, v_dim), jnp.float32),
    )
    # The first block stands outside the loop: in `jax.shard_map` a loop has to start with values that vary over the
    # same devices as its results, which the constants above do not.
    state = block(state, start, tokens=min(tokens, BLOCK_TOKENS))
    if tokens > BLOCK_TOKENS:
        end = jnp.minimum(jnp.max(position) + 1, pages.shape[0] * kv_pages.shape[1])
        num_blocks = -(-jnp.maximum(end - start, 0) // BLOCK_TOKENS)
        state = jax.lax.fori_loop(
            1, num_blocks, lambda i, state: block(state, start + i * BLOCK_TOKENS, tokens=BLOCK_TOKENS), state
        )
    seen = state.total > 0
    total = jnp.where(seen, state.total, 1.0)
    lse = jnp.where(seen, state.top + jnp.log(total), -jnp.inf)
    return (state.out / total[..., None]).astype(q.dtype), lse


def _attend_block(
    q: Float[Array, "S H D"],
    kv_pages: Float[Array, "N page_size D"],
    pages: Int[Array, " P"],
    position: Int[Array, " S"],
    state: _Softmax,
    first: Int[Array, ""],
    *,
    tokens: int,
    window: int | None,
    scale: float,
    v_dim: int,
) -> _Softmax:
    """Adds the `tokens` keys from position `first` on to a softmax in progress."""
    key = first + jnp.arange(tokens)
    page, offset, present = locate(pages[None], key[None], kv_pages.shape[1], kv_pages.shape[0])
    readable = present[0] & (key <= jnp.max(position))
    # Masking the scores is not enough: a weight of 0 times a NaN is NaN again in the product with the values.
    keys = jnp.where(readable[:, None], kv_pages[page[0], offset[0]], 0)
    visible = readable[None] & (key[None] <= position[:, None])
    if window is not None:
        visible &= key[None] > position[:, None] - window
    return _update(q, keys, visible, state, scale=scale, v_dim=v_dim)


def _update(
    q: Float[Array, "S H D"],
    keys: Float[Array, "T D"],
    visible: Bool[Array, "S T"],
    state: _Softmax,
    *,
    scale: float,
    v_dim: int,
) -> _Softmax:
    steps, heads, width = q.shape
    product = partial(jax.lax.dot_general, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    # Contracting the keys' own last axis spares a CPU the transposed copy that `q @ keys.T` makes in bfloat16.
    scores = product(q.reshape(steps * heads, width), keys, (((1,), (1,)), ((), ())))
    scores = scores.reshape(steps, heads, -1) * scale
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    top = jnp.maximum(state.top, jnp.max(scores, axis=-1))
    # -inf - -inf is NaN: shift by 0 while nothing has been seen.
    shift = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(scores - shift[..., None])
    rescale = jnp.exp(state.top - shift)
    # A product with a slice of the keys copies the slice first, so a few columns that are no values come along.
    values = keys if 4 * v_dim >= 3 * width else keys[:, :v_dim]
    out = product(weights.astype(keys.dtype).reshape(steps * heads, -1), values, (((1,), (0,)), ((), ())))
    return _Softmax(
        top,
        state.total * rescale + jnp.sum(weights, axis=-1),
        state.out * rescale[..., None] + out.reshape(steps, heads, -1)[..., :v_dim],
    )
