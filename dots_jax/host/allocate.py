"""Allocating host buffers, with every refusal before the first byte."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from dots_jax.host import layouts
from dots_jax.host.budget import check_budget
from dots_jax.host.buffers import CLASSES
from dots_jax.host.placement import Device
from dots_jax.host.specs import KVSpec, LatentSpec, Spec


def resolve_memory(memory_kind: str | Device, device: Device | None = None) -> tuple[Device, str]:
    """The device whose client owns the memory, and the memory kind there.

    Args:
      memory_kind: "pinned_host", "unpinned_host", or a CPU device (its ordinary memory).
      device: the accelerator for which host memory is wanted; the default device where not given.

    Raises:
      TypeError: neither a name nor a device.
      ValueError: the device does not offer that kind, or is not a CPU; naming what there is.
    """
    if not isinstance(memory_kind, str | jax.Device):
        raise TypeError(f"memory_kind: expected a name or a CPU device, got {type(memory_kind).__name__}.")
    if not isinstance(memory_kind, str):
        if memory_kind.platform != "cpu":
            raise ValueError(f"memory_kind: expected a CPU device for host memory, got {memory_kind}.")
        return memory_kind, memory_kind.default_memory().kind
    owner = jax.local_devices()[0] if device is None else device
    kinds = [memory.kind for memory in owner.addressable_memories() if memory.kind.endswith("_host")]
    if memory_kind not in kinds:
        raise ValueError(f"memory_kind: {owner} offers {', '.join(kinds)} or a CPU device, got {memory_kind!r}.")
    return owner, memory_kind


@functools.lru_cache(maxsize=64)
def _fresh_zeros(shape: tuple[int, ...], dtype: Any, sharding: SingleDeviceSharding) -> Callable[[], jax.Array]:
    # The type then says "host" inside `jit` too, so that results go back where their buffer was.
    pinned = sharding.memory_kind == "pinned_host"
    space = jax.memory.Space.Host if pinned else jax.memory.Space.Device
    return jax.jit(lambda: jax.device_put(jnp.zeros(shape, dtype), space), out_shardings=sharding)


def _zeros(shape: tuple[int, ...], dtype: Any, device: Device, kind: str) -> jax.Array:
    sharding = SingleDeviceSharding(device, memory_kind=kind)
    if device.platform == "cpu":
        # A fresh XLA buffer: one borrowed from NumPy could not be donated.
        return _fresh_zeros(shape, dtype, sharding)()
    # Straight into host memory: filling it on the device would take the whole buffer there first.
    return jax.device_put(np.zeros(shape, dtype), sharding)


def allocate_host_kv(
    spec: Spec,
    num_pages: int,
    *,
    layout: str,
    io_backend: str | None = None,
    memory_kind: str | Device = "pinned_host",
    memory_budget: int | None = None,
    device: Device | None = None,
    ranks_on_host: int = 1,
) -> Any:
    """Allocates a zeroed host buffer for `num_pages` pages.

    Args:
      spec: a `KVSpec` or a `LatentSpec`.
      num_pages: pages to hold.
      layout: "layer_first", "page_first", "page_first_direct" or "page_head".
      io_backend: "kernel", "direct" or None: the transfer path the buffer has to serve.
      memory_kind: "pinned_host", "unpinned_host", or a CPU device.
      memory_budget: bytes the buffer may take; `host_memory_budget()` where not given.
      device: the accelerator for which host memory is wanted; the default device where not given.
      ranks_on_host: processes that share the host, for the default budget.

    Returns:
      `AsymmetricHostKV` where K and V widths differ, `SymmetricHostKV` where they do not, `LatentHostKV` for a latent
      spec.

    Raises:
      TypeError: `spec` is neither.
      ValueError: the layout is not one this kind of buffer has, the path does not go with it, the dtype needs
        `jax_enable_x64`, there are no pages, or the memory kind does not exist. In this order, and before anything is
        allocated.
      HostMemoryError: it would take more bytes than the budget.
    """
    if not isinstance(spec, KVSpec | LatentSpec):
        raise TypeError(f"spec: expected a KVSpec or a LatentSpec, got {type(spec).__name__}.")
    kind = layouts.kind_of(spec)
    layouts.check_layout(spec, kind, layout)
    layouts.check_io_backend(kind, layout, io_backend)
    if (held := jax.dtypes.canonicalize_dtype(spec.dtype)) != spec.dtype:
        raise ValueError(f"spec.dtype: expected one that JAX keeps, got {spec.dtype}, which it holds as {held}.")
    if isinstance(num_pages, bool) or not isinstance(num_pages, int | np.integer):
        raise TypeError(f"num_pages: expected an integer, got {num_pages!r}.")
    if num_pages < 1:
        raise ValueError(f"num_pages: expected at least 1, got {num_pages}.")
    owner, memory = resolve_memory(memory_kind, device)
    check_budget(
        layouts.total_nbytes(spec, kind, layout, int(num_pages)),
        memory_budget=memory_budget,
        memory_kind=memory,
        device=owner,
        ranks_on_host=ranks_on_host,
    )
    shapes = layouts.leaf_shapes(spec, kind, layout, int(num_pages))
    leaves = {name: _zeros(shape, spec.dtype, owner, memory) for name, shape in shapes.items()}
    return CLASSES[kind](**leaves, spec=spec, layout=layout, io_backend=io_backend)
