"""Static facts, shared memory and barriers of the column-split body."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.swa_latent_decode import exchange

ROWS = 64
"""Query rows of a tile."""

WARPGROUP = "warpgroup"
"""Name of the thread axis."""


@dataclasses.dataclass(frozen=True)
class Static:
    """Static facts of one launch.

    Attributes:
      seq: Query tokens per sequence.
      heads: Query heads.
      columns: Value columns that a warpgroup owns, a quarter of them.
      rope: Other columns that a block owns, half of them.
      window: Visible keys per query, or None.
      scale: Factor on the scores.
      num_pages: Physical pages.
      table_width: Columns of the page table.
      splits: Parts that the visible steps are cut into.
      stages: Steps in flight.
      tokens: Keys of a step.
      dtype: Of queries and cache.
      interpret: Whether the kernel is simulated.
    """

    seq: int
    heads: int
    columns: int
    rope: int
    window: int | None
    scale: float
    num_pages: int
    table_width: int
    splits: int
    stages: int
    tokens: int
    dtype: Any
    interpret: bool


@dataclasses.dataclass(frozen=True)
class Memory:
    """Shared memory and barriers of a block.

    Attributes:
      q_smem: [2, 64, columns], queries, by owning warpgroup.
      q_rope: [64, rope] or None.
      k_smem: [stages, 2, tokens, columns], keys and values, by owning warpgroup.
      k_rope: [stages, tokens, rope] or None.
      shared: float32 [2, 64, tokens], the peer's scores, in the bytes of [2, 2, 64, tokens], the weights (only the
        first of the inner two); by the warpgroup whose step it is.
      row_stat: float32 [2, 64], the running maximum after a step, by the warpgroup whose step it is.
      q_landed: The queries are there.
      k_landed: One per stage: the step is there.
      published: One per warpgroup: weights and maximum of its step are there.
      pair: Both warpgroups.
      peer_sent: One per warpgroup: the peer's scores are there.
      cluster_done: One per warpgroup: all four warpgroups of the cluster are past the output of its step.
      met: Only when simulated, see `exchange.Mailbox`.
    """

    q_smem: Any
    q_rope: Any
    k_smem: Any
    k_rope: Any
    shared: Any
    row_stat: Any
    q_landed: Any
    k_landed: Any
    published: Any
    pair: Any
    peer_sent: Any
    cluster_done: Any
    met: Any


def allocate(static: Static) -> dict[str, Any]:
    """What to allocate for each field of `Memory`; None for what this launch does without."""

    def smem(*shape, dtype=static.dtype):
        tiling = plgpu.TilingTransform((8, 64 // jnp.dtype(dtype).itemsize))  # pyright: ignore[reportAbstractUsage]
        swizzle = plgpu.SwizzleTransform(64)  # pyright: ignore[reportAbstractUsage]
        return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))

    copies, tokens = 3 if static.rope else 2, static.tokens
    return {
        "q_smem": smem(2, ROWS, static.columns),
        "q_rope": smem(ROWS, static.rope) if static.rope else None,
        "k_smem": smem(static.stages, 2, tokens, static.columns),
        "k_rope": smem(static.stages, tokens, static.rope) if static.rope else None,
        "shared": plgpu.RefUnion(smem(2, ROWS, tokens, dtype=jnp.float32), smem(2, 2, ROWS, tokens)),
        "row_stat": plgpu.SMEM((2, ROWS), jnp.float32),
        "q_landed": plgpu.Barrier(num_arrivals=copies),
        "k_landed": plgpu.Barrier(num_arrivals=copies, num_barriers=static.stages),
        "published": plgpu.Barrier(num_barriers=2),
        "pair": plgpu.Barrier(num_arrivals=2),
        "peer_sent": plgpu.Barrier(num_barriers=2),
        "cluster_done": plgpu.ClusterBarrier(collective_axes=(exchange.HALF_AXIS,), num_arrivals=2, num_barriers=2),
        "met": exchange.simulation_barrier() if static.interpret else None,
    }
