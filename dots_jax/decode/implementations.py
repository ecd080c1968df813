"""The implementations of the decode by name, and the choice among them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.core

from dots_jax.decode import mosaic_gpu, xla
from dots_jax.pages import PageTable

Decode = Callable[..., tuple[jax.Array, jax.Array]]

NAMES = ("xla", "mosaic_gpu", "interpret")


def choose(
    name: str | None, q: jax.Array, kv_pages: jax.Array, table: PageTable, *, window: int | None, v_dim: int
) -> Decode:
    """The implementation called `name`, or the best that can run on these arguments when it is None.

    Raises:
      ValueError: for an unknown name.
      NotImplementedError: if the one that was asked for cannot run; the message says why, and which ones can.
    """
    if name not in (None, *NAMES):
        raise ValueError(f"implementation must be None or one of {', '.join(NAMES)}; got {name!r}")
    if name == "xla":
        return xla.decode
    if name is None:
        # Only the kernel is asked about, so that nothing imports it where the device already rules it out.
        shapes = {"window": window, "v_dim": v_dim}
        refused = mosaic_gpu.cannot_run(q, kv_pages, table, device=device_of(q), **shapes)
        return xla.decode if refused else _best_for_platform
    # The others are asked only once this one is refused: looking whether the simulation can run starts a thread.
    if reason := refusal(name, q, kv_pages, table, window=window, v_dim=v_dim):
        reasons = {other: refusal(other, q, kv_pages, table, window=window, v_dim=v_dim) for other in NAMES}
        runnable = ", ".join(repr(other) for other, refused in reasons.items() if refused is None)
        raise NotImplementedError(f"implementation {name!r} cannot run: {reason}. Here these can: {runnable}.")
    return mosaic_gpu.decode if name == "mosaic_gpu" else mosaic_gpu.interpret


def refusal(
    name: str, q: jax.Array, kv_pages: jax.Array, table: PageTable, *, window: int | None, v_dim: int
) -> str | None:
    """Why the implementation called `name` cannot run on these arguments, or None when it can."""
    if name == "xla":
        return None
    simulated = name == "interpret"
    device = None if simulated else device_of(q)
    reason = mosaic_gpu.cannot_run(q, kv_pages, table, window=window, v_dim=v_dim, device=device)
    return reason or (mosaic_gpu.cannot_simulate() if simulated else None)


def device_of(array: jax.Array) -> Any:
    """A device that holds the array; for a traced or NumPy one, the device that JAX would use by default."""
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
        return next(iter(array.devices()))
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return default if isinstance(default, jax.Device) else jax.devices(default)[0]


def _best_for_platform(q, kv_pages, pages, lengths, counts, **static):
    """The kernel where the computation is lowered for CUDA; XLA where the same trace ends up on a CPU."""
    return jax.lax.platform_dependent(
        q,
        kv_pages,
        pages,
        lengths,
        counts,
        cuda=lambda *arrays: mosaic_gpu.decode(*arrays, **static),
        default=lambda *arrays: xla.decode(*arrays, **static),
    )


__all__ = ["NAMES", "choose", "device_of", "refusal"]
