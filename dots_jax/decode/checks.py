"""What the decode functions refuse, before anything is traced."""

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dots_jax.pages import PageTable
from dots_jax.pages.table import check_table

PAGE_SIZE = 64
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_FLOAT32 = np.finfo(np.float32)


def check_decode(q: jax.Array, kv_pages: jax.Array, table: PageTable | None, window, scale, v_dim) -> None:
    """Refuses what `swa_latent_decode` cannot compute; the order of the checks is part of the contract."""
    if isinstance(table, PageTable) and table.page_size != PAGE_SIZE:
        raise RuntimeError(f"Dots SWA latent decode requires page_size={PAGE_SIZE}, got {table.page_size}.")
    if table is None:
        raise RuntimeError("Dots SWA latent decode requires an SWA page table.")
    check_table(table)
    _check_array("q", q)
    if q.ndim != 4 or 0 in q.shape[1:]:
        raise ValueError(f"q must be [B, S, H, D] with S, H and D at least 1, got {q.shape}")
    if q.shape[0] != table.pages.shape[0]:
        raise ValueError(
            f"q {q.shape} has {q.shape[0]} rows, the page table {table.pages.shape} has {table.pages.shape[0]}"
        )
    _check_array("kv_pages", kv_pages)
    if kv_pages.ndim != 3:
        raise ValueError(f"kv_pages must be [N, page_size, D], got {kv_pages.shape}")
    width = kv_pages.shape[2]
    if q.shape[3] != width:
        raise ValueError(f"q {q.shape} is {q.shape[3]} wide, the cache {kv_pages.shape} is {width} wide")
    if not _is_integer(v_dim) or not 1 <= v_dim <= width:
        raise ValueError(
            f"v_dim must be an integer in 1..{width}, the width of the cache {kv_pages.shape}; got {v_dim!r}"
        )
    _check_page_axis(kv_pages, table)
    if q.dtype != kv_pages.dtype or q.dtype not in DTYPES:
        raise TypeError(
            "q and the cache must have one dtype of bfloat16, float16 or float32; "
            f"got q {q.dtype}, cache {kv_pages.dtype}"
        )
    if window is not None and (not _is_integer(window) or window < 1):
        raise ValueError(f"window must be an integer >= 1 (tokens, the current one included) or None, got {window!r}")
    if isinstance(scale, jax.core.Tracer):
        raise ValueError("scale must be a number known before tracing, got a traced value")
    if not _is_scale(scale):
        raise ValueError(f"scale must be a number, finite and > 0 in float32, got {scale!r}")


def _check_array(name: str, value) -> None:
    """Refuses lists, None, numbers and descriptions by name; what JAX itself takes for an array passes."""
    if isinstance(value, jax.ShapeDtypeStruct) or not (hasattr(value, "ndim") and hasattr(value, "dtype")):
        raise TypeError(f"{name} must be an array, got {type(value).__name__}")


def explicit_axes(*arrays: jax.Array, leading: bool = False) -> str:
    """The mesh axes that the arrays' types are sharded over, or those of their leading dimensions; "" when none.

    Only axes of `AxisType.Explicit` are part of a type; automatic ones, and those inside `jax.shard_map`, are not.
    """
    specs = [tuple(jax.typeof(array).sharding.spec) for array in arrays if isinstance(array, jax.Array)]
    return ", ".join(sorted(set(jax.tree.leaves([spec[:1] if leading else spec for spec in specs]))))


def check_unsharded(*arrays: jax.Array) -> None:
    """Refuses rows and pages that are sharded by type: which device reads which page is for `jax.shard_map` to say."""
    if axes := explicit_axes(*arrays, leading=True):
        raise NotImplementedError(
            f"rows or pages are sharded over the explicit mesh axes {axes}: call this in jax.shard_map, or make the "
            "mesh with axis_types=(jax.sharding.AxisType.Auto,)"
        )


def _is_integer(value) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_scale(value) -> bool:
    """Whether it is one number > 0 that float32, in which scores are, holds and does not round to 0."""
    if isinstance(value, str | bytes) or np.ndim(value):
        return False
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return float(_FLOAT32.tiny) <= number <= float(_FLOAT32.max)


def check_cache(kv_pages: jax.Array, table: PageTable) -> None:
    """Refuses a cache array that does not go with the table."""
    check_table(table)
    _check_array("kv_pages", kv_pages)
    if kv_pages.ndim != 3:
        raise ValueError(f"kv_pages must be [N, page_size, D], got {kv_pages.shape}")
    _check_page_axis(kv_pages, table)


def _check_page_axis(kv_pages: jax.Array, table: PageTable) -> None:
    if kv_pages.shape[1] != table.page_size:
        raise ValueError(
            f"the cache {kv_pages.shape} has pages of {kv_pages.shape[1]} tokens, the page table of {table.page_size}"
        )


def check_counts(counts: Int[Array, " B"] | None, rows: int, steps: int) -> jax.Array:
    """The tokens of each row as int32[B], `steps` where none were given.

    Values given as NumPy arrays or lists are checked. Those of JAX arrays are not, because reading them would wait for
    the device; they act as the nearest of 0 and `steps`.
    """
    if counts is None:
        return jnp.full(rows, steps, jnp.int32)
    values = counts
    if not isinstance(values, jax.Array):
        values = np.asarray(values, np.int32 if np.size(values) == 0 else None)
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise TypeError(f"counts must have an integer dtype, got {values.dtype}")
    if values.shape != (rows,):
        raise ValueError(f"counts must be [B={rows}], got {values.shape}")
    if isinstance(values, np.ndarray) and rows and not (values.min() >= 0 and values.max() <= steps):
        raise ValueError(f"counts must lie in 0..S={steps}, got {values.tolist()}")
    return jnp.clip(jnp.asarray(values), 0, steps).astype(jnp.int32)
