"""Gathering runs of device tokens of several layers into one block, and scattering a block back.

A block is `[run, token, layer, head, width]` of one side: the order of a page-first host buffer, whose pages then go to
the host as they are. Staged transfers build blocks; direct ones never do.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32, Shaped

Layers = Sequence[Shaped[Array, "slots head width"]]


def _tokens(starts: Int32[Array, " run"], run: int) -> Int32[Array, "run token"]:
    return jnp.asarray(starts)[:, None] + jnp.arange(run, dtype=jnp.int32)


def pages_to_block(
    layers: Layers, starts: Int32[Array, " run"], run: int
) -> Shaped[Array, "run token layer head width"]:
    """Gathers runs of consecutive tokens of every layer.

    Args:
      layers: `[slots, heads, width]` of each layer.
      starts: first slot of each run; all of a run's slots exist.
      run: tokens of each run.
    """
    tokens = _tokens(starts, run)
    return jnp.stack([layer.at[tokens].get(mode="promise_in_bounds") for layer in layers], axis=2)


def block_to_pages(
    block: Shaped[Array, "run token layer head width"], layers: Layers, starts: Int32[Array, " run"]
) -> list[Shaped[Array, "slots head width"]]:
    """Scatters a block back over the layers.

    Args:
      block: what to write.
      layers: `[slots, heads, width]` of each layer of the block.
      starts: first slot of each run; a run that starts outside the arrays is dropped.
    """
    tokens = _tokens(starts, block.shape[1])
    return [layer.at[tokens].set(block[:, :, i], mode="drop") for i, layer in enumerate(layers)]
