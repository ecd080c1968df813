"""One kernel with everything static chosen: the unit that the kernel report compiles and judges."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Variant:
    """A function and the shapes to compile it for.

    A kernel's folder lists its variants in a `variants.py` with a function `variants() -> Sequence[Variant]`, which
    `pallas_kernels.report.registry` names. Building the list must be cheap and must not touch a device.

    Args:
      kernel: the kernel's folder under `pallas_kernels`, for example `"swa_latent_decode"`.
      name: unique within the kernel; letters, digits, `-`, `_`, `.`, for example `"h64-s4-w513-split2"`.
      function: what `jax.jit` compiles; all static choices are already bound (`functools.partial`). It takes
        `arguments` positionally and returns arrays.
      arguments: a `jax.ShapeDtypeStruct` for each positional argument.
      expects_tensor_cores: whether machine code without `wgmma` (HGMMA, QGMMA) is a fault. False for pure copies.
      expects_bulk_copies: whether machine code without TMA or bulk copies is a fault.
      expects_cluster_stores: whether machine code without distributed shared memory stores is a fault.
    """

    kernel: str
    name: str
    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    expects_tensor_cores: bool = True
    expects_bulk_copies: bool = True
    expects_cluster_stores: bool = False

    def __post_init__(self):
        """Checks that the names can be file names and that the arguments are shapes."""
        for what, text in (("kernel", self.kernel), ("name", self.name)):
            if not text or not all(c.isalnum() or c in "-_." for c in text):
                raise ValueError(f"Variant {what} must be letters, digits, '-', '_' or '.', got {text!r}")
        for position, argument in enumerate(self.arguments):
            if not isinstance(argument, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"Variant {self.kernel}/{self.name}: argument {position} must be a jax.ShapeDtypeStruct, "
                    f"got {type(argument).__name__}"
                )
