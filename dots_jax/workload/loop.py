"""The jitted functions of the job: admit a request, decode one step, finish requests.

One step of four drafts, for a row of length L that accepts two of them:

      extend        pages for L .. L+3           [ .... window .... | d d d d ]
      write_latent  their rows, in every layer
      decode        four queries, in every layer
      rollback      the length becomes L+2       [ .... window .... | d d ]
      release       pages that no query at L+2 or later can see become -1

All layers share one page table and have a cache array each, so a page is the same 64 tokens in all of them. The state
is donated: caches are written in place, and nothing here waits for the host.
"""

import functools
from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dots_jax.config import LatentGeometry
from dots_jax.decode import swa_latent_decode, write_latent
from dots_jax.pages import PagePool, PageTable, extend, free_rows, release_outside_window, rollback
from dots_jax.sizes import PAGE_SIZE
from dots_jax.workload.content import Banks, latent_index, query_index

# How often each function was traced; tracing runs the Python body, a cached call does not.
TRACES: Counter[str] = Counter()


class LoopSpec(NamedTuple):
    """What is fixed while the job runs; hashable.

    Attributes:
      geometry: of the sliding layers.
      layers: how many of them.
      draft_tokens: S, query tokens per row and step.
      implementation: of `swa_latent_decode`.
    """

    geometry: LatentGeometry
    layers: int
    draft_tokens: int
    implementation: str | None

    @property
    def window(self) -> int:
        """Tokens that a query sees, its own included."""
        assert self.geometry.window is not None  # sliding layers have one
        return self.geometry.window

    @property
    def live_tokens(self) -> int:
        """Most tokens that a query after the context can see of it, rounded up to pages."""
        return -(-self.window // PAGE_SIZE) * PAGE_SIZE


class State(NamedTuple):
    """Everything that lives on the device and changes.

    Attributes:
      pool: the pages.
      table: who holds them; B rows.
      caches: one array per layer.
      peak_pages: most pages in use at once so far.
      refused: rows whose growth was refused so far; reservations make it 0.
    """

    pool: PagePool
    table: PageTable
    caches: tuple[Float[Array, "N 64 D"], ...]
    peak_pages: Int[Array, ""]
    refused: Int[Array, ""]


class Outputs(NamedTuple):
    """What a step leaves for the checks.

    Attributes:
      outs: attention output of each layer.
      lses: its log sum of exponentials.
    """

    outs: tuple[Float[Array, "B S H R"], ...]
    lses: tuple[Float[Array, "B S H"], ...]


def make_state(spec: LoopSpec, *, batch: int, num_pages: int, columns: int, dtype: jax.typing.DTypeLike) -> State:
    """An empty state: all pages free, all rows of length 0, all caches 0."""
    table = PageTable.empty(batch, columns, PAGE_SIZE)
    shape = (num_pages, PAGE_SIZE, spec.geometry.latent_dim)
    caches = tuple(jnp.zeros(shape, dtype) for _ in range(spec.layers))
    return State(PagePool.create(num_pages), table, caches, jnp.int32(0), jnp.int32(0))


def pages_in_use(pool: PagePool) -> Int[Array, ""]:
    """Pages that some row holds."""
    return pool.num_pages - pool.num_free


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def admit(
    spec: LoopSpec, state: State, banks: Banks, row: Int[Array, ""], request_id: Int[Array, ""],
    context: Int[Array, ""], step: Int[Array, ""],
) -> State:  # fmt: skip
    """Gives an empty row a request whose context is `context` tokens long.

    Only what the first query can still see is stored. The row grows a page at a time and releases behind itself, as a
    prefill in pieces does, so a context of any length passes through a window's worth of pages; the latents of the
    pages that stay are then written at once.
    """
    TRACES["admit"] += 1
    one = PageTable(state.table.pages[row][None], state.table.lengths[row][None], PAGE_SIZE)

    def unfinished(carry):
        _, table, refused = carry
        return (table.lengths[0] < context) & ~refused

    def grow(carry):
        pool, table, _ = carry
        piece = jnp.minimum(PAGE_SIZE, context - table.lengths)
        grown = extend(pool, table, piece)
        pool, table = release_outside_window(grown.pool, grown.table, spec.window, grown.table.lengths)
        return pool, table, ~grown.granted[0]

    pool, one, refused = jax.lax.while_loop(unfinished, grow, (state.pool, one, jnp.bool_(False)))

    count = jnp.minimum(spec.live_tokens, context)[None]
    position = (one.lengths - count)[:, None] + jnp.arange(spec.live_tokens)
    caches = tuple(
        write_latent(cache, one, banks.latent[_latents(request_id, position, step, layer)], counts=count)
        for layer, cache in enumerate(state.caches)
    )
    pages = state.table.pages.at[row].set(one.pages[0])
    table = PageTable(pages, state.table.lengths.at[row].set(one.lengths[0]), PAGE_SIZE)
    peak = jnp.maximum(state.peak_pages, pages_in_use(pool))
    return State(pool, table, caches, peak, state.refused + refused)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def decode_step(
    spec: LoopSpec, state: State, banks: Banks, request_ids: Int[Array, " B"], accepted: Int[Array, " B"],
    step: Int[Array, ""],
) -> tuple[State, Outputs]:  # fmt: skip
    """One step of all layers; see the drawing at the top.

    Args:
      spec: sizes.
      state: donated.
      banks: contents of tokens.
      request_ids: the request in each row; a negative one takes no part.
      accepted: how many of the drafts are kept, 1..S in rows that take part.
      step: number of the step, which the contents depend on.
    """
    TRACES["decode_step"] += 1
    drafts = spec.draft_tokens
    wanted = jnp.where(request_ids >= 0, drafts, 0)
    # No row is forked, hence no page is shared and there are no `copies` to apply.
    pool, table, granted, _ = extend(state.pool, state.table, wanted)
    counts = jnp.where(granted, wanted, 0)
    peak = jnp.maximum(state.peak_pages, pages_in_use(pool))
    position = (table.lengths - counts)[:, None] + jnp.arange(drafts)
    caches, outs, lses = [], [], []
    for layer, cache in enumerate(state.caches):
        latent = banks.latent[_latents(request_ids[:, None], position, step, layer)]
        cache = write_latent(cache, table, latent, counts=counts)
        out, lse = swa_latent_decode(
            banks.query[_queries(request_ids[:, None], position, step, layer)],
            cache,
            table,
            window=spec.window,
            scale=spec.geometry.softmax_scale,
            v_dim=spec.geometry.kv_lora_rank,
            counts=counts,
            return_lse=True,
            implementation=spec.implementation,
        )
        caches.append(cache)
        outs.append(out)
        lses.append(lse)
    kept = jnp.where(counts > 0, table.lengths - drafts + accepted, table.lengths)
    pool, table = rollback(pool, table, kept)
    # The next step starts at the committed length, and no other step is in flight.
    pool, table = release_outside_window(pool, table, spec.window, table.lengths)
    refused = state.refused + jnp.sum(~granted, dtype=jnp.int32)
    return State(pool, table, tuple(caches), peak, refused), Outputs(tuple(outs), tuple(lses))


@functools.partial(jax.jit, donate_argnums=0)
def finish(state: State, done: Bool[Array, " B"]) -> State:
    """Gives up all pages of the rows in the mask."""
    TRACES["finish"] += 1
    pool, table = free_rows(state.pool, state.table, done)
    return state._replace(pool=pool, table=table)


def _latents(request_id: jax.Array, position: jax.Array, step: jax.Array, layer: int) -> jax.Array:
    return latent_index(_uint32(request_id), _uint32(position), _uint32(step), layer)


def _queries(request_id: jax.Array, position: jax.Array, step: jax.Array, layer: int) -> jax.Array:
    return query_index(_uint32(request_id), _uint32(position), _uint32(step), layer)


def _uint32(value: jax.Array) -> jax.Array:
    return jnp.asarray(value).astype(jnp.uint32)
