"""Plan A: two blocks share a tile of 64 query rows, each owning half of the latent columns.

Block `half` holds value columns [half * v_dim / 2, ...) and half of the rope columns, of the queries and of every page.
Each of its two warpgroups owns half of those value columns again: it loads them, and accumulates their part of the
output. Keys come in steps of `block_tokens`; the warpgroups take turns in computing the scores of a step. Scores need
all columns, so the two blocks add their partial scores (`exchange.py`). What a warpgroup does for its step i:

    scores(i), send, [output of step i - 1], receive, softmax, publish weights and maximum, output of step i

so the exchange hides behind the other warpgroup's step. `docs/kernel.md` draws the schedule.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.swa_latent_decode import exchange
from pallas_kernels.swa_latent_decode.column_split_memory import ROWS, WARPGROUP, Memory, Static, allocate
from pallas_kernels.swa_latent_decode.column_split_tile import Tile, query_positions
from pallas_kernels.swa_latent_decode.config import Config
from pallas_kernels.swa_latent_decode.visible import tile_span


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
    """Partial outputs and LSEs of every split; arguments as in `api.decode`."""
    batch, seq, heads, width = q.shape
    num_pages, _, _ = kv_pages.shape
    rows, tiles, splits = seq * heads, config.num_tiles(seq, heads), config.splits
    static = Static(
        seq=seq,
        heads=heads,
        columns=v_dim // 4,
        rope=(width - v_dim) // 2,
        window=window,
        scale=scale,
        num_pages=num_pages,
        table_width=pages.shape[1],
        splits=splits,
        stages=config.stages,
        tokens=config.block_tokens,
        dtype=q.dtype,
        interpret=interpret is not None,
    )
    q = q.reshape(batch, rows, width)
    if rows % ROWS:
        q = jnp.pad(q, ((0, 0), (0, tiles * ROWS - rows), (0, 0)))
    grid = (batch, splits, tiles)
    out_dtype = q.dtype if splits == 1 else jnp.float32
    out_type = [
        jax.ShapeDtypeStruct((splits, batch, tiles * ROWS, v_dim), out_dtype),
        jax.ShapeDtypeStruct((splits, batch, tiles * ROWS), jnp.float32),
    ]
    if interpret is not None:
        out_type.append(exchange.simulation_scratch(grid, static.tokens))
    kernel = plgpu.kernel(
        functools.partial(_kernel, static),
        out_type=tuple(out_type),
        grid=grid,
        grid_names=("batch", "split", "tile"),
        cluster=(2,),
        cluster_names=(exchange.HALF_AXIS,),
        num_threads=2,
        thread_name=WARPGROUP,
        interpret=interpret,
        kernel_name="swa_latent_decode_column_split",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    out, lse, *_ = kernel(q, kv_pages, pages.astype(jnp.int32), lengths.astype(jnp.int32), counts.astype(jnp.int32))
    out = out[:, :, :rows].reshape(splits, batch, seq, heads, v_dim)
    return out, lse[:, :, :rows].reshape(splits, batch, seq, heads)


def _kernel(static: Static, q, kv, pages, lengths, counts, out, lse, *inbox):
    """Allocates. q [B, tiles * 64, D], kv [N, 64, D], out [splits, B, tiles * 64, v_dim]."""
    scratch = allocate(static)
    names = [name for name, ref in scratch.items() if ref is not None]

    def body(*refs):
        held = dict.fromkeys(scratch) | dict(zip(names, refs, strict=True))
        _tile(static, Memory(**held), q, kv, pages, lengths, counts, out, lse, *inbox)

    pl.run_scoped(body, *(scratch[name] for name in names), collective_axes=WARPGROUP)


def _tile(static: Static, memory: Memory, q, kv, pages, lengths, counts, out, lse, global_inbox=None):
    """One tile of 64 query rows over the steps of one split."""
    batch, split, tile = lax.axis_index("batch"), lax.axis_index("split"), lax.axis_index("tile")
    # A length far below 0 less the count would wrap to a position that exists.
    length, count = jnp.maximum(lengths[batch], 0), jnp.clip(counts[batch], 0, static.seq)
    span = tile_span(
        length,
        count,
        first_row=tile * ROWS,
        tile_rows=ROWS,
        heads=static.heads,
        window=static.window,
        split=split,
        splits=static.splits,
        table_width=static.table_width,
        tokens=static.tokens,
    )
    if global_inbox is not None:
        global_inbox = global_inbox.at[batch, split, tile]
    inbox, _ = memory.shared
    rows = pl.ds(tile * ROWS, ROWS)
    work = Tile(
        static=static,
        memory=memory,
        mailbox=exchange.Mailbox(inbox, memory.peer_sent, global_inbox, memory.met),
        q=q.at[batch, rows],
        kv=kv,
        pages=pages,
        batch=batch,
        span=span,
        position=query_positions(static, tile, length, count),
        half=lax.axis_index(exchange.HALF_AXIS),
        wg=lax.axis_index(WARPGROUP),
    )
    work.finish(work.walk(), out.at[split, batch, rows], lse.at[split, batch, rows])
