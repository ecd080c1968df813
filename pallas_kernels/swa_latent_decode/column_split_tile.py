"""A tile of the column-split body: what a warpgroup loads, computes and hands over. See `docs/kernel.md`."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.swa_latent_decode import exchange
from pallas_kernels.swa_latent_decode.accumulate import accumulate
from pallas_kernels.swa_latent_decode.column_split_memory import ROWS, Memory, Static
from pallas_kernels.swa_latent_decode.config import PAGE_SIZE
from pallas_kernels.swa_latent_decode.visible import Span, next_present, row_limits

_TILE = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True)
class Tile:
    """A tile as seen by one warpgroup. A *block* here is `tokens` consecutive keys, a *step* the nth present one.

    Attributes:
      static: Static facts.
      memory: Shared memory and barriers.
      mailbox: The exchange with the other thread block.
      q: [64, D], this tile's queries.
      kv: [N, 64, D], the cache.
      pages: int32 [B, P], the page table.
      batch: Row of the table.
      span: What this tile reads in this split.
      position: int32 [64], the last key that each query row sees, -1 for none.
      half: Which thread block of the cluster.
      wg: Which warpgroup of the thread block.
    """

    static: Static
    memory: Memory
    mailbox: exchange.Mailbox
    q: Any
    kv: Any
    pages: Any
    batch: jax.Array
    span: Span
    position: jax.Array
    half: jax.Array
    wg: jax.Array

    @property
    def own_columns(self):
        """The value columns this warpgroup loads and accumulates."""
        return pl.ds((self.half * 2 + self.wg) * self.static.columns, self.static.columns)

    @property
    def own_rope(self):
        """The other columns this thread block scores."""
        return pl.ds(4 * self.static.columns + self.half * self.static.rope, self.static.rope)

    def present(self, block):
        """Whether `block` is one to read; `following` returns one past the end when there are no more."""
        return block < self.span.end

    def following(self, block):
        """The first block from `block` on whose page exists, and that page."""
        static = self.static
        return next_present(self.pages, self.batch, block, self.span.end, static.num_pages, static.tokens)

    def slot(self, step):
        """Where a step lies in shared memory."""
        return lax.rem(step, jnp.int32(self.static.stages))

    def load_queries(self):
        """Every warpgroup fetches the columns it owns, the first one also the rope columns."""
        memory = self.memory
        plgpu.copy_gmem_to_smem(self.q.at[:, self.own_columns], memory.q_smem.at[self.wg], memory.q_landed)
        if self.static.rope:

            @pl.when(self.wg == 0)
            def _():
                plgpu.copy_gmem_to_smem(self.q.at[:, self.own_rope], memory.q_rope, memory.q_landed)

    def load_step(self, step, block, page):
        """Every warpgroup fetches the columns it owns, the one whose step it is also the rope columns."""
        tokens, memory, slot = self.static.tokens, self.memory, self.slot(step)
        rows = pl.ds(lax.rem(block, jnp.int32(PAGE_SIZE // tokens)) * tokens, tokens)
        landed = memory.k_landed.at[slot]
        plgpu.copy_gmem_to_smem(self.kv.at[page, rows, self.own_columns], memory.k_smem.at[slot, self.wg], landed)
        if self.static.rope:

            @pl.when(lax.rem(step, jnp.int32(2)) == self.wg)
            def _():
                plgpu.copy_gmem_to_smem(self.kv.at[page, rows, self.own_rope], memory.k_rope.at[slot], landed)

    def load_if_present(self, step, block, page):
        """`load_step`, unless there are no more blocks."""

        @pl.when(self.present(block))
        def _():
            self.load_step(step, block, page)

    def start(self):
        """Requests the queries and the first steps.

        Returns:
          The blocks of steps i - 1, i, ... of which this warpgroup has requested its columns, where i is its first own
          step; and whether there is any. Warpgroup 0 starts at step 0 and requests the last stage later, where it
          would add the output of step -1.
        """
        stages, ahead = self.static.stages, []
        block, page = self.following(self.span.start)
        for step in range(stages):
            requested = jnp.logical_and(self.present(block), jnp.logical_or(self.wg == 1, step < stages - 1))

            @pl.when(requested)
            def _(step=step, block=block, page=page):
                self.load_step(jnp.int32(step), block, page)

            if step == 0:
                pl.when(self.present(block))(self.load_queries)
            ahead.append(block)
            block, page = self.following(block + 1)
        before = [self.span.end, *ahead[:-1]]
        return tuple(jnp.where(self.wg == 0, *pair) for pair in zip(before, ahead, strict=True)), self.present(ahead[0])

    def scores(self, step, last_block):
        """This thread block's share of the scores of a step, and the next two blocks with their pages.

        The page table is read while the products run.
        """
        memory, slot = self.memory, self.slot(step)
        # Always 0, which the compiler cannot see: it would keep 34 descriptors of the queries in registers and spill.
        zero = jnp.minimum(step, 0)

        def products(acc):
            for part in range(2):
                plgpu.wgmma(acc, memory.q_smem.at[part + zero], memory.k_smem.at[slot, part].transpose((1, 0)))
            if self.static.rope:
                plgpu.wgmma(acc, memory.q_rope, memory.k_rope.at[slot].transpose((1, 0)))
            one = self.following(last_block + 1)
            two = self.following(one[0] + 1)
            return acc[...], one, two

        return pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((ROWS, self.static.tokens), jnp.float32))

    def mask(self, score, block):
        """-inf where the query does not see the key."""
        last = lax.broadcast_in_dim(self.position - block * self.static.tokens, score.shape, [0])
        token = plgpu.broadcasted_iota(jnp.int32, score.shape, 1, layout=_TILE)
        seen = token <= last
        if self.static.window is not None:
            seen = jnp.logical_and(seen, token > last - self.static.window)
        return jnp.where(seen, score, -jnp.inf)

    def clear_unseen_rows(self, slot, block):
        """Keys that no query of the tile sees become 0: their weight is 0, and 0 * NaN would be NaN."""
        tokens, columns, dtype, span = self.static.tokens, self.static.columns, self.static.dtype, self.span
        first_key = block * tokens
        edge = jnp.logical_or(first_key < span.first_key, first_key + (tokens - 1) > span.last_key)

        @pl.when(edge)
        def _():
            shape = (tokens, 32 if columns % 64 else 64)
            layout = plgpu.Layout.SMEM_GMEM_COPY(shape, dtype, 64)
            key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + first_key
            seen = jnp.logical_and(key >= span.first_key, key <= span.last_key)
            for start in range(0, columns, shape[1]):
                part = self.memory.k_smem.at[slot, self.wg, :, pl.ds(start, shape[1])]
                part[...] = jnp.where(seen, plgpu.load(part, layout=layout), jnp.zeros((), dtype))

    def add_output(self, output, step, block, top):
        """Adds weights times values of a step to the columns of this warpgroup; `top` is the maximum after it."""
        acc, old_top, total = output
        memory, slot, parity = self.memory, self.slot(step), lax.rem(step, jnp.int32(2))
        _, weights = memory.shared
        rescale = jnp.exp2(old_top - _finite(top))
        self.clear_unseen_rows(slot, block)
        plgpu.commit_smem()
        acc = acc * lax.broadcast_in_dim(rescale, acc.shape, [0])

        def products(acc_ref):
            plgpu.wgmma(acc_ref, weights.at[parity, 0], memory.k_smem.at[slot, self.wg])

        acc = accumulate(acc, products, interpret=self.static.interpret)
        # One thread speaks for the warpgroup from here on, so all its warps must be past their products.
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory.cluster_done.at[parity])
        return acc, top, total * rescale

    def add_others_output(self, output, step, block):
        """`add_output` of a step whose weights the other warpgroup computes, if there is such a step."""

        def add(output):
            plgpu.barrier_wait(self.memory.k_landed.at[self.slot(step)])
            plgpu.barrier_wait(self.memory.published.at[1 - self.wg])
            top = plgpu.load(self.memory.row_stat.at[1 - self.wg], layout=_ROW)
            return self.add_output(output, step, block, top)

        return lax.cond(self.present(block), add, lambda output: output, output)

    def own_step(self, state):
        """One step of this warpgroup, and in the middle of it the output of the step before."""
        step, ahead, output = state
        memory, stages = self.memory, self.static.stages
        plgpu.barrier_wait(memory.k_landed.at[self.slot(step)])
        partial, one, two = self.scores(step, ahead[-1])

        @pl.when(step > 1)
        def _():
            plgpu.barrier_wait(memory.cluster_done.at[self.wg])

        exchange.send(self.mailbox, partial, self.wg)
        output = self.add_others_output(output, step - 1, ahead[0])
        self.load_if_present(step - 1 + stages, *one)
        score = (partial + exchange.receive(self.mailbox, self.wg)) * (self.static.scale * math.log2(math.e))
        top, weight = self.publish(self.mask(score, ahead[1]), output[1])
        acc, top, total = self.add_output(output, step, ahead[1], top)
        self.load_if_present(step + stages, *two)
        return step + 2, (*ahead[2:], one[0], two[0]), (acc, top, total + weight.sum(axis=1))

    def publish(self, score, old_top):
        """Softmax weights of a step for both warpgroups, and the maximum they refer to."""
        _, weights = self.memory.shared
        top = jnp.maximum(old_top, score.max(axis=1))
        weight = jnp.exp2(score - lax.broadcast_in_dim(_finite(top), score.shape, [0]))
        # The store begins with a warpgroup barrier: the weights overwrite the inbox that other warps may still read.
        weights.at[self.wg, 0][...] = weight.astype(self.static.dtype)
        self.memory.row_stat.at[self.wg][...] = top
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.memory.published.at[self.wg])
        return top, weight

    def walk(self):
        """All steps: the unscaled output of this warpgroup's columns, the maxima, and its part of the sums."""
        ahead, any_step = self.start()

        @pl.when(any_step)
        def _():
            plgpu.barrier_wait(self.memory.q_landed)

        acc = plgpu.layout_cast(jnp.zeros((ROWS, self.static.columns), jnp.float32), _TILE)
        top = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), _ROW)
        total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), _ROW)
        start = (self.wg, ahead, (acc, top, total))
        step, ahead, output = lax.while_loop(lambda state: self.present(state[1][1]), self.own_step, start)
        output = self.add_others_output(output, step - 1, ahead[0])

        # Nobody leaves before its last message was taken: the owner of a step waits for all four warpgroups.
        @pl.when(step > self.wg)
        def _():
            plgpu.barrier_wait(self.memory.cluster_done.at[self.wg])

        return output

    def finish(self, output, out, lse):
        """Scales the output and writes it to `out` [64, v_dim], and the LSE to `lse` [64]."""
        acc, top, total = output
        memory, wg = self.memory, self.wg
        self.meet()
        memory.row_stat.at[wg][...] = total
        self.meet()
        total = total + plgpu.load(memory.row_stat.at[1 - wg], layout=_ROW)
        safe = jnp.where(total == 0.0, 1.0, total)
        acc = acc * lax.broadcast_in_dim(1.0 / safe, acc.shape, [0])
        if self.static.splits == 1:
            # The queries are done with: the warpgroups have met after their last scores.
            memory.q_smem.at[wg][...] = acc.astype(self.static.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(memory.q_smem.at[wg], out.at[:, self.own_columns])
        else:
            out.at[:, self.own_columns][...] = acc
        natural = jnp.where(total == 0.0, -jnp.inf, (top + jnp.log2(safe)) * math.log(2))
        self.meet()

        @pl.when(jnp.logical_and(wg == 0, self.half == 0))
        def _():
            memory.row_stat.at[0][...] = natural
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(memory.row_stat.at[0], lse)

        plgpu.wait_smem_to_gmem(0)

    def meet(self):
        """Both warpgroups of the thread block have come here."""
        plgpu.barrier_arrive(self.memory.pair)
        plgpu.barrier_wait(self.memory.pair)


def query_positions(static: Static, tile, length, count):
    """int32 [64]: the position of each packed query row of a tile, -1 for rows that are none."""
    rows = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=_ROW) + tile * ROWS
    return row_limits(rows, length, count, heads=static.heads, seq=static.seq)


def _finite(top: jax.Array) -> jax.Array:
    """The maximum to subtract: 0 for a row that has seen no key, where -inf - -inf would be NaN."""
    return jnp.where(top == -jnp.inf, 0.0, top)
