"""Pages of layer-first device caches to a page-first block and back, in one launch per direction."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32, Shaped

from pallas_kernels.page_relayout import kernels
from pallas_kernels.page_relayout.tiling import Order, Tiling, unsupported_reason
from pallas_kernels.swa_latent_decode.api import interpret_params

Layers = Sequence[Shaped[Array, "slots H D"]]

# The kernels move bits; unsigned integers of the same width take every dtype through them unchanged.
_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def pages_to_block(
    layers: Layers,
    page_ids: Int32[Array, " n"],
    page_size: int,
    *,
    order: Order = "token_major",
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> Shaped[Array, "n page L H D"] | Shaped[Array, "n L page H D"]:
    """Gathers pages of every layer into one block, bit for bit.

    Args:
      layers: The cache of each layer; page i is slots `[i * page_size, (i + 1) * page_size)`.
      page_ids: Which pages, traced or not. The block is 0 where an id is negative or past the last page.
      page_size: Tokens per page.
      order: Of the block: `"token_major"` is `[n, page, L, H, D]`, `"layer_major"` is `[n, L, page, H, D]`.
      interpret: Simulate the kernel on the CPU, with race detection unless parameters say otherwise.

    Raises:
      ValueError: If `unsupported_reason` has one, or the layers differ in shape or dtype.
    """
    tiling = _tiling(layers, page_ids, page_size, order)
    block = kernels.gather(tiling, interpret_params(interpret))(jnp.asarray(page_ids, jnp.int32), *_rows(layers))
    heads, width = layers[0].shape[1:]
    return _as_dtype(block.reshape(*block.shape[:3], heads, width), layers[0].dtype)


def block_to_pages(
    block: Shaped[Array, "n page L H D"] | Shaped[Array, "n L page H D"],
    layers: Layers,
    page_ids: Int32[Array, " n"],
    page_size: int,
    *,
    order: Order = "token_major",
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> list[Shaped[Array, "slots H D"]]:
    """Scatters a block's pages back over the layers, bit for bit; in place when the layers are donated.

    Args:
      block: What `pages_to_block` returns for the same order.
      layers: The cache of each layer.
      page_ids: Where each page goes, all different. Negative ids and ids past the last page move nothing.
      page_size: Tokens per page.
      order: Of the block.
      interpret: As in `pages_to_block`.

    Returns:
      The layers with those pages replaced.

    Raises:
      ValueError: As `pages_to_block`, or if the block's shape or dtype does not go with the layers.
    """
    tiling = _tiling(layers, page_ids, page_size, order)
    expected = (*tiling.block_shape[:3], *layers[0].shape[1:])
    if block.shape != expected or block.dtype != layers[0].dtype:
        raise ValueError(f"block: expected {expected} {layers[0].dtype}, got {block.shape} {block.dtype}")
    run = kernels.scatter(tiling, interpret_params(interpret))
    rows = run(jnp.asarray(page_ids, jnp.int32), _as_bits(block).reshape(tiling.block_shape), *_rows(layers))
    return [_as_dtype(row.reshape(layer.shape), layer.dtype) for row, layer in zip(rows, layers, strict=True)]


def _tiling(layers: Layers, page_ids, page_size: int, order: Order) -> Tiling:
    shapes = {(layer.shape, jnp.dtype(layer.dtype)) for layer in layers}
    if len(shapes) != 1:
        raise ValueError(f"layers: expected one shape and dtype, got {sorted(map(str, shapes))}")
    slots, heads, width = layers[0].shape
    dtype = jnp.dtype(layers[0].dtype)
    reason = unsupported_reason(
        num_layers=len(layers), slots=slots, page_size=page_size, heads=heads, width=width, dtype=dtype
    )
    if reason is not None:
        raise ValueError(f"the Pallas page relayout cannot run: {reason}")
    (pages,) = page_ids.shape
    if pages < 1:
        raise ValueError("the Pallas page relayout cannot run: no pages")
    return Tiling(len(layers), slots, page_size, heads * width, dtype.itemsize, pages, order)


def _rows(layers: Layers) -> list[jax.Array]:
    return [_as_bits(layer).reshape(layer.shape[0], -1) for layer in layers]


def _as_bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, _BITS[x.dtype.itemsize])


def _as_dtype(bits: jax.Array, dtype) -> jax.Array:
    return lax.bitcast_convert_type(bits, dtype)


__all__ = ["block_to_pages", "pages_to_block", "unsupported_reason"]
