"""Which host slots are free: an immutable first-in-first-out allocator.

Slots are token indices; page `c` is the `page_size` slots starting at `c * page_size`, and pages are what is taken and
given back. Every operation returns a new allocator and leaves the old one valid, at a cost that follows the slots moved
and not the size of the buffer:

    ring   [ . . 4 5 6 7 0 1 . . ]      page numbers in the order in which they were freed, shared by all values;
                 ^head       ^tail      an allocator reads [head, tail) and only ever writes past its own tail
    used   [ block ][ block ][ block ]  one flag a page in small read-only blocks; a change copies the blocks it touches

Order (the upstream engine's): slots leave in the order in which they came free, at first 0, 1, 2, ... Slot 0 is a slot
like any other.
"""

import dataclasses
import operator
import threading
from typing import Any

import numpy as np
from jaxtyping import Int

_BLOCK = 512  # pages per block of flags: a copy of one costs about as much as touching the interpreter does


class _Ring:
    """A log of freed pages that several allocators share; entries once written never change."""

    def __init__(self, pages: np.ndarray, capacity: int):
        self._entries = np.empty(capacity, np.int64)
        self._entries[: len(pages)] = pages
        self._written = len(pages)
        self._lock = threading.Lock()

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._entries[start:stop]

    def append(self, tail: int, pages: np.ndarray) -> bool:
        """Writes `pages` at `tail`; False if a later value already wrote there, or there is no room."""
        with self._lock:
            if tail != self._written or tail + len(pages) > len(self._entries):
                return False
            self._entries[tail : tail + len(pages)] = pages
            self._written += len(pages)
            return True


