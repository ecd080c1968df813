"""Keeping a buffer's leaves where they are, and as they are, while a jitted function replaces them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer

from dots_jax.host.layouts import Side

# To a type checker `jax.Device` is a value, not a type.
Device = Any


def in_space(array: Array, space: Any) -> Array:
    """The array in a memory space, moved there if it is not."""
    return array if jax.typeof(array).memory_space == space else jax.device_put(array, space)


def is_traced(tree: Any) -> bool:
    """Whether any leaf is being traced."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


class Place(NamedTuple):
    """What a function has to know about where its arrays are, before it is traced.

    Attributes:
      on_cpu: whether it is compiled for a CPU.
      reinterpret: whether it has to move the stored dtype as bytes: while tracing, where the compiler's options are the
        caller's.
    """

    on_cpu: bool
    reinterpret: bool


def platform_of(tree: Any) -> str:
    """Platform of the first array whose place is known; that of the default device if none is (tracing, NumPy)."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, Array) and not isinstance(leaf, Tracer):
            return next(iter(leaf.sharding.device_set)).platform
    default = jax.config.jax_default_device  # a device, a platform's name or None
    return getattr(default, "platform", default) or jax.default_backend()


def _is_widened(dtype: Any) -> bool:
    """Whether XLA for CPUs widens arrays of this dtype before slicing them: 8-bit floats, which quiets NaNs."""
    dtype = jnp.dtype(dtype)
    return dtype.itemsize == 1 and dtype.kind not in "iub"


def _place_of(tree: Any, dtype: Any) -> Place:
    on_cpu = platform_of(tree) == "cpu"
    return Place(on_cpu, on_cpu and _is_widened(dtype) and is_traced(tree))


def as_bytes(array: Array, place: Place) -> Array:
    """An array of the stored dtype as bytes where it has to be, at the cost of a pass over it."""
    return lax.bitcast_convert_type(array, jnp.uint8) if place.reinterpret else array


def from_bytes(array: Array, dtype: Any) -> Array:
    """The inverse of `as_bytes`."""
    return array if array.dtype == dtype else lax.bitcast_convert_type(array, dtype)


def rows_of(array: Array, side: Side, place: Place) -> Array:
    """A device array as `[slots, heads, width]` of a side, however it spreads a row over axes."""
    array = as_bytes(array, place)
    return array.reshape(array.shape[0], side.heads, side.width)


def for_moving(leaf: Array, side: Side, place: Place) -> Array:
    """A leaf as functions here compute on it, with rows as wide as those of `side`.

    On a CPU the host label goes: all its memory kinds are the same memory, so that this moves nothing and only
    lets operations mix leaves with device arrays. Elsewhere the leaf stays where it is, and blocks are moved to it.
    """
    if place.on_cpu:
        leaf = in_space(leaf, jax.memory.Space.Device)
    leaf = as_bytes(leaf, place)
    if side.width == leaf.shape[-1]:
        return leaf
    return leaf.reshape(*leaf.shape[:-2], side.heads, side.width)


def restore(original: Array, leaf: Array) -> Array:
    """The inverse of `for_moving`: shape, dtype and memory space of the leaf that is replaced."""
    leaf = leaf if leaf.shape == original.shape else leaf.reshape(original.shape)
    return in_space(from_bytes(leaf, original.dtype), jax.typeof(original).memory_space)


def _options(dtype: Any, place: Place) -> dict[str, str] | None:
    """Compiler options under which a widened dtype is sliced as it is: without the pass that widens it."""
    if not (place.on_cpu and _is_widened(dtype)):
        return None
    return {"xla_disable_hlo_passes": f"float-normalization-{jnp.dtype(dtype).name.replace('float8_', 'f8')}"}


@functools.lru_cache(maxsize=256)
def _jitted(
    function: Callable, static: tuple, dtype: Any, place: Place, donate: bool, structure: Any, shardings: Any
) -> Callable:
    return jax.jit(
        functools.partial(function, place=place, **dict(static)),
        donate_argnums=(0,) if donate else (),
        out_shardings=None if shardings is None else jax.tree.unflatten(structure, shardings),
        compiler_options=_options(dtype, place),
    )


def call(function: Callable, dtype: Any, *args: Any, **static: Any) -> Any:
    """Calls `function(*args, place=..., **static)` compiled, or as it is while tracing.

    Args:
      function: a module-level function.
      dtype: the stored dtype.
      *args: pytrees of arrays.
      **static: hashable keywords.
    """
    place = _place_of(args, dtype)
    if is_traced(args):
        return function(*args, place=place, **static)
    return _jitted(function, tuple(sorted(static.items())), dtype, place, False, None, None)(*args)


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
    place = _place_of((value, args), dtype)
    if is_traced((value, args)):
        return function(value, *args, place=place, **static)
    leaves, structure = jax.tree.flatten(value)
    shardings = tuple(leaf.sharding if isinstance(leaf, Array) else None for leaf in leaves)
    return _jitted(function, tuple(sorted(static.items())), dtype, place, donate, structure, shardings)(value, *args)
