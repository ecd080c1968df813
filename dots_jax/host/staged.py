"""Transfers in two steps: pages are gathered into a block on one side, the block is moved, and written on the other.

That is how pages reach a buffer in another client or memory space, where no one compiled function may mix both sides.
The block, and with it the extra memory, is bounded by the chunk size.
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from dots_jax.host.device import DeviceKV, LayerKV
from dots_jax.host.layouts import Side
from dots_jax.host.moves import Moves, chunks
from dots_jax.host.placement import Place, as_bytes, call, for_moving, from_bytes, platform_of, restore, rows_of, update
from dots_jax.host.regions import read_block, write_block
from dots_jax.host.relayout import block_to_pages, choose, pages_to_block

if TYPE_CHECKING:
    from dots_jax.host.buffers import HostKV

# Pages that one chunk of a staged transfer holds.
CHUNK_PAGES = 64


def backup_in_chunks(
    host: "HostKV", device: DeviceKV, moves: Moves, run: int, *, chunk_pages: int, donate: bool
) -> "HostKV":
    """A checked backup, a chunk of at most `chunk_pages` pages at a time.

    Raises:
      ValueError: `chunk_pages` is below 1.
    """
    size = _runs_per_chunk(host, run, chunk_pages)
    dtype = host.spec.dtype
    leaf_of = {side.name: host.leaves[side.leaf].sharding for side in host.sides}
    for part in chunks(moves, size):
        blocks = {}
        for side in host.sides:
            layers = device.k if side.name == "k" else device.v
            name = choose(layers, part.device, run)
            block = call(_gather, dtype, layers, part.device, side=side, run=run, implementation=name)
            blocks[side.name] = _put(block, leaf_of[side.name])
        host = update(_insert, dtype, host, blocks, part, donate=donate)
        donate = True
    return host


def load_in_chunks(
    arrays: LayerKV, host: "HostKV", layer: int, moves: Moves, run: int, *, chunk_pages: int, donate: bool
) -> LayerKV:
    """A checked load of one layer, a chunk of at most `chunk_pages` pages at a time.

    Raises:
      ValueError: `chunk_pages` is below 1.
    """
    size = _runs_per_chunk(host, run, chunk_pages)
    dtype = host.spec.dtype
    for part in chunks(moves, size):
        blocks = call(_extract, dtype, host, jnp.int32(layer), part, run=run)
        given = [array for array in arrays if array is not None]
        blocks = [_put(block, array.sharding) for block, array in zip(blocks, given, strict=True)]
        how = tuple((side, choose([array], part.device, run)) for side, array in zip(host.sides, given, strict=True))
        arrays = update(_scatter, dtype, arrays, blocks, part, donate=donate, how=how)
        donate = True
    return arrays


def _runs_per_chunk(host: "HostKV", run: int, chunk_pages: int) -> int:
    if chunk_pages < 1:
        raise ValueError(f"chunk_pages: expected at least 1, got {chunk_pages}.")
    return chunk_pages * host.spec.page_size // run


def _put(block: Array, sharding: Any) -> Array:
    """The block where `sharding` says, without a copy where that is the same memory."""
    same_devices = block.sharding.device_set == sharding.device_set
    if same_devices and platform_of(block) == "cpu":
        return block
    return jax.device_put(block, sharding)


def _gather(
    layers: tuple[Array, ...], starts: Array, *, side: Side, run: int, implementation: str, place: Place
) -> Array:
    rows = [rows_of(layer, side, place) for layer in layers]
    return pages_to_block(rows, starts, run, implementation=implementation)


def _insert(host: "HostKV", blocks: dict[str, Array], moves: Moves, *, place: Place) -> "HostKV":
    """Writes blocks `[run, token, layer, head, width]` into the buffer."""

    def move(i: Array, leaves: dict[str, Array]) -> dict[str, Array]:
        for side in host.sides:
            block = blocks[side.name]
            block = as_bytes(block, place)
            block = lax.dynamic_index_in_dim(block, i, keepdims=False).swapaxes(0, 1)
            slot = jnp.asarray(moves.host)[i]
            leaves[side.leaf] = write_block(
                leaves[side.leaf], block, side, host.layout, host.spec.page_size, layer=0, slot=slot
            )
        return leaves

    leaves = {side.leaf: for_moving(host.leaves[side.leaf], side, place) for side in host.sides}
    leaves = lax.fori_loop(0, moves.total, move, leaves)
    return host.with_leaves({name: restore(host.leaves[name], leaf) for name, leaf in leaves.items()})


def _extract(host: "HostKV", layer: Array, moves: Moves, *, run: int, place: Place) -> list[Array]:
    """Reads one layer's runs into blocks `[run, token, 1, head, width]`, one per side."""
    leaves = {side.leaf: for_moving(host.leaves[side.leaf], side, place) for side in host.sides}
    count = len(moves.host)

    def read(i: Array, blocks: list[Array]) -> list[Array]:
        slot = jnp.asarray(moves.host)[i]
        parts = [
            read_block(
                leaves[side.leaf],
                side,
                host.layout,
                host.spec.page_size,
                layer=layer,
                num_layers=1,
                slot=slot,
                num_tokens=run,
            )
            for side in host.sides
        ]
        return [
            lax.dynamic_update_index_in_dim(block, part.swapaxes(0, 1), i, 0)
            for block, part in zip(blocks, parts, strict=True)
        ]

    empty = [jnp.zeros((count, run, 1, side.heads, side.width), leaves[side.leaf].dtype) for side in host.sides]
    return [from_bytes(block, host.spec.dtype) for block in lax.fori_loop(0, moves.total, read, empty)]


def _scatter(
    arrays: LayerKV, blocks: list[Array], moves: Moves, *, how: tuple[tuple[Side, str], ...], place: Place
) -> LayerKV:
    """Writes blocks of one layer into its device arrays; runs past the total are dropped."""
    given = [array for array in arrays if array is not None]
    keep = jnp.arange(len(moves.device)) < moves.total
    done = []
    for array, block, (side, implementation) in zip(given, blocks, how, strict=True):
        starts = jnp.where(keep, jnp.asarray(moves.device), array.shape[0])
        block = as_bytes(block, place)
        rows = rows_of(array, side, place)
        (rows,) = block_to_pages(block, [rows], starts, implementation=implementation)
        done.append(from_bytes(rows.reshape(array.shape), array.dtype))
    return LayerKV(*done)