@dataclasses.dataclass(frozen=True, eq=False, repr=False, slots=True)
class SlotAllocator:
    """Hands out host slots in whole pages. Immutable: build one with `SlotAllocator.create`.

    Allocating or freeing n slots costs O(n). Freeing twice from the *same* old value makes the second result copy the
    list of free pages once.

    Attributes:
      num_pages: pages in the buffer.
      page_size: tokens a page.
    """

    num_pages: int
    page_size: int
    _ring: _Ring
    _head: int
    _tail: int
    _used: tuple[np.ndarray, ...]

    @classmethod
    def create(cls, num_pages: int, page_size: int) -> "SlotAllocator":
        """An allocator with all `num_pages * page_size` slots free.

        Raises:
          ValueError: either is not a positive integer.
        """
        num_pages = _positive("num_pages", num_pages)
        page_size = _positive("page_size", page_size)
        used = []
        for start in range(0, num_pages, _BLOCK):
            used.append(_frozen(np.zeros(min(_BLOCK, num_pages - start), bool)))
        return cls(num_pages, page_size, _Ring(np.arange(num_pages), 2 * num_pages), 0, num_pages, tuple(used))

    @property
    def num_slots(self) -> int:
        """Slots in the buffer, in tokens."""
        return self.num_pages * self.page_size

    @property
    def available(self) -> int:
        """Free slots, in tokens."""
        return (self._tail - self._head) * self.page_size

    @property
    def free_slots(self) -> Int[np.ndarray, " available"]:
        """The free slots in the order in which they would be handed out (a copy, O(available))."""
        return self._slots(self._ring.read(self._head, self._tail))

    def is_allocated(self, slots: Any) -> np.ndarray:
        """One flag a slot: whether it is handed out. Unknown slots raise `ValueError`."""
        return self._flags(self._known(slots) // self.page_size)

    def alloc(self, n: int, *, contiguous: bool = False) -> tuple["SlotAllocator", Int[np.ndarray, " n"] | None]:
        """Takes `n` slots.

        Args:
          n: slots wanted, in tokens; a positive multiple of the page size.
          contiguous: prefer one run of neighbouring pages (the lowest that is long enough) to the oldest free ones, so
            that a transfer touches one range. Costs a look through all free pages; without such a run the order is the
            usual one.

        Returns:
          The new allocator and int64 slots, whole pages one after the other; or this allocator and None if fewer than
          `n` slots are free.

        Raises:
          ValueError: `n` is not a positive multiple of the page size.
        """
        pages = self._pages_in(n)
        if pages > self._tail - self._head:
            return self, None
        run = self._run(pages) if contiguous else None
        if run is None:
            taken = self._ring.read(self._head, self._head + pages).copy()
            ring, head, tail = self._ring, self._head + pages, self._tail
        else:
            free = self._ring.read(self._head, self._tail)
            rest = free[(free < run) | (free >= run + pages)]
            taken = np.arange(run, run + pages)
            ring, head, tail = _Ring(rest, 2 * self.num_pages), 0, len(rest)
        return self._replace(ring, head, tail, taken, used=True), self._slots(taken)

    def free(self, slots: Any) -> "SlotAllocator":
        """Gives slots back; their pages join the end of the queue in the order given.

        Args:
          slots: token indices that make up whole pages (a list, or an integer array of NumPy or JAX), in any order.
            None at all is allowed and changes nothing.

        Raises:
          ValueError: a slot that is no integer, unknown, given twice, not allocated, or without the rest of its page;
            the message names the first one. This allocator is unchanged.
        """
        slots = self._known(slots)
        if not slots.size:
            return self
        freed = self._whole_pages(slots)
        ring, head, tail = self._ring, self._head, self._tail
        if not ring.append(tail, freed):
            # Someone holding this same value freed first, or the log is full: the live part moves to a log of its own.
            # At least num_pages entries are freed between two moves of one line of values, so the cost averages out.
            ring = _Ring(np.concatenate([ring.read(head, tail), freed]), 2 * self.num_pages)
            head, tail = 0, tail - head
        return self._replace(ring, head, tail + len(freed), freed, used=False)

    def clear(self) -> "SlotAllocator":
        """An allocator of the same size with everything free; slots handed out before are no longer allocated."""
        return SlotAllocator.create(self.num_pages, self.page_size)

    def check(self) -> None:
        """Raises `ValueError` naming the page if one is not either free once or handed out. O(num_pages)."""
        free = np.bincount(self._ring.read(self._head, self._tail), minlength=self.num_pages)
        used = np.concatenate(self._used)
        wrong = (free + used) != 1
        if wrong.any():
            page = int(np.argmax(wrong))
            raise ValueError(f"Page {page} is free {free[page]} times and handed out {int(used[page])} times.")

    def __repr__(self) -> str:
        return f"SlotAllocator({self.available} of {self.num_slots} slots free, page_size={self.page_size})"

    def __reduce__(self):
        free = self._ring.read(self._head, self._tail).copy()
        return _restore, (self.num_pages, self.page_size, free)

    def _pages_in(self, n: int) -> int:
        size = self.page_size
        try:
            count = operator.index(n)
        except TypeError:
            count = 0
        if isinstance(n, bool) or count <= 0 or count % size:
            raise ValueError(f"Slots to allocate must be a positive multiple of the page size {size}; got {n!r}.")
        return count // size

    def _known(self, slots: Any) -> np.ndarray:
        array = np.asarray(slots)
        if array.ndim != 1:
            raise ValueError(f"Slots must be one list of token indices; got shape {array.shape}.")
        if array.size == 0:
            return np.zeros(0, np.int64)
        if array.dtype.kind not in "iu":
            raise ValueError(f"Slots must be integers; got {array.dtype}, first slot {array[0]}.")
        unknown = (array < 0) | (array >= self.num_slots)
        if unknown.any():
            raise ValueError(f"Unknown slot {array[np.argmax(unknown)]}; expected 0 <= slot < {self.num_slots}.")
        return array.astype(np.int64)

    def _whole_pages(self, slots: np.ndarray) -> np.ndarray:
        """The pages that the slots make up, in the order given; all refusals of `free`."""
        pages = slots // self.page_size
        if not len(slots) % self.page_size:  # the usual case, whole pages in order, without sorting anything
            whole = pages[:: self.page_size]
            distinct = len(np.unique(whole)) == len(whole)
            if distinct and np.array_equal(self._slots(whole), slots) and self._flags(whole).all():
                return whole
        unused = ~self._flags(pages)
        if unused.any():
            raise ValueError(f"Double free: slot {slots[np.argmax(unused)]} is not allocated.")
        by_value = np.argsort(slots, kind="stable")
        repeated = by_value[1:][slots[by_value][1:] == slots[by_value][:-1]]
        if repeated.size:
            raise ValueError(f"Double free: slot {slots[repeated.min()]} appears twice in one call.")
        whole, first, counts = np.unique(pages, return_index=True, return_counts=True)
        partial = counts != self.page_size
        if partial.any():
            slot = slots[first[partial].min()]
            page = np.arange(self.page_size) + slot // self.page_size * self.page_size
            missing = np.setdiff1d(page, slots)[0]
            raise ValueError(f"Part of a page: slot {slot} is freed without slot {missing} of the same page.")
        return whole[np.argsort(first)]

    def _slots(self, pages: np.ndarray) -> np.ndarray:
        return (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)

    def _flags(self, pages: np.ndarray) -> np.ndarray:
        blocks, inverse = np.unique(pages // _BLOCK, return_inverse=True)
        if not blocks.size:
            return np.zeros(0, bool)
        return np.concatenate([self._used[block] for block in blocks])[inverse * _BLOCK + pages % _BLOCK]

    def _run(self, pages: int) -> int | None:
        """The first page of the lowest run of `pages` neighbouring free pages."""
        free = np.sort(self._ring.read(self._head, self._tail))
        starts = np.flatnonzero(free[pages - 1 :] - free[: len(free) - pages + 1] == pages - 1)
        return int(free[starts[0]]) if starts.size else None

    def _replace(self, ring: _Ring, head: int, tail: int, pages: np.ndarray, *, used: bool) -> "SlotAllocator":
        flags = list(self._used)
        blocks, inverse = np.unique(pages // _BLOCK, return_inverse=True)
        # Only the buffer's last block may be short, and it sorts last: offsets in the joined copy are regular.
        changed = np.concatenate([flags[block] for block in blocks])
        changed[inverse * _BLOCK + pages % _BLOCK] = used
        for place, block in enumerate(blocks):
            flags[block] = _frozen(changed[place * _BLOCK : (place + 1) * _BLOCK].copy())
        return SlotAllocator(self.num_pages, self.page_size, ring, head, tail, tuple(flags))


def _restore(num_pages: int, page_size: int, free: np.ndarray) -> SlotAllocator:
    used = np.ones(num_pages, bool)
    used[free] = False
    blocks = tuple(_frozen(used[start : start + _BLOCK].copy()) for start in range(0, num_pages, _BLOCK))
    return SlotAllocator(num_pages, page_size, _Ring(free, 2 * num_pages), 0, len(free), blocks)


def _frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def _positive(name: str, value: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if isinstance(value, bool) or number <= 0:
        raise ValueError(f"{name} must be a positive integer; got {value!r}.")
    return number
