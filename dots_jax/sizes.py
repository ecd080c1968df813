"""How many bytes and pages the caches of a model take: arithmetic on a `DotsConfig`, no arrays."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from dots_jax.config import DotsConfig, LatentGeometry

PAGE_SIZE = 64

# One index key of the sparse indexer is fp8 with one float32 scale.
_INDEX_SCALE_BYTES = 4


def bytes_per_token(geometry: LatentGeometry, dtype: DTypeLike = jnp.bfloat16) -> int:
    """Bytes of one cache row of one layer."""
    return geometry.latent_dim * jnp.dtype(dtype).itemsize


def window_pages(window: int, draft_tokens: int = 1, page_size: int = PAGE_SIZE) -> int:
    """Most pages that the queries of one step can touch, which is also what a request holds in the steady state.

    The `draft_tokens` queries of a step see `window + draft_tokens - 1` consecutive tokens, and the worst alignment
    puts only the first of them in the first page: 9 pages for a window of 513 and one query, 10 for four queries.
    """
    for name, value in (("window", window), ("draft_tokens", draft_tokens), ("page_size", page_size)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    span = window + draft_tokens - 1
    return (span - 1 + page_size - 1) // page_size + 1


@dataclasses.dataclass(frozen=True)
class CacheBytes:
    """Bytes that one request's context takes.

    Attributes:
      full: the full layers' rows, which grow with the context.
      swa: the sliding layers' rows, which stop growing at the window.
      index: the sparse indexer's keys in the full layers.
    """

    full: int
    swa: int
    index: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.full + self.swa + self.index


def cache_bytes(
    config: DotsConfig, context: int, *, swa_tokens: int | None = None, dtype: DTypeLike = jnp.bfloat16
) -> CacheBytes:
    """Bytes of one request's caches over all decoder layers (draft layers excluded).

    Args:
      config: the model.
      context: tokens of the request.
      swa_tokens: tokens that a sliding layer keeps once the context is long; by default whole pages of the window,
        576 in the released model.
      dtype: of the cache rows; the indexer's keys are always one byte a column and one float32 scale.
    """
    if context < 0:
        raise ValueError(f"context: expected at least 0 tokens, got {context}")
    assert config.swa.window is not None  # DotsConfig checked it
    if swa_tokens is None:
        swa_tokens = window_pages(config.swa.window) * PAGE_SIZE
    sliding = len(config.sliding_layers)
    full = config.num_hidden_layers - sliding
    index_row = 0 if config.index_head_dim is None else config.index_head_dim + _INDEX_SCALE_BYTES
    return CacheBytes(
        full=full * context * bytes_per_token(config.full, dtype),
        swa=sliding * min(context, swa_tokens) * bytes_per_token(config.swa, dtype),
        index=full * context * index_row,
    )
