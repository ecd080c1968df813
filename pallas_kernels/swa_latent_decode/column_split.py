"""Plan A: two blocks share a tile of 64 query rows, each owning half of the latent columns.

Block `half` holds value columns [half * v_dim / 2, ...) and half of the rope columns, of the queries and of every page.
Each of its two warpgroups owns half of those value columns again: it loads them, and accumulates their part of the
output. Keys come in steps of `block_tokens`; the warpgroups take turns in computing the scores of a step. Scores need
all columns, so the two blocks add their partial scores (`exchange.py`). What a warpgroup does for its step i:

    scores(i), send, [output of step i - 1], receive, softmax, publish weights and maximum, output of step i

so the exchange hides behind the other warpgroup's step. `docs/kernel.md` draws the schedule.
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
_TILE = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)
_HALF, _WARPGROUP = exchange.HALF_AXIS, "warpgroup"


@dataclasses.dataclass(frozen=True)
class _Static:
    """Static facts of one launch. `columns` is what a warpgroup owns of v_dim, `rope` what a block owns of the rest.

    `tokens` are the keys of one step.
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
        tokens=config.block_tokens,
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
        out_type.append(exchange.simulation_scratch(grid, static.tokens))
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

    copies, tokens = 3 if static.rope else 2, static.tokens
    scratch = {
        "q_smem": smem(2, _ROWS, static.columns),
        "q_rope": smem(_ROWS, static.rope) if static.rope else None,
        "k_smem": smem(static.stages, 2, tokens, static.columns),
        "k_rope": smem(static.stages, tokens, static.rope) if static.rope else None,
        # The peer's scores of a step and, later, the weights of that step: the first of the two 16-bit tiles.
        "shared": plgpu.RefUnion(smem(2, _ROWS, tokens, dtype=jnp.float32), smem(2, 2, _ROWS, tokens)),
        "row_stat": plgpu.SMEM((2, _ROWS), jnp.float32),
        "q_landed": plgpu.Barrier(num_arrivals=copies),
        "k_landed": plgpu.Barrier(num_arrivals=copies, num_barriers=static.stages),
        "published": plgpu.Barrier(num_barriers=2),
        "pair": plgpu.Barrier(num_arrivals=2),
        "peer_sent": plgpu.Barrier(num_barriers=2),
        "cluster_done": plgpu.ClusterBarrier(collective_axes=(_HALF,), num_arrivals=2, num_barriers=2),
        "met": exchange.simulation_barrier() if static.interpret else None,
    }
    names = [name for name, ref in scratch.items() if ref is not None]

    def body(*refs):
        held = dict.fromkeys(scratch) | dict(zip(names, refs, strict=True))
        _tile(static, q, kv, pages, lengths, counts, out, lse, inbox[0] if inbox else None, **held)

    pl.run_scoped(body, *(scratch[name] for name in names), collective_axes=_WARPGROUP)


