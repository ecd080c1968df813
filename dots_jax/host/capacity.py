"""How many host pages to allocate: from a multiple of the device pool, or from bytes.

Two roundings, each named at the call:

- `"up"` (for one pool's own wish, the upstream engine's rule): `pages = tokens // page_size + 1`. A whole page is added
  even when the tokens already fill their pages, so a request in bytes is exceeded by at most one page, and any request
  gives at least one page.
- `"down"` (for a limit that must hold): `pages = tokens // page_size`. The bytes never exceed the limit.

All arithmetic is in integers; a ratio is applied as `int(device_tokens * ratio)`. How many bytes a rank may take of the
host it shares is `host_memory_budget`'s business; its answer is what to pass here.
"""

import dataclasses
import math
import operator
from collections.abc import Mapping
from typing import Literal, Protocol

Rounding = Literal["up", "down"]


class SizedSpec(Protocol):
    """What capacity needs to know of a `KVSpec` or `LatentSpec`."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        ...


@dataclasses.dataclass(frozen=True)
class PoolDemand:
    """A pool that shares a budget.

    Attributes:
      spec: its geometry.
      device_tokens: tokens in the device pool behind which it stands; pools of one model often differ in this.
    """

    spec: SizedSpec
    device_tokens: int

    def __post_init__(self):
        _at_least("device_tokens", self.device_tokens, 1)


def pages_for_tokens(tokens: int, page_size: int, *, rounding: Rounding = "up") -> int:
    """Pages for a number of tokens; see the module for the roundings.

    Raises:
      ValueError: a negative number of tokens, a page size below 1, or an unknown rounding.
    """
    tokens = _at_least("tokens", tokens, 0)
    page_size = _at_least("page_size", page_size, 1)
    if rounding not in ("up", "down"):
        raise ValueError(f"rounding must be 'up' or 'down'; got {rounding!r}.")
    return tokens // page_size + (rounding == "up")


def pages_from_ratio(device_tokens: int, ratio: float, page_size: int, *, rounding: Rounding = "up") -> int:
    """Pages of a host pool that holds `ratio` times the tokens of its device pool.

    Raises:
      ValueError: the ratio is not finite and positive, or as for `pages_for_tokens`.
    """
    if not (math.isfinite(ratio) and ratio > 0):
        raise ValueError(f"ratio must be finite and positive; got {ratio!r}.")
    return pages_for_tokens(int(_at_least("device_tokens", device_tokens, 1) * ratio), page_size, rounding=rounding)


def pages_from_bytes(nbytes: int | float, spec: SizedSpec, *, rounding: Rounding = "up") -> int:
    """Pages of one pool for a number of bytes (of host memory, on this rank).

    Args:
      nbytes: bytes; a float such as `10e9` is cut to an integer.
      spec: the pool's geometry.
      rounding: `"up"` may exceed `nbytes` by at most one page; `"down"` never does.

    Raises:
      ValueError: bytes not finite and positive, or `"down"` and not even one page fits (both figures are named).
    """
    if not (math.isfinite(nbytes) and nbytes > 0):
        raise ValueError(f"nbytes must be finite and positive; got {nbytes!r}.")
    pages = pages_for_tokens(int(nbytes) // spec.bytes_per_token, spec.page_size, rounding=rounding)
    if not pages:
        page = spec.bytes_per_token * spec.page_size
        raise ValueError(f"One page takes {page} bytes, more than the {int(nbytes)} bytes given.")
    return pages


def share_budget(total_bytes: int, demands: Mapping[str, PoolDemand]) -> dict[str, int]:
    """Splits one budget among pools in proportion to the bytes of their device pools.

    Pool i gets `total_bytes * bytes_i / sum(bytes)` with `bytes_i = device_tokens * bytes_per_token`, which gives every
    pool the same ratio of host to device tokens. Each share is rounded down to whole pages, so together they never
    exceed the budget and fall short of it by less than one page of each pool.

    Returns:
      Pages by pool name.

    Raises:
      ValueError: no pools, a budget below 1 byte, or a share too small for one page of its pool (which is named).
    """
    total_bytes = _at_least("total_bytes", total_bytes, 1)
    if not demands:
        raise ValueError("A budget needs at least one pool to share it; got none.")
    wanted = sum(demand.device_tokens * demand.spec.bytes_per_token for demand in demands.values())
    pages = {}
    for name, demand in demands.items():
        tokens = total_bytes * demand.device_tokens // wanted
        pages[name] = pages_for_tokens(tokens, demand.spec.page_size, rounding="down")
        if not pages[name]:
            page = demand.spec.page_size * demand.spec.bytes_per_token
            share = tokens * demand.spec.bytes_per_token
            raise ValueError(
                f"Pool {name!r}: one page takes {page} bytes, its share of {total_bytes} bytes is {share}."
            )
    return pages


def _at_least(name: str, value: int, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer; got {value!r}.") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}; got {number}.")
    return number
