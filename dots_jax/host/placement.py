"""Keeping a buffer's leaves where they are while a jitted function replaces them."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from jax import Array
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
    return jax.tree.map(
        lambda leaf: (
            leaf
            if jax.typeof(leaf).memory_space == jax.memory.Space.Device
            else jax.device_put(leaf, jax.memory.Space.Device)
        ),
        host,
    )


def rebuild(original: "HostKV", leaves: dict[str, Array]) -> "HostKV":
    """A buffer of the same kind with other leaves, each in the memory space of the one it replaces."""
    old, structure = jax.tree.flatten(original)
    new = [
        leaf
        if jax.typeof(leaf).memory_space == jax.typeof(was).memory_space
        else jax.device_put(leaf, jax.typeof(was).memory_space)
        for was, leaf in zip(old, leaves.values(), strict=True)
    ]
    return jax.tree.unflatten(structure, new)


def is_traced(tree: Any) -> bool:
    """Whether any leaf is being traced."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


@functools.lru_cache(maxsize=256)
def _jitted(function: Callable, static: tuple, donate: bool, structure: Any, shardings: tuple) -> Callable:
    return jax.jit(
        functools.partial(function, **dict(static)),
        donate_argnums=(0,) if donate else (),
        out_shardings=jax.tree.unflatten(structure, shardings),
    )


def update(function: Callable, value: Any, *args: Any, donate: bool, **static: Any) -> Any:
    """Calls `function(value, *args, **static)`, whose result replaces `value` where `value` lives.

    Args:
      function: a module-level function; its result has the structure of `value`.
      value: a pytree of arrays.
      *args: further arguments.
      donate: let the result take over the memory of `value`. Has no effect while tracing, where the caller's own `jit`
        decides.
      **static: hashable keywords.
    """
    leaves, structure = jax.tree.flatten(value)
    if is_traced((value, args)):
        return function(value, *args, **static)
    shardings = tuple(leaf.sharding if isinstance(leaf, Array) else None for leaf in leaves)
    return _jitted(function, tuple(sorted(static.items())), donate, structure, shardings)(value, *args)
