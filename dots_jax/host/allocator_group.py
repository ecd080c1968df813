"""Several host pools that give out slots together: all of them or none."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from dots_jax.host.allocator import SlotAllocator

Reclaim = Callable[["AllocatorGroup", Mapping[str, int]], "AllocatorGroup"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False, slots=True, init=False)
class AllocatorGroup:
    """Named `SlotAllocator`s, immutable like them, so that a refusal in one pool leaves nothing to undo in the others.

    Attributes:
      pools: the allocators by name, in name order; this is the order in which requests are looked at.
    """

    pools: Mapping[str, SlotAllocator]

    def __init__(self, pools: Mapping[str, SlotAllocator] | Iterable[tuple[str, SlotAllocator]]):
        """Groups pools given as a mapping or as (name, allocator) pairs.

        Raises:
          ValueError: no pool, or a name given twice.
          TypeError: something that is not a `SlotAllocator`.
        """
        pairs: list[Any] = [*(pools.items() if isinstance(pools, Mapping) else pools)]
        if not pairs:
            raise ValueError("An allocator group needs at least one pool; got none.")
        seen: set[str] = set()
        for name, pool in pairs:
            if name in seen:
                raise ValueError(f"Pool {name!r} is given twice; expected distinct names.")
            if not isinstance(pool, SlotAllocator):
                raise TypeError(f"Pool {name!r} must be a SlotAllocator; got {type(pool).__name__}.")
            seen.add(name)
        object.__setattr__(self, "pools", MappingProxyType(dict(sorted(pairs))))

    @property
    def available(self) -> dict[str, int]:
        """Free slots of each pool, in tokens."""
        return {name: pool.available for name, pool in self.pools.items()}

    def alloc(
        self, counts: Mapping[str, int], *, reclaim: Reclaim | None = None
    ) -> tuple["AllocatorGroup", dict[str, np.ndarray] | None]:
        """Takes slots from every pool named, or from none of them.

        Args:
          counts: tokens wanted of each pool, each a positive multiple of that pool's page size. Pools left out are
            not touched.
          reclaim: called at most once, if a pool is short, with this group and the full `counts`; it returns the group
            after it gave back what it could (evictions, for example), and the request is tried once more on that.

        Returns:
          The new group and the slots by pool name. If a pool is still short: None, with the group that `reclaim`
          returned (what it evicted stays evicted) or, without it, this group.

        Raises:
          ValueError: no counts, an unknown pool, or a count that its pool refuses; the message names the pool.
        """
        group, slots = self._alloc(counts)
        if slots is None and reclaim is not None:
            group = reclaim(self, MappingProxyType(dict(counts)))
            if not isinstance(group, AllocatorGroup):
                raise TypeError(f"reclaim must return an AllocatorGroup; got {type(group).__name__}.")
            group, slots = group._alloc(counts)
        return group, slots

    def free(self, slots: Mapping[str, Any]) -> "AllocatorGroup":
        """Gives slots back to every pool named, or to none of them.

        Raises:
          ValueError: an unknown pool, or slots that their pool refuses; the message names the pool and the slot.
        """
        pools = dict(self.pools)
        for name in self._names(slots):
            with _naming(name):
                pools[name] = pools[name].free(slots[name])
        return AllocatorGroup(pools)

    def check(self) -> None:
        """Checks every pool; see `SlotAllocator.check`."""
        for name, pool in self.pools.items():
            with _naming(name):
                pool.check()

    def __repr__(self) -> str:
        return f"AllocatorGroup({', '.join(f'{name}: {pool!r}' for name, pool in self.pools.items())})"

    def __reduce__(self):
        return AllocatorGroup, (dict(self.pools),)

    def _names(self, requested: Mapping[str, Any]) -> list[str]:
        for name in requested:
            if name not in self.pools:
                raise ValueError(f"Unknown pool {name!r}; this group has {sorted(self.pools)}.")
        return sorted(requested)

    def _alloc(self, counts: Mapping[str, int]) -> tuple["AllocatorGroup", dict[str, np.ndarray] | None]:
        if not counts:
            raise ValueError("A request must name at least one pool; got none.")
        pools, slots = dict(self.pools), {}
        for name in self._names(counts):
            with _naming(name):
                # A pool that is short does not end the loop: a malformed count of a later pool is still refused.
                pools[name], slots[name] = pools[name].alloc(counts[name])
        if any(taken is None for taken in slots.values()):
            return self, None
        return AllocatorGroup(pools), slots


class _naming:
    """Puts the pool's name in front of the error that its allocator raises."""

    def __init__(self, name: str):
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ValueError):
            raise ValueError(f"Pool {self.name!r}: {error}") from error
