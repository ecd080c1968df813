"""The two kernels: every tile goes to shared memory and out again by the copy engine; no thread touches its bytes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.page_relayout.tiling import STAGES, Tiling

_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def gather(tiling: Tiling, interpret: plgpu.InterpretGPUParams | None) -> Callable[..., jax.Array]:
    """A function of (page ids int32 [n], rows [slots, columns] of each layer) that returns the block."""

    def body(page_ids, *refs):
        *layers, block, tiles, landed = refs
        page, present = _page(page_ids, tiling)
        sources = [_layer_tile(layer, page, tiling) for layer in layers]
        targets = [_block_tile(block, layer, tiling) for layer in range(tiling.num_layers)]

        @pl.when(present)
        def _():
            _stream(sources, targets, tiles, landed)

        @pl.when(jnp.logical_not(present))
        def _():
            tiles.at[0][...] = jnp.zeros((tiling.tile_tokens, tiling.tile_columns), tiles.dtype)
            plgpu.commit_smem()
            for target in targets:
                plgpu.copy_smem_to_gmem(tiles.at[0], target)
            plgpu.wait_smem_to_gmem(0)

    out = jax.ShapeDtypeStruct(tiling.block_shape, _BITS[tiling.itemsize])
    return _launch(body, tiling, interpret, out, "pages_to_block")


def scatter(tiling: Tiling, interpret: plgpu.InterpretGPUParams | None) -> Callable[..., list[jax.Array]]:
    """A function of (page ids, block, rows of each layer) that returns the rows with the block's pages in place."""

    def body(page_ids, block, *refs):
        *layers, tiles, landed = refs
        page, present = _page(page_ids, tiling)
        sources = [_block_tile(block, layer, tiling) for layer in range(tiling.num_layers)]

        @pl.when(present)
        def _():
            _stream(sources, [_layer_tile(layer, page, tiling) for layer in layers], tiles, landed)

    launch = _launch(body, tiling, interpret, (), "block_to_pages")

    def run(page_ids, block, *rows):
        refs = [jax.new_ref(row) for row in rows]
        launch(page_ids, block, *refs)
        return [jax.freeze(ref) for ref in refs]

    return run


def _launch(body, tiling: Tiling, interpret, out_type, name: str) -> Callable[..., Any]:
    tile = (STAGES, tiling.tile_tokens, tiling.tile_columns)
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=tiling.grid,
        grid_names=("page", "tokens", "columns"),
        scratch_types=(plgpu.SMEM(tile, _BITS[tiling.itemsize]), plgpu.Barrier(num_barriers=STAGES)),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=False if interpret is None else interpret,
        kernel_name=name,
    )


def _stream(sources: list, targets: list, tiles, landed):
    """Copies each source to its target, up to STAGES of them under way at once."""
    count = len(sources)

    def fetch(k: int):
        plgpu.copy_gmem_to_smem(sources[k], tiles.at[k % STAGES], landed.at[k % STAGES])

    for k in range(min(STAGES, count)):
        fetch(k)
    for k in range(count):
        plgpu.barrier_wait(landed.at[k % STAGES])
        plgpu.copy_smem_to_gmem(tiles.at[k % STAGES], targets[k])
        if k >= 1 and k - 1 + STAGES < count:
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the store before this one has read its tile
            fetch(k - 1 + STAGES)
    plgpu.wait_smem_to_gmem(0)


def _page(page_ids, tiling: Tiling):
    """The block's page, 0 if there is none, and whether there is one."""
    page = page_ids[lax.axis_index("page")]
    present = (page >= 0) & (page < tiling.slots // tiling.page_size)
    return jnp.where(present, page, 0), present


def _columns(tiling: Tiling):
    return pl.ds(lax.axis_index("columns") * tiling.tile_columns, tiling.tile_columns)


def _layer_tile(layer, page, tiling: Tiling):
    start = page * tiling.page_size + lax.axis_index("tokens") * tiling.tile_tokens
    return layer.at[pl.ds(start, tiling.tile_tokens), _columns(tiling)]


def _block_tile(block, layer: int, tiling: Tiling):
    tokens = pl.ds(lax.axis_index("tokens") * tiling.tile_tokens, tiling.tile_tokens)
    index = (tokens, layer) if tiling.order == "token_major" else (layer, tokens)
    return block.at[lax.axis_index("page"), *index, _columns(tiling)]
