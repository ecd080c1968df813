"""The entry to the kernel: check what the bodies rely on, pick a configuration, run the body, merge the splits."""

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.swa_latent_decode import column_split, combine, swapped
from pallas_kernels.swa_latent_decode.config import SMEM_BYTES_PER_BLOCK, Config, default_config, unsupported_reason

Interpret = bool | plgpu.InterpretGPUParams

# Each body takes the arguments of `decode` with `config` filled in and `interpret` as the parameters or None, and
# returns normalised partial outputs [splits, B, S, H, v_dim] (q's dtype for one split, float32 for more) and their
# natural-log LSE float32 [splits, B, S, H]; a split in which a query sees no key gives 0 and -inf.
_BODIES: dict[str, Callable[..., tuple[jax.Array, jax.Array]]] = {
    "column_split": column_split.decode_splits,
    "swapped": swapped.decode_splits,
}

# Simulated threads: 2 blocks of 2 warpgroups, each holding a thread of the CPU client while it waits.
_MIN_INTERPRET_THREADS = 16


def decode(
    q: Float[Array, "B S H D"],
    kv_pages: Float[Array, "N 64 D"],
    pages: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    counts: Int[Array, " B"],
    *,
    window: int | None,
    scale: float,
    v_dim: int,
    config: Config | None = None,
    interpret: Interpret = False,
) -> tuple[Float[Array, "B S H V"], Float[Array, "B S H"]]:
    """Sliding-window attention of a few new tokens over paged latents, in one pass over the pages.

    Row j of S sits at position `lengths[b] - counts[b] + j` for `j < counts[b]` and sees the `window` keys that end
    there; the other rows give 0 and LSE -inf, as does a query with no visible key. A page is absent when its id is
    negative or >= N, or when it lies past the table; only pages holding a visible key are read.

    Args:
      q: Queries, bfloat16 or float16, latent part first, then rope.
      kv_pages: The latent cache in the same dtype, 64 tokens to a page.
      pages: int32 physical page of each logical page.
      lengths: int32 tokens held by each row, the new ones included.
      counts: int32 query tokens of each row, at most S.
      window: Visible keys per query, the current token counted; None is full attention.
      scale: Factor on the scores.
      v_dim: Leading columns of a cache row that are values.
      config: How to run it; by default what `default_config` picks.
      interpret: Simulate the kernel on the CPU. True checks for data races too; pass parameters to choose.

    Returns:
      Output in q's dtype and the natural-log sum of exponentials, float32.

    Raises:
      ValueError: If `unsupported_reason` has one for these shapes, or `config` does not fit them.
      TypeError: If `config` is no `Config`.
      RuntimeError: If `cannot_simulate` has a reason and `interpret` is not False.
    """
    batch, seq, heads, width = q.shape
    num_pages, page_size, _ = kv_pages.shape
    shapes: dict[str, Any] = {
        "batch": batch,
        "seq": seq,
        "heads": heads,
        "width": width,
        "v_dim": v_dim,
        "window": window,
        "table_width": pages.shape[1],
    }
    reason = unsupported_reason(**shapes, page_size=page_size, num_pages=num_pages, dtype=q.dtype)
    if reason is not None:
        raise ValueError(f"the Pallas decode kernel cannot run: {reason}")
    config = default_config(**shapes, dtype=q.dtype) if config is None else config
    if not isinstance(config, Config):
        raise TypeError(f"config must be a Config, got {type(config).__name__}")
    smem_bytes = config.smem_bytes(width, v_dim)
    if smem_bytes > SMEM_BYTES_PER_BLOCK:
        raise ValueError(f"{config} needs {smem_bytes} bytes of shared memory, a block has {SMEM_BYTES_PER_BLOCK}")
    outs, lses = _BODIES[config.plan](
        q,
        kv_pages,
        pages,
        lengths,
        counts,
        window=window,
        scale=scale,
        v_dim=v_dim,
        config=config,
        interpret=interpret_params(interpret),
    )
    return combine.merge_splits(outs, lses, q.dtype)


def interpret_params(interpret: Interpret) -> plgpu.InterpretGPUParams | None:
    """Parameters of the simulation, or None to run on the GPU.

    Raises:
      RuntimeError: If the simulation cannot run here.
    """
    if interpret is False:
        return None
    if reason := cannot_simulate():
        raise RuntimeError(reason)
    return plgpu.InterpretGPUParams(detect_races=True) if interpret is True else interpret


def cannot_simulate() -> str | None:
    """Why a simulation started here would hang, or fail far from the cause; None when it can run.

    - Each simulated warpgroup holds a thread of the CPU client while it waits.
    - Those threads do not see what `with jax.enable_x64(...)` changed for the one that called.
    - Several devices would share one set of simulated barriers.
    """
    threads = os.environ.get("NPROC", "")
    if not (threads.isdecimal() and int(threads) >= _MIN_INTERPRET_THREADS):
        return (
            f"simulating the kernel needs NPROC={_MIN_INTERPRET_THREADS} or more in the environment before jax is "
            f"imported (found {threads!r}): each simulated warpgroup holds a thread of the CPU client, "
            "and too few of them deadlock"
        )
    with ThreadPoolExecutor(1) as other_thread:
        if other_thread.submit(_wide).result() != _wide():
            return (
                "simulating the kernel needs one 64-bit mode on all threads: set jax_enable_x64 for the process "
                "instead of entering jax.enable_x64(...) on this thread"
            )
    mesh = jax.sharding.get_abstract_mesh()
    if (devices := math.prod(mesh.shape[axis] for axis in mesh.manual_axes)) > 1:
        return f"simulating the kernel needs a mesh of one device, this shard_map has {devices}"
    return None


def _wide() -> bool:
    return jax.dtypes.canonicalize_dtype("int64") == "int64"


__all__ = ["Config", "cannot_simulate", "decode", "default_config", "interpret_params", "unsupported_reason"]
