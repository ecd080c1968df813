"""Tensor-core accumulation into a value that lives on: `acc + a @ b`.

On the GPU the accumulator must stay in the registers it is in, which `pl.run_state` expresses and the interpreter
does not run; its twin starts from zero and adds.
"""

from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def accumulate(acc: jax.Array, issue: Callable[[jax.Array], None], *, interpret: bool) -> jax.Array:
    """Runs `issue(acc_ref)`, which issues `plgpu.wgmma` calls into it, on top of `acc`, and waits for them.

    Args:
      acc: float32 [M, N], in the layout of a tensor-core accumulator.
      issue: Issues the products.
      interpret: Whether the kernel is being simulated.
    """
    if not interpret:
        run = pl.run_state(issue)
        return cast(jax.Array, run(plgpu.WGMMAAccumulatorRef.init(acc)))

    def from_zero(acc_ref):
        issue(acc_ref)
        return acc_ref[...]

    rows, columns = acc.shape
    return acc + pl.run_scoped(from_zero, plgpu.WGMMAAccumulatorRef((rows, columns), jnp.float32))
