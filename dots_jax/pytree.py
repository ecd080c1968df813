"""Frozen dataclasses as pytrees whose unflattening never runs a check.

JAX rebuilds containers with placeholder leaves (`object()`, `None`, other trees) inside `vmap`, `tree.map` and friends,
so only the constructor a person calls may validate; rebuilding has to bypass it.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, dataclass_transform

import jax

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, eq_default=False)
def frozen_pytree(*, static: tuple[str, ...] = ()) -> Callable[[type[_T]], type[_T]]:
    """Makes the decorated class a frozen dataclass and registers it as a pytree.

    Args:
      static: names of the fields that are hashable metadata rather than leaves; they become part of the tree's
        structure, so a jitted function is compiled once for each value.

    `__post_init__` runs when a person constructs the class and never when JAX unflattens it. Two values do not compare
    equal unless they are the same object, because comparing arrays has no single truth value.
    """

    def decorate(cls: type[_T]) -> type[_T]:
        cls = dataclasses.dataclass(frozen=True, eq=False, repr="__repr__" not in vars(cls))(cls)
        names = [field.name for field in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
        if unknown := set(static) - set(names):
            raise TypeError(f"{cls.__name__} has no fields {sorted(unknown)}")
        data = tuple(name for name in names if name not in static)

        def flatten_with_keys(value: Any):
            leaves = tuple((jax.tree_util.GetAttrKey(name), getattr(value, name)) for name in data)
            return leaves, tuple(getattr(value, name) for name in static)

        def flatten(value: Any):
            return tuple(getattr(value, name) for name in data), tuple(getattr(value, name) for name in static)

        def unflatten(metadata: tuple[Any, ...], leaves: Iterable[Any]) -> _T:
            value = object.__new__(cls)
            for name, leaf in zip(data, leaves, strict=True):
                object.__setattr__(value, name, leaf)
            for name, item in zip(static, metadata, strict=True):
                object.__setattr__(value, name, item)
            return value

        jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
        return cls

    return decorate
