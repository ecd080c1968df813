"""Small kernels with known machine code, each right or wrong in one way.

To see their report: `PYTHONPATH=tests/kernels python -m dots_jax kernel-report --module report_probe`.
"""

import functools
import os

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dots_jax.decode import mosaic_gpu, swa_latent_decode
from dots_jax.pages import PageTable
from pallas_kernels.report.variant import Variant

_TILE = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
_WIDE = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)
_TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def _smem(rows=64, dtype=jnp.bfloat16, transforms=_TRANSFORMS):
    return plgpu.SMEM((rows, 64), dtype, transforms=transforms)


def _product_body(a, b, out, a_tile, b_tile, out_tile, barrier):
    """64x64x64 product: two bulk loads, four HGMMA (16 wide each in K), one bulk store."""
    plgpu.copy_gmem_to_smem(a, a_tile, barrier.at[0])
    plgpu.copy_gmem_to_smem(b, b_tile, barrier.at[1])
    plgpu.barrier_wait(barrier.at[0])
    plgpu.barrier_wait(barrier.at[1])

    def product(accumulator):
        plgpu.wgmma(accumulator, a_tile, b_tile)
        plgpu.wgmma_wait(0)
        return accumulator[...]

    out_tile[...] = pl.run_scoped(product, plgpu.ACC((64, 64), jnp.float32)).astype(out_tile.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_tile, out)
    plgpu.wait_smem_to_gmem(0)


def product(a, b):
    scratch = [_smem(), _smem(), _smem(), plgpu.Barrier(num_barriers=2)]
    return plgpu.kernel(_product_body, out_type=_TILE, scratch_types=scratch, grid=(1,), grid_names=("block",))(a, b)


def twice(a, b):
    """Two different kernels in one function."""
    return product(copy(a), b)


def copy(source, padding_rows=0):
    """A bulk copy through shared memory, with `padding_rows` x 128 bytes of it wasted."""

    def body(source, out, tile, barrier, *_):
        plgpu.copy_gmem_to_smem(source, tile, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(tile, out)
        plgpu.wait_smem_to_gmem(0)

    padding = [_smem(padding_rows)] if padding_rows else []
    scratch = [_smem(), plgpu.Barrier(), *padding]
    return plgpu.kernel(body, out_type=_TILE, scratch_types=scratch, grid=(1,), grid_names=("block",))(source)


def exchange(source):
    """Each of two blocks writes its tile into the other's shared memory."""

    def body(source, out, mine, theirs, loaded, arrived):
        rank = lax.axis_index("pair")
        plgpu.copy_gmem_to_smem(source, mine, loaded)
        plgpu.barrier_wait(loaded)
        value = plgpu.layout_cast(mine[...], plgpu.Layout.WGMMA)
        plgpu.async_store_smem(value, theirs, arrived, cluster_idx=1 - rank, cluster_dim="pair", optimized=False)
        plgpu.barrier_wait(arrived)
        plgpu.copy_smem_to_gmem(theirs, out.at[rank])
        plgpu.wait_smem_to_gmem(0)

    tile = plgpu.SMEM((64, 64), jnp.float32)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((2, 64, 64), jnp.float32),
        scratch_types=[tile, tile, plgpu.Barrier(), plgpu.Barrier()],
        cluster=(2,),
        cluster_names=("pair",),
    )(source)


def crowded(a, b):
    """Two 64x256 accumulators alive in one warpgroup: 256 registers a thread for them alone."""
    wide = plgpu.SMEM((64, 256), jnp.bfloat16, transforms=_TRANSFORMS)

    def body(a, b, out, a_tile, b_tile, out_tile, barrier):
        plgpu.copy_gmem_to_smem(a, a_tile, barrier)
        plgpu.copy_gmem_to_smem(b, b_tile, barrier)
        plgpu.barrier_wait(barrier)

        def products(first, second):
            plgpu.wgmma(first, a_tile, b_tile)
            plgpu.wgmma(second, a_tile, b_tile)
            plgpu.wgmma_wait(0)
            return first[...] * second[...]

        accumulator = plgpu.ACC((64, 256), jnp.float32)
        out_tile[...] = pl.run_scoped(products, accumulator, accumulator).astype(out_tile.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_tile, out)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=_WIDE,
        scratch_types=[_smem(), wide, wide, plgpu.Barrier(num_arrivals=2)],
        grid=(1,),
        grid_names=("block",),
    )(a, b)


def dispatch(q, kv_pages, pages, lengths, heads):
    """The public function with the implementation left to it, as on a machine with a Hopper GPU."""
    mosaic_gpu._wrong_device = lambda device: None  # this process compiles nothing else
    return swa_latent_decode(
        q[:, :, :heads], kv_pages, PageTable(pages, lengths), window=513, scale=0.1, v_dim=1024, return_lse=True
    )


def _dispatch_variant(name, heads, **expects):
    shapes = (4, 2, 64, 1088), (40, 64, 1088), (4, 12), (4,)
    dtypes = jnp.bfloat16, jnp.bfloat16, jnp.int32, jnp.int32
    arguments = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
    return Variant("probe", name, functools.partial(dispatch, heads=heads), arguments, **expects)


def plain_xla(a):
    return a + 1


def aborts(a):
    os.abort()


def variants():
    variant = functools.partial(Variant, "probe")
    return [
        variant("product", product, (_TILE, _TILE)),
        variant("twice", twice, (_TILE, _TILE)),
        variant("copy", copy, (_TILE,), expects_tensor_cores=False),
        variant("copy-unexpected", copy, (_TILE,)),
        variant("too-big", functools.partial(copy, padding_rows=4096), (_TILE,), expects_tensor_cores=False),
        variant("crowded", crowded, (_TILE, _WIDE)),
        variant(
            "exchange",
            exchange,
            (jax.ShapeDtypeStruct((64, 64), jnp.float32),),
            expects_tensor_cores=False,
            expects_cluster_stores=True,
        ),
        _dispatch_variant("dispatch-column-split", 64, expects_cluster_stores=True),
        _dispatch_variant("dispatch-swapped", 8),
        variant("no-kernel", plain_xla, (_TILE,)),
        variant("aborts", aborts, (_TILE,)),
    ]
