"""The decode as the Pallas kernel of `pallas_kernels.swa_latent_decode`: on a Hopper GPU, or simulated on the CPU.

The kernel package is imported on first use, because Mosaic GPU takes longer to import than all of `dots_jax`. The two
light parts of Pallas are imported here: each adds a setting to those that JAX looks up traces by, so that a function
whose first trace imported them would be traced again by its second call.
"""

from typing import Any

import jax
import jax.experimental.pallas
import jax.experimental.pallas.fuser  # the simulation imports it

from dots_jax.decode.checks import explicit_axes
from dots_jax.pages import PageTable


def decode(q, kv_pages, pages, lengths, counts, *, window, scale, v_dim, interpret=False):
    """`swa_latent_decode` on checked arguments; returns `(out, lse)`."""
    from pallas_kernels import swa_latent_decode as kernel

    return kernel.decode(
        q, kv_pages, pages, lengths, counts, window=window, scale=scale, v_dim=v_dim, interpret=interpret
    )


def interpret(q, kv_pages, pages, lengths, counts, *, window, scale, v_dim):
    """The kernel simulated on the CPU, data races detected."""
    return decode(q, kv_pages, pages, lengths, counts, window=window, scale=scale, v_dim=v_dim, interpret=True)


def cannot_simulate() -> str | None:
    """Why the simulation cannot run here, or None when it can."""
    from pallas_kernels import swa_latent_decode as kernel

    return kernel.cannot_simulate()


def cannot_run(
    q: jax.Array, kv_pages: jax.Array, table: PageTable, *, window: int | None, v_dim: int, device: Any
) -> str | None:
    """Why the kernel cannot run on these arguments, or None when it can.

    Args:
      q: the queries.
      kv_pages: the cache.
      table: the page table.
      window: visible keys or None.
      v_dim: value width.
      device: the `jax.Device` where it would run; None asks about the shapes alone.
    """
    if device is not None and (reason := _wrong_device(device)):
        return reason
    if axes := explicit_axes(q, kv_pages):
        return f"q or the cache is sharded over the explicit mesh axes {axes}: call it in jax.shard_map"
    from pallas_kernels import swa_latent_decode as kernel

    return kernel.unsupported_reason(
        batch=q.shape[0],
        seq=q.shape[1],
        heads=q.shape[2],
        width=q.shape[3],
        v_dim=v_dim,
        page_size=table.page_size,
        window=window,
        num_pages=kv_pages.shape[0],
        table_width=table.pages.shape[1],
        dtype=q.dtype,
    )


def _wrong_device(device: Any) -> str | None:
    if device.platform != "gpu":
        return f"it needs a Hopper GPU (compute capability 9.0), the arrays live on {device} ({device.device_kind})"
    capability = getattr(device, "compute_capability", "unknown")
    if capability != "9.0":
        return f"it needs compute capability 9.0 (Hopper), {device} ({device.device_kind}) has {capability}"
    return None
