"""Key/value buffers in host memory.

`allocate_host_kv` builds one from a `KVSpec` or a `LatentSpec`; see `docs/host-buffers.md` for layouts, sizes and which
transfer goes with which layout.
"""

from dots_jax.host.allocate import allocate_host_kv
from dots_jax.host.allocator import SlotAllocator
from dots_jax.host.allocator_group import AllocatorGroup
from dots_jax.host.budget import HostMemoryError, available_host_memory, host_memory_budget
from dots_jax.host.buffers import AsymmetricHostKV, LatentHostKV, SymmetricHostKV
from dots_jax.host.capacity import (
    PoolDemand,
    pages_for_tokens,
    pages_from_bytes,
    pages_from_ratio,
    share_budget,
)
from dots_jax.host.device import DeviceKV, LayerKV
from dots_jax.host.drafts import with_drafts
from dots_jax.host.layerwise import LayerLoads, LoadedLayer
from dots_jax.host.layouts import IoBackend, Layout
from dots_jax.host.page_keys import page_keys
from dots_jax.host.pages import PageBuffer
from dots_jax.host.slots import SlotTypeError
from dots_jax.host.specs import KVSpec, LatentSpec, Spec
from dots_jax.host.store import PageStore
from dots_jax.host.store_backend import PageStoreError
from dots_jax.host.store_namespace import namespace_digest

__all__ = [
    "AllocatorGroup",
    "AsymmetricHostKV",
    "DeviceKV",
    "HostMemoryError",
    "IoBackend",
    "KVSpec",
    "LatentHostKV",
    "LatentSpec",
    "LayerKV",
    "LayerLoads",
    "Layout",
    "LoadedLayer",
    "PageBuffer",
    "PageStore",
    "PageStoreError",
    "PoolDemand",
    "SlotAllocator",
    "SlotTypeError",
    "Spec",
    "SymmetricHostKV",
    "allocate_host_kv",
    "available_host_memory",
    "host_memory_budget",
    "namespace_digest",
    "page_keys",
    "pages_for_tokens",
    "pages_from_bytes",
    "pages_from_ratio",
    "share_budget",
    "with_drafts",
]
