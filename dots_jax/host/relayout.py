"""Gathering runs of device tokens of several layers into one block, and scattering a block back.

A block is `[run, token, layer, head, width]` of one side: the order of a page-first host buffer, whose pages then go to
the host as they are. Staged transfers build blocks; direct ones never do.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int32, Shaped

from pallas_kernels import page_relayout

IMPLEMENTATIONS = ("xla", "mosaic_gpu", "interpret")

Layers = Sequence[Shaped[Array, "slots head width"]]


def choose(layers: Layers, starts: np.ndarray, run: int, implementation: str | None = None) -> str:
    """The implementation for these arrays, before anything is traced.

    Args:
      layers: `[slots, ...]` of each layer.
      starts: first slot of each run.
      run: tokens of each run.
      implementation: "xla" (any device), "mosaic_gpu" (the Pallas kernel, Hopper), "interpret" (the same kernel
        simulated on the CPU), or None: the kernel where it can run, else XLA.

    Raises:
      ValueError: there is no such implementation, or it cannot run; saying why.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation: expected one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}.")
    if implementation == "xla":
        return implementation
    reason = None if implementation == "interpret" else _why_not_here(layers[0])
    reason = reason or _why_not_these(layers, starts, run)
    if reason is None:
        return implementation or "mosaic_gpu"
    if implementation is None:
        return "xla"
    raise ValueError(f"implementation '{implementation}' cannot run: {reason}.")


def _why_not_here(array: Array) -> str | None:
    (device, *others) = array.sharding.device_set
    if others:
        return f"the arrays are spread over {1 + len(others)} devices"
    capability = getattr(device, "compute_capability", None)
    if device.platform not in ("gpu", "cuda") or capability != "9.0":
        return f"it needs a Hopper GPU, and the arrays are on {device}"
    return None


def _why_not_these(layers: Layers, starts: np.ndarray, run: int) -> str | None:
    if (misaligned := np.asarray(starts) % run != 0).any():
        return f"device slot {np.asarray(starts)[misaligned][0]} does not start a page of {run}"
    slots, *row = layers[0].shape
    return page_relayout.unsupported_reason(
        num_layers=len(layers),
        slots=slots,
        page_size=run,
        heads=int(np.prod(row[:-1], dtype=int)),
        width=row[-1],
        dtype=layers[0].dtype,
    )


def _tokens(starts: Int32[Array | np.ndarray, " run"], run: int) -> Int32[Array, "run token"]:
    return jnp.asarray(starts)[:, None] + jnp.arange(run, dtype=jnp.int32)


def pages_to_block(
    layers: Layers, starts: Int32[Array | np.ndarray, " run"], run: int, *, implementation: str = "xla"
) -> Shaped[Array, "run token layer head width"]:
    """Gathers runs of consecutive tokens of every layer.

    Args:
      layers: `[slots, heads, width]` of each layer.
      starts: first slot of each run; all of a run's slots exist.
      run: tokens of each run.
      implementation: what `choose` said.
    """
    if implementation == "xla":
        tokens = _tokens(starts, run)
        return jnp.stack([layer.at[tokens].get(mode="promise_in_bounds") for layer in layers], axis=2)
    interpret: Any = implementation == "interpret"
    return page_relayout.pages_to_block(layers, jnp.asarray(starts) // run, run, interpret=interpret)


def block_to_pages(
    block: Shaped[Array, "run token layer head width"],
    layers: Layers,
    starts: Int32[Array | np.ndarray, " run"],
    *,
    implementation: str = "xla",
) -> list[Shaped[Array, "slots head width"]]:
    """Scatters a block back over the layers.

    Args:
      block: what to write.
      layers: `[slots, heads, width]` of each layer of the block.
      starts: first slot of each run; a run that starts outside the arrays is dropped.
      implementation: what `choose` said.
    """
    run = block.shape[1]
    if implementation == "xla":
        tokens = _tokens(starts, run)
        return [layer.at[tokens].set(block[:, :, i], mode="drop") for i, layer in enumerate(layers)]
    interpret: Any = implementation == "interpret"
    return page_relayout.block_to_pages(block, layers, jnp.asarray(starts) // run, run, interpret=interpret)