def _tile(
    static: _Static, q, kv, pages, lengths, counts, out, lse, global_inbox,
    *, q_smem, q_rope, k_smem, k_rope, shared, row_stat,
    q_landed, k_landed, published, pair, peer_sent, cluster_done, met,
):  # fmt: skip
    """One tile of 64 query rows over the steps of one split."""
    batch, split, tile = lax.axis_index("batch"), lax.axis_index("split"), lax.axis_index("tile")
    half, wg = lax.axis_index(_HALF), lax.axis_index(_WARPGROUP)
    columns, stages, tokens = static.columns, static.stages, static.tokens
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
        tokens=tokens,
    )
    inbox, weights_smem = shared
    mailbox = exchange.Mailbox(
        inbox, peer_sent, None if global_inbox is None else global_inbox.at[batch, split, tile], met
    )
    own_columns = pl.ds((half * 2 + wg) * columns, columns)
    own_rope = pl.ds(4 * columns + half * static.rope, static.rope)
    own_rows = pl.ds(tile * _ROWS, _ROWS)

    def present(block):
        return block < span.end

    def following(block):
        return next_present(pages, batch, block, span.end, static.num_pages, tokens)

    def slot_of(step):
        return lax.rem(step, jnp.int32(stages))

    def load_step(step, block, page):
        """Every warpgroup fetches the value columns it owns; the one whose step it is also the rope columns."""
        rows = pl.ds(lax.rem(block, jnp.int32(PAGE_SIZE // tokens)) * tokens, tokens)
        slot = slot_of(step)
        plgpu.copy_gmem_to_smem(kv.at[page, rows, own_columns], k_smem.at[slot, wg], k_landed.at[slot])
        if static.rope:

            @pl.when(lax.rem(step, jnp.int32(2)) == wg)
            def _():
                plgpu.copy_gmem_to_smem(kv.at[page, rows, own_rope], k_rope.at[slot], k_landed.at[slot])

    def load_queries():
        plgpu.copy_gmem_to_smem(q.at[batch, own_rows, own_columns], q_smem.at[wg], q_landed)
        if static.rope:

            @pl.when(wg == 0)
            def _():
                plgpu.copy_gmem_to_smem(q.at[batch, own_rows, own_rope], q_rope, q_landed)

    # `ahead` holds the blocks of steps i - 1, i, ... of which this warpgroup has requested its columns; i is its next
    # own step. Warpgroup 0 starts at step 0, and requests the last stage where it will stand in for step -1.
    ahead = []
    following_block, page = following(span.start)
    for step in range(stages):
        requested = jnp.logical_and(present(following_block), jnp.logical_or(wg == 1, step < stages - 1))

        @pl.when(requested)
        def _(step=step, block=following_block, page=page):
            load_step(jnp.int32(step), block, page)

        if step == 0:
            pl.when(present(following_block))(load_queries)
        ahead.append(following_block)
        following_block, page = following(following_block + 1)
    any_step = present(ahead[0])
    before = [span.end, *ahead[:-1]]
    ahead = tuple(jnp.where(wg == 0, *pair) for pair in zip(before, ahead, strict=True))

    rows = plgpu.broadcasted_iota(jnp.int32, (_ROWS,), 0, layout=_ROW) + tile * _ROWS
    position = row_limits(rows, length, count, heads=static.heads, seq=static.seq)

    @pl.when(any_step)
    def _():
        plgpu.barrier_wait(q_landed)

    def scores(step, last_block):
        """This block's share of the scores of a step; and what to fetch next, looked up while the products run."""
        slot = slot_of(step)
        # Always 0, which the compiler cannot see: it would keep 34 descriptors of the queries in registers and spill.
        zero = jnp.minimum(step, 0)

        def products(acc):
            for part in range(2):
                plgpu.wgmma(acc, q_smem.at[part + zero], k_smem.at[slot, part].transpose((1, 0)))
            if static.rope:
                plgpu.wgmma(acc, q_rope, k_rope.at[slot].transpose((1, 0)))
            one = following(last_block + 1)
            two = following(one[0] + 1)
            return acc[...], one, two

        return pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((_ROWS, tokens), jnp.float32))

    def mask(score, block):
        """-inf where the query does not see the key."""
        last = lax.broadcast_in_dim(position - block * tokens, score.shape, [0])
        token = plgpu.broadcasted_iota(jnp.int32, score.shape, 1, layout=_TILE)
        seen = token <= last
        if static.window is not None:
            seen = jnp.logical_and(seen, token > last - static.window)
        return jnp.where(seen, score, -jnp.inf)

    def clear_unseen_rows(slot, block):
        """Keys that no query of the tile sees become 0: their weight is 0, and 0 * NaN would be NaN."""
        first_key = block * tokens
        edge = jnp.logical_or(first_key < span.first_key, first_key + (tokens - 1) > span.last_key)

        @pl.when(edge)
        def _():
            shape = (tokens, 32 if columns % 64 else 64)
            layout = plgpu.Layout.SMEM_GMEM_COPY(shape, static.dtype, 64)
            key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + first_key
            seen = jnp.logical_and(key >= span.first_key, key <= span.last_key)
            for start in range(0, columns, shape[1]):
                part = k_smem.at[slot, wg, :, pl.ds(start, shape[1])]
                part[...] = jnp.where(seen, plgpu.load(part, layout=layout), jnp.zeros((), static.dtype))

    def add_output(state, step, block, top, refill):
        """Adds the output of one step to the columns of this warpgroup and refills its slot."""
        acc, old_top, total = state
        slot, parity = slot_of(step), lax.rem(step, jnp.int32(2))
        rescale = jnp.exp2(old_top - _finite(top))
        clear_unseen_rows(slot, block)
        plgpu.commit_smem()
        acc = acc * lax.broadcast_in_dim(rescale, acc.shape, [0])

        def products(acc_ref):
            plgpu.wgmma(acc_ref, weights_smem.at[parity, 0], k_smem.at[slot, wg])

        acc = accumulate(acc, products, interpret=static.interpret)
        # One thread speaks for the warpgroup from here on, so all its warps must be past their products.
        plgpu.commit_smem()
        plgpu.barrier_arrive(cluster_done.at[parity])
        if refill is not None:
            load_if_present(step + stages, *refill)
        return acc, top, total * rescale

    def load_if_present(step, block, page):
        @pl.when(present(block))
        def _():
            load_step(step, block, page)

    def add_others_output(state, step, block, refill):
        """The step before an own one: the other warpgroup has computed its weights."""
        plgpu.barrier_wait(k_landed.at[slot_of(step)])
        plgpu.barrier_wait(published.at[1 - wg])
        top = plgpu.load(row_stat.at[1 - wg], layout=_ROW)
        return add_output(state, step, block, top, refill)

    def own_step(state):
        step, ahead, output = state
        plgpu.barrier_wait(k_landed.at[slot_of(step)])
        partial, one, two = scores(step, ahead[-1])

        @pl.when(step > 1)
        def _():
            plgpu.barrier_wait(cluster_done.at[wg])

        exchange.send(mailbox, partial, wg)
        output = lax.cond(
            present(ahead[0]),
            lambda output: add_others_output(output, step - 1, ahead[0], None),
            lambda output: output,
            output,
        )
        load_if_present(step - 1 + stages, *one)
        score = (partial + exchange.receive(mailbox, wg)) * (static.scale * math.log2(math.e))
        score = mask(score, ahead[1])
        acc, old_top, total = output
        top = jnp.maximum(old_top, score.max(axis=1))
        weight = jnp.exp2(score - lax.broadcast_in_dim(_finite(top), score.shape, [0]))
        # The store begins with a warpgroup barrier: the weights overwrite the inbox that other warps may still read.
        weights_smem.at[wg, 0][...] = weight.astype(static.dtype)
        row_stat.at[wg][...] = top
        plgpu.commit_smem()
        plgpu.barrier_arrive(published.at[wg])
        acc, top, total = add_output((acc, old_top, total), step, ahead[1], top, two)
        return step + 2, (*ahead[2:], one[0], two[0]), (acc, top, total + weight.sum(axis=1))

    acc = plgpu.layout_cast(jnp.zeros((_ROWS, columns), jnp.float32), _TILE)
    top = plgpu.layout_cast(jnp.full((_ROWS,), -jnp.inf, jnp.float32), _ROW)
    total = plgpu.layout_cast(jnp.zeros((_ROWS,), jnp.float32), _ROW)
    step, ahead, output = lax.while_loop(lambda state: present(state[1][1]), own_step, (wg, ahead, (acc, top, total)))
    acc, top, total = lax.cond(
        present(ahead[0]),
        lambda output: add_others_output(output, step - 1, ahead[0], None),
        lambda output: output,
        output,
    )

    # Nobody leaves before its last message was taken: the owner of a step waits for all four warpgroups.
    @pl.when(step > wg)
    def _():
        plgpu.barrier_wait(cluster_done.at[wg])

    def meet():
        plgpu.barrier_arrive(pair)
        plgpu.barrier_wait(pair)

    meet()
    row_stat.at[wg][...] = total
    meet()
    total = total + plgpu.load(row_stat.at[1 - wg], layout=_ROW)
    safe = jnp.where(total == 0.0, 1.0, total)
    acc = acc * lax.broadcast_in_dim(1.0 / safe, acc.shape, [0])
    if static.splits == 1:
        # The queries are done with: every warpgroup has met the others after its last scores.
        q_smem.at[wg][...] = acc.astype(static.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_smem.at[wg], out.at[split, batch, own_rows, own_columns])
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


def _finite(top: jax.Array) -> jax.Array:
    """The maximum to subtract: 0 for a row that has seen no key, where -inf - -inf would be NaN."""
    return jnp.where(top == -jnp.inf, 0.0, top)
