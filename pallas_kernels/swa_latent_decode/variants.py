"""The compiled variants that are reported and held to their budgets: one per way the kernel's code differs."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.swa_latent_decode.api import decode
from pallas_kernels.swa_latent_decode.config import PAGE_SIZE, Config


class Variant(NamedTuple):
    """A function to compile and what to compile it for.

    Attributes:
      name: Unique, says what differs.
      function: Takes arrays like `arguments`.
      arguments: Shapes and dtypes of q, kv_pages, pages, lengths, counts.
      config: What the function was given.
      smem_bytes: Shared memory of a block that the configuration promises not to exceed.
    """

    name: str
    function: Callable[..., tuple[jax.Array, jax.Array]]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    config: Config
    smem_bytes: int


def variants() -> list[Variant]:
    """Every variant, for a batch of 128 rows."""
    split, long = Config("column_split"), Config("column_split", stages=4)
    released = {"width": 1088, "v_dim": 1024, "window": 513, "table_width": 12}
    default = {"width": 576, "v_dim": 512, "window": None, "table_width": 64}
    return [
        _variant("column_split 1088/1024 bf16 64x1", split, heads=64, seq=1, **released),
        _variant("column_split 1088/1024 bf16 64x4", split, heads=64, seq=4, **released),
        _variant("column_split 1088/1024 bf16 24x3", split, heads=24, seq=3, **released),
        _variant("column_split 1088/1024 f16 64x1", split, heads=64, seq=1, dtype=jnp.float16, **released),
        _variant(
            "column_split 1088/1024 bf16 64x1 splits", Config("column_split", splits=9), heads=64, seq=1, **released
        ),
        _variant("column_split 576/512 bf16 128x1 full", long, heads=128, seq=1, **default),
        _variant(
            "column_split 576/512 bf16 128x1 full splits",
            Config("column_split", stages=4, splits=8),
            heads=128,
            seq=1,
            **default,
        ),
    ]


def _variant(
    name: str, config: Config, *, heads: int, seq: int, width: int, v_dim: int, window: int | None, table_width: int,
    dtype=jnp.bfloat16, batch: int = 128, num_pages: int = 4096,
) -> Variant:  # fmt: skip
    arguments = (
        jax.ShapeDtypeStruct((batch, seq, heads, width), dtype),
        jax.ShapeDtypeStruct((num_pages, PAGE_SIZE, width), dtype),
        jax.ShapeDtypeStruct((batch, table_width), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )
    function = functools.partial(decode, window=window, scale=0.0625, v_dim=v_dim, config=config)
    return Variant(name, function, arguments, config, config.smem_bytes(width, v_dim, jnp.dtype(dtype).itemsize))
