"""Checks the page relayout kernels on the device, bit for bit, and times them against XLA's gather and scatter.

`--dry-run` does the same with small sizes in the GPU interpreter, without times.
"""

import argparse
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dots_jax.bench.timing import Program, interleave
from pallas_kernels.page_relayout import block_to_pages, pages_to_block

PAGE_SIZE = 64
# (name, layers, heads, width, dtype, order): the caches of a host tier's sliding layers and of the released latents.
GEOMETRIES = (
    ("k-h8-d192-bf16", 39, 8, 192, jnp.bfloat16, "token_major"),
    ("latent-d1088-bf16", 34, 1, 1088, jnp.bfloat16, "layer_major"),
    ("latent-d576-fp8", 13, 1, 576, jnp.float8_e4m3fn, "token_major"),
)


def xla_gather(layers: list[jax.Array], ids: jax.Array, order: str) -> jax.Array:
    """What `pages_to_block` must return."""
    pages = [layer.reshape(-1, PAGE_SIZE, *layer.shape[1:]) for layer in layers]
    inside = (ids >= 0) & (ids < pages[0].shape[0])
    axis = 2 if order == "token_major" else 1
    block = jnp.stack([page[jnp.where(inside, ids, 0)] for page in pages], axis)
    return jnp.where(inside.reshape(-1, 1, 1, 1, 1), block, jnp.zeros_like(block))


def xla_scatter(block: jax.Array, layers: list[jax.Array], ids: jax.Array, order: str) -> list[jax.Array]:
    """What `block_to_pages` must return."""
    num_pages = layers[0].shape[0] // PAGE_SIZE
    target = jnp.where((ids >= 0) & (ids < num_pages), ids, num_pages)
    parts = jnp.moveaxis(block, 2 if order == "token_major" else 1, 0)
    return [
        layer.reshape(num_pages, PAGE_SIZE, *layer.shape[1:]).at[target].set(part, mode="drop").reshape(layer.shape)
        for layer, part in zip(layers, parts, strict=True)
    ]


def same_bits(a: Any, b: Any) -> bool:
    """Whether two trees of arrays hold the same bits, NaN included."""
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}

    def same(x: jax.Array, y: jax.Array) -> bool:
        left, right = (jax.lax.bitcast_convert_type(z, bits[z.dtype.itemsize]) for z in (x, y))
        return x.shape == y.shape and bool(jnp.array_equal(left, right))

    return all(jax.tree.leaves(jax.tree.map(same, a, b)))


def run(geometry: tuple, pages: int, moved: int, interpret: bool) -> bool:
    """Checks and times one geometry; prints a line for each direction; whether both were right."""
    name, count, heads, width, dtype, order = geometry
    rng = np.random.default_rng(0)
    shape = (pages * PAGE_SIZE, heads, width)
    noise = jnp.asarray(rng.integers(0, 256, (np.dtype(dtype).itemsize, *shape), np.uint8))
    words = noise[0] if noise.shape[0] == 1 else jax.lax.bitcast_convert_type(jnp.moveaxis(noise, 0, -1), jnp.uint16)
    base = jax.lax.bitcast_convert_type(words, dtype)  # every bit pattern, NaN included
    layers = [jnp.roll(base, layer + 1, axis=0) for layer in range(count)]
    ids_host = rng.permutation(pages)[:moved].astype(np.int32)
    ids_host[:2] = (-1, pages)  # absent: nothing moves
    ids = jnp.asarray(ids_host)

    kernel_gather = jax.jit(lambda ls, i: pages_to_block(ls, i, PAGE_SIZE, order=order, interpret=interpret))
    plain_gather = jax.jit(lambda ls, i: xla_gather(ls, i, order))
    block = plain_gather(layers, ids)
    kernel_scatter = jax.jit(
        lambda b, ls, i: block_to_pages(b, ls, i, PAGE_SIZE, order=order, interpret=interpret), donate_argnums=1
    )
    plain_scatter = jax.jit(lambda b, ls, i: xla_scatter(b, ls, i, order), donate_argnums=1)
    flipped = jnp.flip(block, axis=0)
    gathered = same_bits(kernel_gather(layers, ids), block)
    copies = [[jnp.copy(layer) for layer in layers] for _ in range(2)]
    copies = [kernel_scatter(flipped, copies[0], ids), plain_scatter(flipped, copies[1], ids)]
    scattered = same_bits(list(copies[0]), list(copies[1]))
    figures = {"gather": "", "scatter": ""}
    if not interpret:
        scatters = [_Donating(f, flipped, c, ids) for f, c in zip((kernel_scatter, plain_scatter), copies, strict=True)]
        programs = {
            "gather": Program(kernel_gather, [(layers, ids)]),
            "gather by XLA": Program(plain_gather, [(layers, ids)]),
            "scatter": Program(scatters[0], [()]),
            "scatter by XLA": Program(scatters[1], [()]),
        }
        seconds = {key: float(np.median(times)) for key, times in interleave(programs, 7, 0.02).items()}
        for key in figures:
            rate = 2 * block.nbytes / seconds[key] / 1e9
            ratio = seconds[f"{key} by XLA"] / seconds[key]
            figures[key] = f"{seconds[key] * 1e6:9.1f} us {rate:7.0f} GB/s read and written, {ratio:.2f} x XLA  "
    print(f"{name:20} gather  {figures['gather']}{'ok' if gathered else 'WRONG'}")
    print(f"{name:20} scatter {figures['scatter']}{'ok' if scattered else 'WRONG'}", flush=True)
    return gathered and scattered


class _Donating:
    """Scatters into its own layers again and again, in place."""

    def __init__(self, scatter: Any, block: jax.Array, layers: list[jax.Array], ids: jax.Array):
        self._scatter, self._block, self._layers, self._ids = scatter, block, layers, ids

    def __call__(self) -> list[jax.Array]:
        self._layers = self._scatter(self._block, self._layers, self._ids)
        return self._layers


def main(argv: list[str] | None = None) -> int:
    """Every geometry; 1 if one is wrong."""
    parser = argparse.ArgumentParser(description="Checks and times the page relayout kernels.")
    parser.add_argument("--dry-run", action="store_true", help="small sizes, simulated on the CPU, no times")
    dry = parser.parse_args(argv).dry_run
    right = []
    for name, count, heads, width, dtype, order in GEOMETRIES:
        geometry = (name, 3 if dry else count, heads, width, dtype, order)
        right.append(run(geometry, *((6, 4) if dry else (512, 64)), interpret=dry))
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
