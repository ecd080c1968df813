"""Plan A: two blocks share a tile of 64 query rows, each owning half of the latent columns.

Block `half` holds value columns [half * v_dim / 2, ...) and half of the rope columns, of the queries and of every page.
Each of its two warpgroups owns half of those value columns again: it loads them, and accumulates their part of the
output. Scores need all columns, so the two blocks add their partial scores (`exchange.py`); within a block the
warpgroups split the tokens of a page between them. `docs/kernel.md` draws the schedule.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.swa_latent_decode import exchange
from pallas_kernels.swa_latent_decode.accumulate import accumulate
from pallas_kernels.swa_latent_decode.config import PAGE_SIZE, Config
from pallas_kernels.swa_latent_decode.visible import next_present, row_limits, tile_span

_ROWS = 64
_TOKENS = PAGE_SIZE // 2  # of a page, for one warpgroup's scores
_TILE = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)
_COLUMN = plgpu.Layout.WGMMA.reduce(0)
_HALF, _WARPGROUP = exchange.HALF_AXIS, "warpgroup"


@dataclasses.dataclass(frozen=True)
class _Static:
    """Static facts of one launch. `columns` is what a warpgroup owns of v_dim, `rope` what a block owns of the rest."""

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
    dtype: Any
    interpret: bool


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
    static = _Static(
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
        dtype=q.dtype,
        interpret=interpret is not None,
    )
    q = q.reshape(batch, rows, width)
    if rows % _ROWS:
        q = jnp.pad(q, ((0, 0), (0, tiles * _ROWS - rows), (0, 0)))
    grid = (batch, splits, tiles)
    out_dtype = q.dtype if splits == 1 else jnp.float32
    out_type = [
        jax.ShapeDtypeStruct((splits, batch, tiles * _ROWS, v_dim), out_dtype),
        jax.ShapeDtypeStruct((splits, batch, tiles * _ROWS), jnp.float32),
    ]
    if interpret is not None:
        out_type.append(exchange.simulation_scratch(grid))
    kernel = plgpu.kernel(
        functools.partial(_kernel, static),
        out_type=tuple(out_type),
        grid=grid,
        grid_names=("batch", "split", "tile"),
        cluster=(2,),
        cluster_names=(_HALF,),
        num_threads=2,
        thread_name=_WARPGROUP,
        interpret=interpret,
        kernel_name="swa_latent_decode_column_split",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    out, lse, *_ = kernel(q, kv_pages, pages.astype(jnp.int32), lengths.astype(jnp.int32), counts.astype(jnp.int32))
    out = out[:, :, :rows].reshape(splits, batch, seq, heads, v_dim)
    return out, lse[:, :, :rows].reshape(splits, batch, seq, heads)


def _kernel(static: _Static, q, kv, pages, lengths, counts, out, lse, *inbox):
    """Allocates shared memory and barriers. q [B, tiles * 64, D], kv [N, 64, D], out [splits, B, tiles * 64, v_dim]."""

    def smem(*shape, dtype=static.dtype):
        tiling = plgpu.TilingTransform((8, 64 // jnp.dtype(dtype).itemsize))  # pyright: ignore[reportAbstractUsage]
        swizzle = plgpu.SwizzleTransform(64)  # pyright: ignore[reportAbstractUsage]
        return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))

    copies = 3 if static.rope else 2
    scratch = {
        "q_smem": smem(2, _ROWS, static.columns),
        "q_rope": smem(_ROWS, static.rope) if static.rope else None,
        "k_smem": smem(static.stages, 2, PAGE_SIZE, static.columns),
        "k_rope": smem(static.stages, PAGE_SIZE, static.rope) if static.rope else None,
        "shared": plgpu.RefUnion(smem(2, _ROWS, _TOKENS, dtype=jnp.float32), smem(2, _ROWS, _TOKENS)),
        "row_stat": plgpu.SMEM((2, _ROWS), jnp.float32),
        "q_landed": plgpu.Barrier(num_arrivals=copies),
        "k_landed": plgpu.Barrier(num_arrivals=copies, num_barriers=static.stages),
        "pair": plgpu.Barrier(num_arrivals=2),
        "peer_sent": plgpu.Barrier(num_barriers=2),
        "cluster_done": plgpu.ClusterBarrier(collective_axes=(_HALF,), num_arrivals=2),
        "met": exchange.simulation_barrier() if static.interpret else None,
    }
    names = [name for name, ref in scratch.items() if ref is not None]

    def body(*refs):
        held = dict.fromkeys(scratch) | dict(zip(names, refs, strict=True))
        _tile(static, q, kv, pages, lengths, counts, out, lse, inbox[0] if inbox else None, **held)

    pl.run_scoped(body, *(scratch[name] for name in names), collective_axes=_WARPGROUP)


def _tile(
    static: _Static, q, kv, pages, lengths, counts, out, lse, global_inbox,
    *, q_smem, q_rope, k_smem, k_rope, shared, row_stat, q_landed, k_landed, pair, peer_sent, cluster_done, met,
):  # fmt: skip
    """One tile of 64 query rows over the pages of one split."""
    batch, split, tile = lax.axis_index("batch"), lax.axis_index("split"), lax.axis_index("tile")
    half, wg = lax.axis_index(_HALF), lax.axis_index(_WARPGROUP)
    columns, stages = static.columns, static.stages
    length, count = lengths[batch], jnp.clip(counts[batch], 0, static.seq)
    span = tile_span(
        length,
        count,
        first_row=tile * _ROWS,
        tile_rows=_ROWS,
        heads=static.heads,
        window=static.window,
        split=split,
        splits=static.splits,
        table_width=static.table_width,
    )
    inbox, p_smem = shared
    mailbox = exchange.Mailbox(
        inbox, peer_sent, None if global_inbox is None else global_inbox.at[batch, split, tile], met
    )
    own_columns = pl.ds((half * 2 + wg) * columns, columns)
    own_rope = pl.ds(4 * columns + half * static.rope, static.rope)

    def load(source, value_slot, rope_slot, barrier):
        """Each warpgroup fetches the value columns it owns; the first one also the block's rope columns."""
        plgpu.copy_gmem_to_smem(source.at[:, own_columns], value_slot, barrier)
        if static.rope:

            @pl.when(wg == 0)
            def _():
                plgpu.copy_gmem_to_smem(source.at[:, own_rope], rope_slot, barrier)

    def load_page(page, slot):
        load(kv.at[page], k_smem.at[slot, wg], k_rope.at[slot] if static.rope else None, k_landed.at[slot])

    def following(column):
        return next_present(pages, batch, column, span.end_column, static.num_pages)

    def meet():
        plgpu.barrier_arrive(pair)
        plgpu.barrier_wait(pair)

    first = following(span.first_column)
    ahead = first
    any_page = first[0] < span.end_column

    @pl.when(any_page)
    def _():
        load(q.at[batch, pl.ds(tile * _ROWS, _ROWS)], q_smem.at[wg], q_rope, q_landed)

    for slot in range(stages):

        @pl.when(ahead[0] < span.end_column)
        def _(page=ahead[1], slot=slot):
            load_page(page, slot)

        ahead = following(ahead[0] + 1)

    rows = plgpu.broadcasted_iota(jnp.int32, (_ROWS,), 0, layout=_ROW) + tile * _ROWS
    position = row_limits(rows, length, count, heads=static.heads, seq=static.seq)

    @pl.when(any_page)
    def _():
        plgpu.barrier_wait(q_landed)

    def scores(slot, step):
        own = pl.ds(wg * _TOKENS, _TOKENS)
        # Always 0, which the compiler cannot see: it would keep 34 descriptors of the queries in registers and spill.
        zero = jnp.minimum(step, 0)

        def products(acc):
            for part in range(2):
                plgpu.wgmma(acc, q_smem.at[part + zero], k_smem.at[slot, part, own].transpose((1, 0)))
            if static.rope:
                plgpu.wgmma(acc, q_rope, k_rope.at[slot, own].transpose((1, 0)))
            return acc[...]

        return pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((_ROWS, _TOKENS), jnp.float32))

    def clear_unseen_rows(slot, first_token):
        """Rows of the page that no query of the tile sees become 0: their weight is 0, and 0 * NaN would be NaN."""
        edge = jnp.logical_or(first_token < span.first_key, first_token + (PAGE_SIZE - 1) > span.last_key)

        @pl.when(edge)
        def _():
            for start in range(0, columns, 32):
                part = k_smem.at[slot, wg, :, pl.ds(start, 32)]
                key = plgpu.broadcasted_iota(jnp.int32, (PAGE_SIZE, 32), 0, layout=_TILE) + first_token
                seen = jnp.logical_and(key >= span.first_key, key <= span.last_key)
                part[...] = jnp.where(seen, plgpu.load(part, layout=_TILE), jnp.zeros((), static.dtype))

    def page_step(state):
        step, column, ahead, acc, top, total = state
        slot = lax.rem(step, jnp.int32(stages))
        first_token = column * PAGE_SIZE
        plgpu.barrier_wait(k_landed.at[slot])
        partial = scores(slot, step)

        @pl.when(step > 0)
        def _():
            plgpu.barrier_wait(cluster_done)

        score = (partial + exchange.swap_partials(mailbox, partial, wg)) * (static.scale * math.log2(math.e))
        last = lax.broadcast_in_dim(position - (first_token + wg * _TOKENS), score.shape, [0])
        token = plgpu.broadcasted_iota(jnp.int32, score.shape, 1, layout=_TILE)
        seen = token <= last
        if static.window is not None:
            seen = jnp.logical_and(seen, token > last - static.window)
        score = jnp.where(seen, score, -jnp.inf)
        own_top = score.max(axis=1)
        row_stat.at[wg][...] = own_top
        meet()
        new_top = jnp.maximum(jnp.maximum(top, own_top), plgpu.load(row_stat.at[1 - wg], layout=_ROW))
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weight = jnp.exp2(score - lax.broadcast_in_dim(base, score.shape, [0]))
        rescale = jnp.exp2(top - base)
        total = total * rescale + weight.sum(axis=1)
        p_smem.at[wg][...] = weight.astype(static.dtype)
        clear_unseen_rows(slot, first_token)
        plgpu.commit_smem()
        meet()
        acc = acc * lax.broadcast_in_dim(rescale, acc.shape, [0])

        def products(acc_ref):
            for part in range(2):
                plgpu.wgmma(acc_ref, p_smem.at[part], k_smem.at[slot, wg, pl.ds(part * _TOKENS, _TOKENS)])

        acc = accumulate(acc, products, interpret=static.interpret)
        plgpu.commit_smem()  # one thread arrives for its warpgroup, so all four warps must be past their products
        plgpu.barrier_arrive(cluster_done)

        @pl.when(ahead[0] < span.end_column)
        def _():
            load_page(ahead[1], slot)

        return step + 1, following(column + 1)[0], following(ahead[0] + 1), acc, new_top, total

    acc = plgpu.layout_cast(jnp.zeros((_ROWS, columns), jnp.float32), _TILE)
    top = plgpu.layout_cast(jnp.full((_ROWS,), -jnp.inf, jnp.float32), _ROW)
    total = plgpu.layout_cast(jnp.zeros((_ROWS,), jnp.float32), _ROW)
    start = (jnp.int32(0), first[0], ahead, acc, top, total)
    *_done, acc, top, total = lax.while_loop(lambda state: state[1] < span.end_column, page_step, start)

    @pl.when(any_page)
    def _():
        plgpu.barrier_wait(cluster_done)

    row_stat.at[wg][...] = total
    meet()
    total = total + plgpu.load(row_stat.at[1 - wg], layout=_ROW)
    safe = jnp.where(total == 0.0, 1.0, total)
    acc = acc * lax.broadcast_in_dim(1.0 / safe, acc.shape, [0])
    own_rows = pl.ds(tile * _ROWS, _ROWS)
    if static.splits == 1:
        k_smem.at[0, wg][...] = acc.astype(static.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(k_smem.at[0, wg], out.at[split, batch, own_rows, own_columns])
    else:
        out.at[split, batch, own_rows, own_columns][...] = acc
    natural = jnp.where(total == 0.0, -jnp.inf, (top + jnp.log2(safe)) * math.log(2))
    meet()

    @pl.when(jnp.logical_and(wg == 0, half == 0))
    def _():
        row_stat.at[0][...] = natural
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(row_stat.at[0], lse.at[split, batch, own_rows])

    plgpu.wait_smem_to_gmem(0)
