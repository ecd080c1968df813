"""The compiled variants that are reported and held to their budgets."""

import jax
import jax.numpy as jnp

from pallas_kernels.page_relayout.api import block_to_pages, pages_to_block
from pallas_kernels.page_relayout.tiling import Order
from pallas_kernels.report import Variant


def variants() -> tuple[Variant, ...]:
    """Both directions for the caches of MiMo-V2-Flash's sliding layers and of the released model's latents."""
    return (
        _gather("mimo-k-bf16", layers=39, heads=8, width=192, dtype=jnp.bfloat16),
        _scatter("mimo-k-bf16", layers=39, heads=8, width=192, dtype=jnp.bfloat16),
        _gather("latent-bf16-layer_major", layers=34, heads=1, width=1088, dtype=jnp.bfloat16, order="layer_major"),
        _scatter("latent-bf16-layer_major", layers=34, heads=1, width=1088, dtype=jnp.bfloat16, order="layer_major"),
        _gather("latent-fp8", layers=13, heads=1, width=576, dtype=jnp.float8_e4m3fn),
        _scatter("latent-fp8", layers=13, heads=1, width=576, dtype=jnp.float8_e4m3fn),
        _gather("f32", layers=2, heads=4, width=128, dtype=jnp.float32),
        _scatter("f32", layers=2, heads=4, width=128, dtype=jnp.float32),
    )


_PAGE_SIZE = 64
_PAGES = 64
_SLOTS = 1024 * _PAGE_SIZE


def _arguments(layers: int, heads: int, width: int, dtype, order: Order):
    inner = (_PAGE_SIZE, layers) if order == "token_major" else (layers, _PAGE_SIZE)
    block = jax.ShapeDtypeStruct((_PAGES, *inner, heads, width), dtype)
    ids = jax.ShapeDtypeStruct((_PAGES,), jnp.int32)
    return block, ids, (jax.ShapeDtypeStruct((_SLOTS, heads, width), dtype),) * layers


def _gather(name: str, *, layers: int, heads: int, width: int, dtype, order: Order = "token_major") -> Variant:
    _, ids, caches = _arguments(layers, heads, width, dtype, order)

    def function(ids, *caches):
        return pages_to_block(caches, ids, _PAGE_SIZE, order=order)

    return Variant("page_relayout", f"pages_to_block-{name}", function, (ids, *caches), expects_tensor_cores=False)


def _scatter(name: str, *, layers: int, heads: int, width: int, dtype, order: Order = "token_major") -> Variant:
    block, ids, caches = _arguments(layers, heads, width, dtype, order)

    def function(block, ids, *caches):
        return block_to_pages(block, caches, ids, _PAGE_SIZE, order=order)

    return Variant(
        "page_relayout", f"block_to_pages-{name}", function, (block, ids, *caches), expects_tensor_cores=False
    )
