"""Argument checks shared by the functions on page tables, run once before anything is traced."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int

INT32_MAX = 2**31 - 1


def is_concrete(*values: Any) -> bool:
    """Whether every value is an array that can be read on the host: no tracer, no description, nothing donated."""
    return all(_readable(value) for value in values)


def _readable(value: Any) -> bool:
    if isinstance(value, jax.Array):
        return not isinstance(value, Tracer) and not value.is_deleted()
    return isinstance(value, np.ndarray)


def on_host(value: Any, rows: int) -> np.ndarray | None:
    """Returns a caller's per-row argument as numpy, a single number repeated, or None if it is traced.

    Ask before the argument becomes a jax array: inside a trace that conversion hides a constant's value.
    """
    if isinstance(value, Tracer) or not (is_concrete(value) or np.ndim(value) <= 1):
        return None
    return np.broadcast_to(np.asarray(value), (rows,))


def as_int32(name: str, value: Any) -> Any:
    """Returns `value` as int32, or leaves a description (`jax.ShapeDtypeStruct`) as it is.

    Raises:
      TypeError: if it is not of an integer dtype.
      ValueError: if it is an integer that int32 cannot hold.
    """
    if not hasattr(value, "dtype"):
        value = np.asarray(value)
        if value.size == 0 and value.dtype == np.float64:  # what numpy makes of an empty list
            value = value.astype(np.int32)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"{name} must have an integer dtype, got {value.dtype}")
    if isinstance(value, (np.ndarray, np.generic)):
        if value.size and (value.min() < -INT32_MAX - 1 or value.max() > INT32_MAX):
            raise ValueError(f"{name} must fit int32, got values from {value.min()} to {value.max()}")
        return jnp.asarray(value, jnp.int32)
    if not isinstance(value, jax.Array):
        return value
    if value.dtype == jnp.int32:
        # `jnp.full(rows, 4)` is weakly typed, which a step's results are not: a jitted step would be traced twice.
        return value.astype(jnp.int32) if value.weak_type else value
    # A wider or unsigned value past the range must not wrap into a page or a length that exists.
    info = jnp.iinfo(value.dtype)
    low, high = max(int(info.min), -INT32_MAX - 1), min(int(info.max), INT32_MAX)
    return jnp.clip(value, low, high).astype(jnp.int32)


def per_row(name: str, value: Any, rows: int) -> Int[Array, " B"]:
    """Returns an int32 value per row; a single number stands for all rows.

    Raises:
      TypeError: if it is not of an integer dtype.
      ValueError: if it has another shape than `(rows,)`.
    """
    value = as_int32(name, value)
    if value.shape == ():
        return jnp.full((rows,), value, jnp.int32)
    if value.shape != (rows,):
        raise ValueError(
            f"{name} must have one value per row of the table: expected shape ({rows},), got {value.shape}"
        )
    return value


def refuse_rows(what: str, bad: np.ndarray, **values: np.ndarray) -> None:
    """Raises `ValueError` that names the first row in which `bad` is true, with that row's values."""
    rows = np.flatnonzero(bad)
    if rows.size:
        row = int(rows[0])
        shown = ", ".join(f"{name} {int(value[row])}" for name, value in values.items())
        raise ValueError(f"row {row}: {what} ({shown})")


def integer(name: str, value: Any) -> int:
    """Returns `value` as a Python int, or raises `TypeError` if it is not an integer."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None


def positive_int(name: str, value: Any) -> int:
    """Returns `value` as a Python int of at least 1 that int32 holds.

    Raises:
      TypeError: if it is not an integer.
      ValueError: if it is out of range.
    """
    number = integer(name, value)
    if not 1 <= number <= INT32_MAX:
        raise ValueError(f"{name} must be at least 1 and fit int32, got {number}")
    return number
