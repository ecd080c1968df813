"""Key/value buffers in host memory."""

from dots_jax.host.allocator import SlotAllocator
from dots_jax.host.allocator_group import AllocatorGroup
from dots_jax.host.capacity import (
    PoolDemand,
    pages_for_tokens,
    pages_from_bytes,
    pages_from_ratio,
    rank_share,
    share_budget,
)
from dots_jax.host.page_keys import page_keys

__all__ = [
    "AllocatorGroup",
    "PoolDemand",
    "SlotAllocator",
    "page_keys",
    "pages_for_tokens",
    "pages_from_bytes",
    "pages_from_ratio",
    "rank_share",
    "share_budget",
]
