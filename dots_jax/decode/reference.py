"""The definition of the decode, in NumPy and float32: one query, one head axis, one softmax at a time.

It shares no code with the implementations that are compared with it. Nothing here is fast.
"""

import numpy as np
from jaxtyping import Array, Float, Int

from dots_jax.pages import PageTable


def swa_latent_decode_reference(
    q: Float[Array | np.ndarray, "B S H D"],
    kv_pages: Float[Array | np.ndarray, "N page_size D"],
    table: PageTable,
    *,
    window: int | None,
    scale: float,
    v_dim: int,
    counts: Int[Array | np.ndarray, " B"] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """What `swa_latent_decode` must compute; its docstring gives the meaning of the arguments.

    Returns:
      `(out, lse)`: float32[B, S, H, v_dim] and float32[B, S, H].
    """
    queries = np.asarray(q).astype(np.float32)
    # In int64, so that no length less the new tokens, or less the window, wraps.
    pages, lengths = np.asarray(table.pages), np.asarray(table.lengths).astype(np.int64)
    rows, steps, heads, _ = queries.shape
    num_tokens = np.full(rows, steps) if counts is None else np.clip(np.asarray(counts), 0, steps)
    out = np.zeros((rows, steps, heads, v_dim), np.float32)
    lse = np.full((rows, steps, heads), -np.inf, np.float32)
    for b in range(rows):
        for j in range(num_tokens[b]):
            position = lengths[b] - num_tokens[b] + j
            keys = visible_keys(kv_pages, pages[b], table.page_size, position, window)
            if len(keys):
                out[b, j], lse[b, j] = attend(queries[b, j], keys, scale, v_dim)
    return out, lse


def visible_keys(
    kv_pages: Float[Array | np.ndarray, "N page_size D"],
    row: np.ndarray,
    page_size: int,
    position: int,
    window: int | None,
) -> np.ndarray:
    """The float32[K, D] cache rows that the query at `position` sees, oldest first."""
    first = 0 if window is None else max(0, position - window + 1)
    slots = [
        (row[k // page_size], k % page_size)
        for k in range(first, min(position + 1, len(row) * page_size))
        if 0 <= row[k // page_size] < len(kv_pages)
    ]
    if not slots:
        return np.zeros((0, kv_pages.shape[2]), np.float32)
    page_ids, offsets = np.array(slots).T
    return np.asarray(kv_pages[page_ids, offsets]).astype(np.float32)


def attend(q: np.ndarray, keys: np.ndarray, scale: float, v_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Softmax attention of float32[H, D] queries over float32[K, D] keys whose first `v_dim` columns are the values."""
    scores = (q @ keys.T) * np.float32(scale)
    top = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=1, keepdims=True)
    return weights @ keys[:, :v_dim] / total, (top + np.log(total))[:, 0]
