"""Slot vectors, checked with NumPy before anything is traced.

A slot is a token index. JAX wraps negative indices, clamps reads past the end and drops writes past it, so a slot that
is not checked here would move the wrong token in silence.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer


class SlotTypeError(TypeError, ValueError):
    """A slot vector is not made of integers; also a `ValueError`, like every other refused slot vector."""


class SlotPair(NamedTuple):
    """Checked host and device slots of one transfer.

    Attributes:
      host: int32[n] slots, or a traced vector that could not be checked.
      device: int32[n] slots, likewise.
      checked: whether both were checked.
      by_page: whether both are whole pages: groups of consecutive slots that start on a page boundary on the host side
        (the device side may start anywhere). Always False where `checked` is False.
    """

    host: Any
    device: Any
    checked: bool
    by_page: bool


def _is_unknown(slots: Any) -> bool:
    """Whether the values of a slot vector are unknown because a function is being traced."""
    if isinstance(slots, list | tuple):
        return any(isinstance(slot, Tracer) for slot in slots)
    return isinstance(slots, Tracer)


def as_slots(name: str, slots: Any) -> np.ndarray:
    """A slot vector as int64[n], from a list, a NumPy array or a device array.

    Raises:
      SlotTypeError: not integers.
      ValueError: not one-dimensional.
    """
    array = np.asarray(slots)
    if array.size == 0 and isinstance(slots, list | tuple):
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise SlotTypeError(f"{name}: expected integer slots, got {array.dtype}.")
    if array.ndim != 1:
        raise ValueError(f"{name}: expected a vector of slots, got shape {array.shape}.")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name}: slot {array.max()} is out of range.")
    return array.astype(np.int64)


def _first(mask: np.ndarray) -> int:
    return int(np.argmax(mask))


def check_range(name: str, slots: np.ndarray, size: int) -> None:
    """Refuses negative, out-of-range and repeated slots.

    Raises:
      ValueError: naming the first offender and its place.
    """
    if (bad := slots < 0).any():
        i = _first(bad)
        raise ValueError(f"{name}[{i}]: slot {slots[i]} is negative.")
    if (bad := slots >= size).any():
        i = _first(bad)
        raise ValueError(f"{name}[{i}]: slot {slots[i]} is out of range; there are {size} slots.")
    _, first_seen, inverse = np.unique(slots, return_index=True, return_inverse=True)
    if (bad := first_seen[inverse] != np.arange(slots.size)).any():
        i = _first(bad)
        raise ValueError(f"{name}[{i}]: slot {slots[i]} is a duplicate of {name}[{first_seen[inverse[i]]}].")


def find_broken_page(name: str, slots: np.ndarray, page_size: int, *, aligned: bool) -> str | None:
    """What stops slots from being whole pages, naming the first offender; None where nothing does."""
    if slots.size % page_size:
        return f"{name}: expected a multiple of the page size {page_size}, got {slots.size} slots."
    groups = slots.reshape(-1, page_size)
    offsets = np.arange(page_size)
    starts = groups[:, :1]
    bad = groups != starts + offsets
    if aligned:
        bad[:, 0] |= groups[:, 0] % page_size != 0
    if not bad.any():
        return None
    i = _first(bad.reshape(-1))
    page, offset = divmod(i, page_size)
    if offset == 0:
        return f"{name}[{i}]: slot {slots[i]} does not start a page of {page_size}."
    expected = int(groups[page, 0]) + offset
    return (
        f"{name}[{i}]: slot {slots[i]} breaks the page that starts with slot {groups[page, 0]}; "
        f"expected slot {expected} (page size {page_size})."
    )


def check_pages(name: str, slots: Any, num_pages: int, page_size: int) -> np.ndarray:
    """The page numbers of a slot vector that must be whole pages of a buffer.

    Returns:
      int64[n / page_size] page numbers, in the order given.

    Raises:
      ValueError: the vector is not that; naming the first offender.
    """
    array = as_slots(name, slots)
    check_range(name, array, num_pages * page_size)
    if problem := find_broken_page(name, array, page_size, aligned=True):
        raise ValueError(problem)
    return array[::page_size] // page_size


def check_pair(
    host_slots: Any, device_slots: Any, *, num_host: int, num_device: int, page_size: int, need_pages: bool
) -> SlotPair:
    """Checks both slot vectors of a transfer as far as their values are known.

    Args:
      host_slots: slots of the host buffer.
      device_slots: slots of the device arrays, one for each host slot.
      num_host: slots of the host buffer.
      num_device: slots of the device arrays.
      page_size: tokens of one page.
      need_pages: whether only whole pages can be moved.

    Raises:
      SlotTypeError: not integers.
      ValueError: lengths differ, or a slot is negative, out of range, repeated, or (with `need_pages`) not part of a
        whole page; naming the first offender.
    """
    sides = {"host_slots": (host_slots, num_host), "device_slots": (device_slots, num_device)}
    known: dict[str, np.ndarray] = {}
    for name, (slots, size) in sides.items():
        if _is_unknown(slots):
            if not isinstance(slots, Tracer) or slots.ndim != 1 or slots.dtype.kind not in "iu":
                got = jax.typeof(slots) if isinstance(slots, Tracer) else f"a {type(slots).__name__} of traced scalars"
                raise SlotTypeError(f"{name}: expected a vector of integer slots, got {got}.")
            continue
        known[name] = as_slots(name, slots)
        check_range(name, known[name], size)
    values: dict[str, Any] = {name: known.get(name, slots) for name, (slots, _) in sides.items()}
    lengths = {name: value.shape[0] for name, value in values.items()}
    if lengths["host_slots"] != lengths["device_slots"]:
        raise ValueError(
            f"host_slots and device_slots: expected equal lengths, got {lengths['host_slots']} and "
            f"{lengths['device_slots']}."
        )
    problems = [find_broken_page(name, a, page_size, aligned=name == "host_slots") for name, a in known.items()]
    problem = next((p for p in problems if p), None)
    if need_pages and lengths["host_slots"] % page_size:
        problem = (
            problem
            or f"host_slots: expected a multiple of the page size {page_size}, got {lengths['host_slots']} slots."
        )
    if problem and need_pages:
        hint = "This buffer moves whole pages; page_first and page_head with io_backend='kernel' move single tokens."
        raise ValueError(f"{problem} {hint}")
    checked = len(known) == 2
    values = {name: a.astype(np.int32) if name in known else a for name, a in values.items()}
    return SlotPair(values["host_slots"], values["device_slots"], checked, checked and problem is None)
