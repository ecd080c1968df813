"""The floor of a shape: no way of computing it can be faster on a device with these ceilings."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from dots_jax.bench.shapes import Shape
from dots_jax.bench.timing import Program, interleave


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches in this run.

    Args:
      bytes_per_s: of a large copy, bytes read and written both counted.
      flops_per_s: of a large matrix product on random data in the benchmark's dtype.
    """

    bytes_per_s: float
    flops_per_s: float

    def floor_s(self, shape: Shape, itemsize: int) -> float:
        """Seconds for the shape's bytes or for its arithmetic, whichever is longer."""
        return max(shape.min_bytes(itemsize) / self.bytes_per_s, shape.flops / self.flops_per_s)

    def bound_by(self, shape: Shape, itemsize: int) -> str:
        """Which of the two decides: `"bytes"` or `"flops"`."""
        bytes_s, flops_s = shape.min_bytes(itemsize) / self.bytes_per_s, shape.flops / self.flops_per_s
        return "bytes" if bytes_s >= flops_s else "flops"


class _InPlace:
    """Rewrites its own array in the same memory, once for each launch."""

    def __init__(self, words: jax.Array):
        self._words = words
        self._rewrite = jax.jit(lambda x: x ^ np.uint32(1), donate_argnums=0)

    def __call__(self) -> jax.Array:
        self._words = self._rewrite(self._words)
        return self._words


def measure_ceilings(dtype, *, copy_bytes: int, matrix_size: int, rounds: int, round_s: float) -> Ceilings:
    """Times a copy of `copy_bytes` and a square matrix product on the default device.

    Args:
      dtype: of the matrices; accumulation is float32.
      copy_bytes: several times the cache.
      matrix_size: rows of each matrix.
      rounds: the fastest of this many counts.
      round_s: seconds that each round aims at.
    """
    words = jnp.arange(copy_bytes // 4, dtype=jnp.uint32)
    a, b = (
        jax.random.normal(key, (matrix_size, matrix_size), jnp.float32).astype(dtype)
        for key in jax.random.split(jax.random.key(0))
    )
    product = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(dtype))
    programs = {
        # Two ways of moving every byte: a copy, which may have an engine of its own but allocates what it writes (on a
        # CPU that costs more than the copying), and a pass in place.
        "copy": Program(jax.jit(jnp.copy), [(words,)]),
        "rewrite": Program(_InPlace(words + np.uint32(1)), [()]),
        "product": Program(product, [(a, b)]),
    }
    # The fastest round: a ceiling that a busy moment lowered would make everything look good.
    seconds = {name: float(times.min()) for name, times in interleave(programs, rounds, round_s).items()}
    return Ceilings(
        bytes_per_s=2 * words.nbytes / min(seconds["copy"], seconds["rewrite"]),
        flops_per_s=2 * matrix_size**3 / seconds["product"],
    )
