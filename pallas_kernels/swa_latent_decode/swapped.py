"""The body for few query rows: tokens on the M side of the tensor-core instruction, query rows on the N side.

One block works on one (sequence, tile of at most 32 query rows, split); nothing is exchanged between blocks. A producer
warpgroup keeps a ring of page chunks full, one warpgroup makes probabilities, two accumulate the transposed output. The
schedule is drawn in docs/kernel-swapped.md.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.swa_latent_decode import swapped_roles
from pallas_kernels.swa_latent_decode.config import PAGE_SIZE, Config
from pallas_kernels.swa_latent_decode.ring import CHUNK, RingShape
from pallas_kernels.swa_latent_decode.swapped_table import Call, Table


def decode_splits(
    q: Float[Array, "B S H D"],
    kv_pages: Float[Array, "N 64 D"],
    pages: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    counts: Int[Array, " B"],
    *,
    window: int | None,
    scale: float,
    v_dim: int,
    config: Config,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[Float[Array, "splits B S H V"], Float[Array, "splits B S H"]]:
    """Partial results of every split.

    Args as in `api.decode`, with the configuration chosen and `interpret` resolved.

    Returns:
      Normalised outputs, in q's dtype for one split and float32 for more, and their natural-log LSE in float32.
    """
    batch, seq, heads, width = q.shape
    rows, tiles = seq * heads, config.num_tiles(seq, heads)
    padded = tiles * config.tile_rows
    q = q.reshape(batch, rows, width)
    if padded != rows:
        q = jnp.pad(q, ((0, 0), (0, padded - rows), (0, 0)))
    out, lse = _kernel(q, v_dim, seq, heads, window, scale, config, interpret)(q, kv_pages, pages, lengths, counts)
    out = out[:, :, :rows].reshape(config.splits, batch, seq, heads, v_dim)
    return out, lse[:, :, :rows].reshape(config.splits, batch, seq, heads)


def _kernel(q, v_dim: int, seq: int, heads: int, window: int | None, scale: float, config: Config, interpret):
    """The kernel for `q` [B, padded rows, D]: returns (out [splits, B, rows, v_dim], lse [splits, B, rows])."""
    batch, rows, width = q.shape
    shape = RingShape(width, v_dim, config.tile_rows)
    call = Call(
        shape=shape,
        seq=seq,
        heads=heads,
        window=window,
        scale=scale,
        splits=config.splits,
    )
    return plgpu.kernel(
        functools.partial(_body, call=call),
        out_type=(
            jax.ShapeDtypeStruct((config.splits, batch, rows, v_dim), q.dtype if config.splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct((config.splits, batch, rows), jnp.float32),
        ),
        grid=(batch, rows // config.tile_rows, config.splits),
        grid_names=("batch", "tile", "split"),
        num_threads=shape.output_groups + 2,
        thread_name="wg",
        scratch_types=_scratch(shape, q.dtype),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=shape.reduction_bytes,
        ),
        interpret=False if interpret is None else interpret,
        kernel_name="swa_latent_decode_swapped",
    )


def _scratch(shape: RingShape, dtype) -> dict[str, Any]:
    tiling = plgpu.TilingTransform((8, CHUNK))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
    tiled = (tiling, swizzle)
    return {
        "q_smem": plgpu.SMEM((shape.chunks, shape.rows, CHUNK), dtype, transforms=tiled),
        "ring": plgpu.SMEM((shape.slots, PAGE_SIZE, CHUNK), dtype, transforms=tiled),
        "p_smem": plgpu.SMEM((2, shape.rows, PAGE_SIZE), dtype, transforms=tiled),
        "alpha_smem": plgpu.SMEM((2, shape.rows), jnp.float32),
        "inverse_smem": plgpu.SMEM((shape.rows,), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=shape.chunks),
        "full": plgpu.Barrier(num_barriers=shape.slots),  # a chunk has landed
        "consumed": plgpu.Barrier(num_barriers=shape.slots),  # its slot may be overwritten
        "p_full": plgpu.Barrier(num_barriers=2),
        "p_empty": plgpu.Barrier(num_arrivals=shape.output_groups, num_barriers=2),
        "finished": plgpu.Barrier(),
    }


def _body(q, kv_pages, pages, lengths, counts, out, lse, *, call: Call, **smem):
    """Gives each warpgroup its role.

    Args:
      q: [B, padded rows, D].
      kv_pages: [N, 64, D].
      pages: int32 [B, P].
      lengths: int32 [B].
      counts: int32 [B].
      out: [splits, B, padded rows, v_dim].
      lse: float32 [splits, B, padded rows].
      call: What is static.
      smem: See `_scratch`.
    """
    group = lax.axis_index("wg")
    output_groups = call.shape.output_groups
    # Each role works out its pages for itself: values made before the branch would sit in everybody's registers.
    table = functools.partial(Table.of_block, pages, lengths, counts, kv_pages.shape[0], call)

    @pl.when(group < output_groups)
    def _():
        swapped_roles.accumulate(out, table, group, call, **smem)

    @pl.when(group == output_groups)
    def _():
        swapped_roles.score(lse, table, call, **smem)

    @pl.when(group == output_groups + 1)
    def _():
        swapped_roles.load(q, kv_pages, table, call, **smem)
