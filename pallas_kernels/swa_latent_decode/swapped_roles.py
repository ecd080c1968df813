"""The three roles of the swapped body's warpgroups, and how they hand chunks, probabilities and slots to each other."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.swa_latent_decode.config import PAGE_SIZE
from pallas_kernels.swa_latent_decode.ring import CHUNK, RingShape
from pallas_kernels.swa_latent_decode.swapped_table import Call, Table

_PER_ROW = plgpu.Layout.WGMMA.reduce(0)  # one value per query row: every token reduced away
_HALF_PAGE = PAGE_SIZE // 2

# Registers per thread, 512 for one thread of each of the four warpgroups. The outputs of 32 rows alone take 128.
_ACCUMULATE_REGISTERS = 184
_SCORE_REGISTERS = 104
_LOAD_REGISTERS = 40


def load(q, kv_pages, make_table, call: Call, *, q_smem, ring, q_full, full, consumed, **_):
    """Producer: Q once, then chunk after chunk of the pages, each into the slot that is free next."""
    plgpu.set_max_registers(_LOAD_REGISTERS, action="decrease")
    shape = call.shape
    q_rows = pl.ds(lax.axis_index("tile") * shape.rows, shape.rows)

    def q_step(chunk, carry):
        source = q.at[lax.axis_index("batch"), q_rows, pl.ds(shape.column(chunk), CHUNK)]
        plgpu.copy_gmem_to_smem(source, q_smem.at[chunk], q_full)
        return carry

    lax.fori_loop(0, shape.chunks, q_step, 0)
    table = make_table()

    def page_step(i, carry):
        base, page, present = carry
        ahead = table.entry(i + 1)  # arrives while this page's copies are issued
        begin, end = table.seen_tokens(i)

        def chunk_step(chunk, slot):
            @pl.when(i * shape.chunks + chunk >= shape.slots)
            def _():
                plgpu.barrier_wait(consumed.at[slot])

            _copy_seen(kv_pages.at[page, :, pl.ds(shape.column(chunk), CHUNK)], ring.at[slot], full.at[slot],
                       present, begin, end)  # fmt: skip
            return shape.slot(slot, 1)

        return lax.fori_loop(0, shape.chunks, chunk_step, base), *ahead

    base, *_ = lax.fori_loop(0, table.columns, page_step, (jnp.int32(0), *table.entry(jnp.int32(0))))
    # Leave no barrier with a phase that was not waited for: the interpreter of JAX 0.11 insists, and it costs nothing.
    used = jnp.minimum(table.columns * shape.chunks, shape.slots)

    def drain(k, slot):
        plgpu.barrier_wait(consumed.at[slot])
        return shape.slot(slot, 1)

    lax.fori_loop(0, used, drain, jnp.where(used == shape.slots, base, 0))


def _copy_seen(chunk, slot, full, present, begin, end):
    """Starts the copy of a chunk, or of the half of it that holds every token seen; absent pages only arrive."""
    low, high = pl.ds(0, _HALF_PAGE), pl.ds(_HALF_PAGE, _HALF_PAGE)
    only_low, only_high = end <= _HALF_PAGE, begin >= _HALF_PAGE

    @pl.when(present & only_low)
    def _():
        plgpu.copy_gmem_to_smem(chunk.at[low], slot.at[low], full)

    @pl.when(present & only_high)
    def _():
        plgpu.copy_gmem_to_smem(chunk.at[high], slot.at[high], full)

    @pl.when(present & ~only_low & ~only_high)
    def _():
        plgpu.copy_gmem_to_smem(chunk, slot, full)

    @pl.when(~present)
    def _():
        plgpu.barrier_arrive(full)


def score(
    lse, make_table, call: Call, *, q_smem, ring, p_smem, alpha_smem, inverse_smem, q_full, full, consumed, p_full,
    p_empty, finished,
):  # fmt: skip
    """Scores warpgroup: S^T = K Q^T, softmax over the tokens, P^T to shared memory; the LSE at the end."""
    plgpu.set_max_registers(_SCORE_REGISTERS, action="decrease")
    shape = call.shape
    tile = (PAGE_SIZE, shape.rows)
    table = make_table()
    newest, oldest = _visible_range(table, call)
    plgpu.barrier_wait(q_full)

    def page_step(i, carry):
        base, present, top, total = carry
        _, next_present = table.entry(i + 1)

        def products(acc):
            def chunk_step(chunk, slot):
                plgpu.barrier_wait(full.at[slot])
                plgpu.wgmma(acc, ring.at[slot], q_smem.at[chunk].transpose((1, 0)))
                return shape.slot(slot, 1)

            lax.fori_loop(0, shape.chunks, chunk_step, base)
            return acc[...]

        s = pl.run_scoped(products, plgpu.WGMMAAccumulatorRef(tile))
        for chunk in range(shape.key_only):
            plgpu.barrier_arrive(consumed.at[shape.slot(base, chunk)])
        key = _iota(tile, 0) + table.first_key(i)
        seen = (key <= newest) & present
        if oldest is not None:
            seen = seen & (key >= oldest)
        s = jnp.where(seen, s * (call.scale * math.log2(math.e)), -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(s, axis=0))
        finite_top = jnp.where(new_top == -jnp.inf, 0.0, new_top)  # rows that have seen no key yet
        alpha = jnp.exp2(top - finite_top)
        p = jnp.exp2(s - _over_tokens(finite_top, tile))
        # Each thread sums its own tokens; threads are summed once, at the end.
        total = total * _over_tokens(alpha, tile) + p

        buffer = lax.rem(i, jnp.int32(2))

        @pl.when(i >= 2)
        def _():
            plgpu.barrier_wait(p_empty.at[buffer])

        p_smem.at[buffer].transpose((1, 0))[...] = p.astype(p_smem.dtype)
        alpha_smem.at[buffer][...] = alpha
        plgpu.commit_smem()
        plgpu.barrier_arrive(p_full.at[buffer])
        return shape.slot(base, shape.chunks), next_present, new_top, total

    top = plgpu.layout_cast(jnp.full((shape.rows,), -jnp.inf, jnp.float32), _PER_ROW)
    total = plgpu.layout_cast(jnp.zeros(tile, jnp.float32), plgpu.Layout.WGMMA)
    _, present = table.entry(jnp.int32(0))
    *_rest, top, total = lax.fori_loop(0, table.columns, page_step, (jnp.int32(0), present, top, total))
    total = jnp.sum(total, axis=0)
    any_seen = total > 0
    total = jnp.where(any_seen, total, 1.0)
    inverse_smem[...] = jnp.where(any_seen, 1.0 / total, 0.0)
    plgpu.barrier_arrive(finished)
    _store(_block_rows(lse, shape), jnp.where(any_seen, (top + jnp.log2(total)) * math.log(2.0), -jnp.inf))
    for last in (2, 1):  # the phases of `p_empty` that no page waited for

        @pl.when(table.columns >= last)
        def _(last=last):
            plgpu.barrier_wait(p_empty.at[lax.rem(table.columns - last, jnp.int32(2))])


def accumulate(
    out, make_table, group, call: Call, *, ring, p_smem, alpha_smem, inverse_smem, consumed, p_full, p_empty,
    finished, **_,
):  # fmt: skip
    """Output warpgroups: O^T = alpha O^T + V^T P^T for every second chunk of 64 columns."""
    plgpu.set_max_registers(_ACCUMULATE_REGISTERS, action="increase")
    shape = call.shape
    tile = (CHUNK, shape.rows)
    table = make_table()
    # Taking turns, the groups give slots back in the order in which they are loaded.
    value_chunks = [k * shape.output_groups + group for k in range(shape.chunks_per_group)]

    def page_step(i, carry):
        base, present, outs = carry
        _, next_present = table.entry(i + 1)
        slots = [shape.slot(base, shape.key_only + chunk) for chunk in value_chunks]
        buffer = lax.rem(i, jnp.int32(2))
        plgpu.barrier_wait(p_full.at[buffer])  # the scores have read every chunk, so all have landed
        begin, end = table.seen_tokens(i)
        _zero_unseen(ring, slots, begin, end, present)
        alpha = _over_tokens(plgpu.load(alpha_smem.at[buffer], layout=_PER_ROW), tile)
        p = p_smem.at[buffer].transpose((1, 0))
        new_outs = []
        for start in range(0, len(slots), shape.products_in_flight):
            some = slice(start, start + shape.products_in_flight)
            # One multiply-add per element either way: rescaling in place and accumulating there would save nothing.
            for slot, o, product in zip(slots[some], outs[some], _products(ring, slots[some], p, tile), strict=True):
                new_outs.append(o * alpha + product)
                plgpu.barrier_arrive(consumed.at[slot])
        plgpu.barrier_arrive(p_empty.at[buffer])
        return shape.slot(base, shape.chunks), next_present, tuple(new_outs)

    zero = plgpu.layout_cast(jnp.zeros(tile, jnp.float32), plgpu.Layout.WGMMA)
    _, present = table.entry(jnp.int32(0))
    carry = (jnp.int32(0), present, (zero,) * shape.chunks_per_group)
    *_, outs = lax.fori_loop(0, table.columns, page_step, carry)
    plgpu.barrier_wait(finished)
    inverse = _over_tokens(plgpu.load(inverse_smem, layout=_PER_ROW), tile)
    rows = _block_rows(out, shape)
    for chunk, o in zip(value_chunks, outs, strict=True):
        # Transposed in registers, a thread holds neighbouring columns of one query row and stores them together.
        o = plgpu.layout_cast((o * inverse).astype(out.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        _store(rows.at[:, pl.ds(chunk * CHUNK, CHUNK)].transpose((1, 0)), o)


def _products(ring, slots, p, tile) -> list[jax.Array]:
    """V^T P^T of the chunks in `slots`, all issued before the first is awaited."""

    def issue(*accs) -> Any:
        for acc, slot in zip(accs, slots, strict=True):
            plgpu.wgmma(acc, ring.at[slot].transpose((1, 0)), p)
        # Products end in order, so each is awaited with the later ones still under way.
        return [plgpu.wgmma_accumulator_load(acc, wait_n=len(accs) - 1 - k) for k, acc in enumerate(accs)]

    products: Any = pl.run_scoped(issue, *[plgpu.WGMMAAccumulatorRef(tile)] * len(slots))
    return products


def _zero_unseen(ring, slots, begin, end, present):
    """Zeroes the tokens that no query sees: their bytes may be anything, and 0 * NaN would bring them back in P V."""
    end = jnp.where(present, end, 0)

    @pl.when((begin > 0) | (end < PAGE_SIZE))
    def _():
        token = _iota((PAGE_SIZE, CHUNK), 0)
        keep = (token >= begin) & (token < end)
        for slot in slots:
            values = plgpu.load(ring.at[slot])
            ring.at[slot][...] = jnp.where(keep, values, jnp.zeros_like(values))
        plgpu.commit_smem()


def _visible_range(table: Table, call: Call):
    """Newest and oldest key that each query row sees, laid over the score tile; no oldest without a window."""
    rows = _iota((PAGE_SIZE, call.shape.rows), 1) + lax.axis_index("tile") * call.shape.rows
    # Unlike `visible.row_limits` this keeps so few values at a time that 32 rows do not spill.
    query = sum(((rows >= j * call.heads).astype(jnp.int32) for j in range(1, call.seq)), jnp.zeros_like(rows))
    newest = table.length - table.new_tokens + query
    newest = jnp.where((query < table.new_tokens) & (rows < call.seq * call.heads), newest, -1)
    return newest, None if call.window is None else newest - (call.window - 1)


def _iota(shape, dimension: int):
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA)


def _over_tokens(per_row, shape):
    """Repeats one value per query row along the first axis of `shape`."""
    return lax.broadcast_in_dim(per_row, shape, (1,))


def _block_rows(ref, shape: RingShape):
    """This block's query rows of an output [splits, B, padded rows, ...]."""
    rows = pl.ds(lax.axis_index("tile") * shape.rows, shape.rows)
    return ref.at[lax.axis_index("split"), lax.axis_index("batch"), rows]


def _store(ref, value):
    """Stores with whatever instructions the layout allows; newer Pallas wants to be told that they may be narrow."""
    store = getattr(plgpu, "store", None)  # since jax 0.12
    if store is None:
        ref[...] = value
    else:
        store(ref, value, optimized=False)
