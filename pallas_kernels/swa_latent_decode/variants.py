"""The compiled variants that are reported and held to their budgets: one for each way the kernel's code differs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.report import Variant
from pallas_kernels.swa_latent_decode.api import decode
from pallas_kernels.swa_latent_decode.config import PAGE_SIZE, Config

_RELEASED: dict[str, Any] = {"width": 1088, "v_dim": 1024, "window": 513, "table_width": 12}
_DEFAULT: dict[str, Any] = {"width": 576, "v_dim": 512, "window": None, "table_width": 64}


def variants() -> tuple[Variant, ...]:
    """Every variant, for a batch of 128 rows."""
    return _column_split() + _swapped()


def _column_split() -> tuple[Variant, ...]:
    pair, split = Config("column_split"), Config("column_split", splits=9)
    long, long_split = Config("column_split", block_tokens=64), Config("column_split", block_tokens=64, splits=8)
    return (
        _variant("column_split-d1088-h64-s1-w513", pair, heads=64, seq=1, **_RELEASED),
        _variant("column_split-d1088-h64-s4-w513", pair, heads=64, seq=4, **_RELEASED),
        _variant("column_split-d1088-h24-s3-w513", pair, heads=24, seq=3, **_RELEASED),
        _variant("column_split-d1088-h64-s1-w513-f16", pair, heads=64, seq=1, dtype=jnp.float16, **_RELEASED),
        _variant("column_split-d1088-h64-s1-w513-split9", split, heads=64, seq=1, **_RELEASED),
        _variant("column_split-d576-h128-s1-full", long, heads=128, seq=1, **_DEFAULT),
        _variant("column_split-d576-h128-s1-full-split8", long_split, heads=128, seq=1, **_DEFAULT),
    )


def _swapped() -> tuple[Variant, ...]:
    def rows(count: int, splits: int = 1) -> Config:
        return Config("swapped", tile_rows=count, splits=splits)

    return (
        _variant("swapped-d1088-h8-s1-w513", rows(8), heads=8, seq=1, **_RELEASED),
        _variant("swapped-d1088-h8-s2-w513", rows(16), heads=8, seq=2, **_RELEASED),
        _variant("swapped-d1088-h8-s3-w513", rows(24), heads=8, seq=3, **_RELEASED),
        _variant("swapped-d1088-h8-s4-w513", rows(32), heads=8, seq=4, **_RELEASED),
        _variant("swapped-d1088-h8-s4-w513-f16", rows(32), heads=8, seq=4, dtype=jnp.float16, **_RELEASED),
        _variant("swapped-d1088-h8-s1-w513-split9", rows(8, 9), heads=8, seq=1, **_RELEASED),
        _variant("swapped-d1088-h8-s4-w513-split10", rows(32, 10), heads=8, seq=4, **_RELEASED),
        _variant("swapped-d1088-h64-s1-w513", rows(32), heads=64, seq=1, **_RELEASED),
        _variant("swapped-d576-h8-s4-full", rows(32), heads=8, seq=4, **_DEFAULT),
        _variant("swapped-d576-h16-s1-full-split8", rows(16, 8), heads=16, seq=1, **_DEFAULT),
    )


def _variant(
    name: str,
    config: Config,
    *,
    heads: int,
    seq: int,
    width: int,
    v_dim: int,
    window: int | None,
    table_width: int,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    batch: int = 128,
    num_pages: int = 4096,
) -> Variant:
    arguments = (
        jax.ShapeDtypeStruct((batch, seq, heads, width), dtype),
        jax.ShapeDtypeStruct((num_pages, PAGE_SIZE, width), dtype),
        jax.ShapeDtypeStruct((batch, table_width), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )
    return Variant(
        kernel="swa_latent_decode",
        name=name,
        function=functools.partial(decode, window=window, scale=0.0625, v_dim=v_dim, config=config),
        arguments=arguments,
        expects_cluster_stores=config.plan == "column_split",
    )
