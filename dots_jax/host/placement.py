"""Keeping a buffer's leaves where they are, and as they are, while a jitted function replaces them."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer

if TYPE_CHECKING:
    from dots_jax.host.buffers import HostKV

# To a type checker `jax.Device` is a value, not a type.
Device = Any


def relabel(host: "HostKV") -> "HostKV":
    """On a CPU backend, drops the host label of the leaves while a function computes on them.

    All memory kinds of the CPU backend are the same memory, so that this moves nothing; it only lets operations mix the
    leaves with device arrays. Elsewhere the leaves stay where they are, and blocks are moved to them.
    """
    if jax.default_backend() != "cpu":
        return host
    return jax.tree.map(lambda leaf: in_space(leaf, jax.memory.Space.Device), host)


def in_space(array: Array, space: Any) -> Array:
    """The array in a memory space, moved there if it is not."""
    return array if jax.typeof(array).memory_space == space else jax.device_put(array, space)


def rebuild(original: "HostKV", leaves: dict[str, Array]) -> "HostKV":
    """A buffer of the same kind with other leaves, each in the memory space of the one it replaces."""
    old, structure = jax.tree.flatten(original)
    new = [in_space(leaf, jax.typeof(was).memory_space) for was, leaf in zip(old, leaves.values(), strict=True)]
    return jax.tree.unflatten(structure, new)


def is_traced(tree: Any) -> bool:
    """Whether any leaf is being traced."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def _is_widened(dtype: Any) -> bool:
    """Whether XLA widens arrays of this dtype before slicing them: 8-bit floats on the CPU, which quiets NaNs."""
    dtype = jnp.dtype(dtype)
    return jax.default_backend() == "cpu" and dtype.itemsize == 1 and dtype.kind not in "iub"


def as_bytes(array: Array) -> Array:
    """A widened dtype as bytes, at the cost of a pass over the array; any other array as it is."""
    return lax.bitcast_convert_type(array, jnp.uint8) if _is_widened(array.dtype) else array


def from_bytes(array: Array, dtype: Any) -> Array:
    """The inverse of `as_bytes`."""
    return array if array.dtype == dtype else lax.bitcast_convert_type(array, dtype)


def rows_of(array: Array, reinterpret: bool) -> Array:
    """A device array as `[slots, heads, width]`; a latent row may come without its one head."""
    array = as_bytes(array) if reinterpret else array
    return array[:, None] if array.ndim == 2 else array


def leaves_to_move(host: "HostKV", reinterpret: bool) -> dict[str, Array]:
    """The leaves by name, as bytes where slicing would change them."""
    return {name: as_bytes(leaf) if reinterpret else leaf for name, leaf in host.leaves.items()}


def rebuild_moved(original: "HostKV", leaves: dict[str, Array]) -> "HostKV":
    """The inverse of `leaves_to_move`, each leaf where it was."""
    return rebuild(original, {name: from_bytes(leaf, original.spec.dtype) for name, leaf in leaves.items()})


def _options(dtype: Any) -> dict[str, str] | None:
    """Compiler options under which a widened dtype is sliced as it is: without the pass that widens it."""
    if not _is_widened(dtype):
        return None
    return {"xla_disable_hlo_passes": f"float-normalization-{jnp.dtype(dtype).name.replace('float8_', 'f8')}"}


@functools.lru_cache(maxsize=256)
def _jitted(function: Callable, static: tuple, dtype: Any, donate: bool, structure: Any, shardings: Any) -> Callable:
    return jax.jit(
        functools.partial(function, **dict(static)),
        donate_argnums=(0,) if donate else (),
        out_shardings=None if shardings is None else jax.tree.unflatten(structure, shardings),
        compiler_options=_options(dtype),
    )


def call(function: Callable, dtype: Any, *args: Any, **static: Any) -> Any:
    """Calls `function(*args, exact, **static)` compiled, or as it is while tracing.

    Args:
      function: a module-level function. Its keyword `reinterpret` tells it to move a widened dtype as bytes: while
        tracing, where the compiler's options are the caller's.
      dtype: the stored dtype.
      *args: pytrees of arrays.
      **static: hashable keywords.
    """
    if is_traced(args):
        return function(*args, reinterpret=True, **static)
    return _jitted(function, (*sorted(static.items()), ("reinterpret", False)), dtype, False, None, None)(*args)


def update(function: Callable, dtype: Any, value: Any, *args: Any, donate: bool, **static: Any) -> Any:
    """Like `call`, for a function whose result replaces its first argument where that lives.

    Args:
      function: see `call`; its result has the structure of `value`.
      dtype: the stored dtype.
      value: a pytree of arrays.
      *args: further arguments.
      donate: let the result take over the memory of `value`. Has no effect while tracing, where the caller's own `jit`
        decides.
      **static: hashable keywords.
    """
    if is_traced((value, args)):
        return function(value, *args, reinterpret=True, **static)
    leaves, structure = jax.tree.flatten(value)
    shardings = tuple(leaf.sharding if isinstance(leaf, Array) else None for leaf in leaves)
    static["reinterpret"] = False
    return _jitted(function, tuple(sorted(static.items())), dtype, donate, structure, shardings)(value, *args)
