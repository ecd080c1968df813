"""The implementations of the decode by name, and the choice among them."""

from collections.abc import Callable

import jax

from dots_jax.decode import xla
from dots_jax.pages import PageTable

NAMES = ("xla", "mosaic_gpu", "interpret")


def choose(
    name: str | None, q: jax.Array, kv_pages: jax.Array, table: PageTable, *, window: int | None, v_dim: int
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The implementation called `name`, or the best that can run on these arguments when it is None.

    Raises:
      ValueError: for an unknown name.
      NotImplementedError: if the one that was asked for cannot run; the message says why.
    """
    if name not in (None, *NAMES):
        raise ValueError(f"implementation must be None or one of {', '.join(NAMES)}; got {name!r}")
    if name in ("mosaic_gpu", "interpret"):
        raise NotImplementedError(f"implementation {name!r} cannot run: the kernel has not landed yet")
    return xla.decode
