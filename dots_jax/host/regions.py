"""Reading and writing rectangular parts of a host buffer, whatever its layout.

A *block* is `[layer, token, head, width]` of one side; its tokens lie in one page. The layout's axis names say where
each block axis goes, so every layout shares the code here. Bytes are only ever sliced: nothing computes with
them, and NaN payloads survive.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Shaped

from dots_jax.host.layouts import AXES, Side
from dots_jax.host.placement import in_space

_BLOCK_AXIS = {"layer": 0, "slot": 1, "offset": 1, "head": 2, "width": 3}


def _place(side: Side, layout: str, page_size: int, layer: Any, slot: Any) -> list[Any]:
    """Start index of a block that begins at (layer, slot), for each axis of the leaf."""
    place = {
        "layer": layer,
        "slot": slot,
        "page": slot // page_size,
        "offset": slot % page_size,
        "head": 0,
        "width": 0,
    }
    start = [] if side.index is None else [side.index]
    return [jnp.asarray(i, jnp.int32) for i in (*start, *(place[axis] for axis in AXES[layout]))]


def write_block(
    leaf: Shaped[Array, "..."],
    block: Shaped[Array, "layer token head width"],
    side: Side,
    layout: str,
    page_size: int,
    *,
    layer: Any,
    slot: Any,
) -> Shaped[Array, "..."]:
    """Writes a block over one side of a leaf.

    Args:
      leaf: the buffer.
      block: what to write; its tokens are consecutive slots of one page.
      side: the side it belongs to.
      layout: the leaf's layout.
      page_size: tokens of one page.
      layer: first layer.
      slot: first slot.
    """
    axes = AXES[layout]
    block = block.transpose([_BLOCK_AXIS[axis] for axis in axes if axis != "page"])
    new_axes = [axes.index("page")] if "page" in axes else []
    block = jnp.expand_dims(block, new_axes)
    if side.index is not None:
        block = block[None]
    start = _place(side, layout, page_size, layer, slot)
    return lax.dynamic_update_slice(leaf, in_space(block, jax.typeof(leaf).memory_space), start)


def read_block(
    leaf: Shaped[Array, "..."],
    side: Side,
    layout: str,
    page_size: int,
    *,
    layer: Any,
    num_layers: int,
    slot: Any,
    num_tokens: int,
) -> Shaped[Array, "layer token head width"]:
    """Reads what `write_block` would have written there."""
    axes = AXES[layout]
    sizes = {
        "layer": num_layers,
        "slot": num_tokens,
        "page": 1,
        "offset": num_tokens,
        "head": side.heads,
        "width": side.width,
    }
    lengths = [*([] if side.index is None else [1]), *(sizes[axis] for axis in axes)]
    part = lax.dynamic_slice(leaf, _place(side, layout, page_size, layer, slot), lengths)
    part = in_space(part, jax.memory.Space.Device)
    kept = [axis for axis in axes if axis != "page"]
    part = part.reshape([sizes[axis] for axis in kept])
    order = {_BLOCK_AXIS[axis]: place for place, axis in enumerate(kept)}
    return part.transpose([order[i] for i in range(4)])
