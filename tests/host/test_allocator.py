"""The host allocator: order, refusals, and that no operation disturbs another value."""

import copy
import dataclasses
import pickle
import re
import threading
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, multiple, rule

import dots_jax.host.allocator as allocator_module
from dots_jax.host.allocator import SlotAllocator


def take(allocator, n, **options):
    allocator, slots = allocator.alloc(n, **options)
    assert slots is not None
    return allocator, slots


def test_slots_leave_in_the_order_in_which_they_came_free():
    a = SlotAllocator.create(4, 2)
    a, slots = take(a, 6)
    assert slots.tolist() == [0, 1, 2, 3, 4, 5]
    assert slots.dtype == np.int64
    a = a.free([0, 1])
    assert a.available == 4
    a, slots = take(a, 2)
    assert slots.tolist() == [6, 7]
    a, slots = take(a, 2)
    assert slots.tolist() == [0, 1]
    assert a.available == 0


def test_a_contiguous_run_is_preferred_when_asked_for():
    a, _ = take(SlotAllocator.create(5, 2), 10)
    a = a.free([0, 1]).free([6, 7, 8, 9])
    assert take(a, 4)[1].tolist() == [0, 1, 6, 7]
    a, slots = take(a, 4, contiguous=True)
    assert slots.tolist() == [6, 7, 8, 9]
    assert a.free_slots.tolist() == [0, 1]
    a.check()


def test_without_a_run_the_usual_order_is_used():
    a, _ = take(SlotAllocator.create(5, 2), 10)
    a = a.free([8, 9]).free([0, 1]).free([4, 5])
    a, slots = take(a, 4, contiguous=True)
    assert slots.tolist() == [8, 9, 0, 1]


def test_too_many_slots_give_none_and_the_same_value():
    a, _ = take(SlotAllocator.create(4, 2), 2)
    after, slots = a.alloc(8)
    assert slots is None
    assert after is a
    assert take(a, 6)[1].tolist() == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("n", [0, -2, -4, 1, 3, 2.5, 2.0, True, None, "2"])
def test_counts_that_are_no_pages_are_refused(n):
    a = SlotAllocator.create(4, 2)
    with pytest.raises(ValueError, match=f"positive multiple of the page size 2; got {re.escape(repr(n))}"):
        a.alloc(n)
    assert a.available == 8


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([4, 5], "Double free: slot 4 is not allocated."),
        ([0, 1, 6, 7], "Double free: slot 6 is not allocated."),
        ([3, 3], "Double free: slot 3 appears twice in one call."),
        ([0, 1, 2, 3, 0, 1], "Double free: slot 0 appears twice in one call."),
        ([2, 3, 0, 1, 3, 2], "Double free: slot 3 appears twice in one call."),
        ([2], "Part of a page: slot 2 is freed without slot 3 of the same page."),
        ([0, 1, 3], "Part of a page: slot 3 is freed without slot 2 of the same page."),
        ([1, 2], "Part of a page: slot 1 is freed without slot 0 of the same page."),
        ([0, 1, 8], "Unknown slot 8; expected 0 <= slot < 8."),
        ([-1], "Unknown slot -1; expected 0 <= slot < 8."),
        ([0, 1, -2, -1], "Unknown slot -2; expected 0 <= slot < 8."),
        ([2**40], f"Unknown slot {2**40}; expected 0 <= slot < 8."),
        ([0.0, 1.0], "Slots must be integers; got float64, first slot 0.0."),
        ([True, False], "Slots must be integers; got bool, first slot True."),
        ([[0, 1]], "Slots must be one list of token indices; got shape (1, 2)."),
    ],
)
def test_refused_frees_name_the_slot_and_change_nothing(slots, message):
    a, _ = take(SlotAllocator.create(4, 2), 4)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        a.free(slots)
    assert a.free_slots.tolist() == [4, 5, 6, 7]
    a.check()


def test_freeing_an_overlap_names_exactly_the_slot_freed_before():
    a, slots = take(SlotAllocator.create(8, 1), 4)
    a = a.free(slots[:2])
    with pytest.raises(ValueError, match=r"^Double free: slot 1 is not allocated\.$"):
        a.free(slots[-3:])
    assert a.free_slots.tolist() == [4, 5, 6, 7, 0, 1]
    assert a.free(slots[-2:]).available == 8


def test_freeing_nothing_changes_nothing():
    a, _ = take(SlotAllocator.create(4, 2), 4)
    assert a.free([]) is a
    assert a.free(np.zeros(0, np.int32)) is a


@pytest.mark.parametrize("make", [list, lambda s: np.array(s, np.int32), lambda s: np.array(s, np.uint64), jnp.asarray])
def test_slots_of_any_integer_kind_mean_the_same(make):
    a, _ = take(SlotAllocator.create(4, 2), 8)
    assert a.free(make([4, 5, 0, 1])).free_slots.tolist() == [4, 5, 0, 1]
    assert a.free(make([5, 4, 1, 0])).free_slots.tolist() == [4, 5, 0, 1]


@pytest.mark.parametrize(("pages", "size"), [(0, 2), (4, 0), (-1, 2), (2.0, 2), (4, True), ("4", 2)])
def test_sizes_must_be_positive_integers(pages, size):
    with pytest.raises(ValueError, match="must be a positive integer; got"):
        SlotAllocator.create(pages, size)


def test_after_clear_slots_handed_out_before_are_not_allocated():
    a, slots = take(SlotAllocator.create(4, 2), 4)
    cleared = a.clear()
    assert cleared.available == 8
    with pytest.raises(ValueError, match="slot 0 is not allocated"):
        cleared.free(slots)
    assert a.available == 4


def test_old_values_stay_what_they_were():
    start = SlotAllocator.create(4, 2)
    full, slots = take(start, 8)
    left, right = full.free(slots[:2]), full.free(slots[4:])  # two futures of one value
    left_more, right_more = left.free(slots[6:]), right.free(slots[:2])
    assert start.free_slots.tolist() == list(range(8))
    assert full.available == 0
    assert left.free_slots.tolist() == [0, 1]
    assert right.free_slots.tolist() == [4, 5, 6, 7]
    assert left_more.free_slots.tolist() == [0, 1, 6, 7]
    assert right_more.free_slots.tolist() == [4, 5, 6, 7, 0, 1]
    for value in (start, full, left, right, left_more, right_more):
        value.check()


def test_it_cannot_be_written_to():
    a, slots = take(SlotAllocator.create(4, 2), 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.page_size = 4  # pyright: ignore[reportAttributeAccessIssue]
    slots[:] = 6  # the caller's own copy
    a.free_slots[:] = 0
    assert a.free_slots.tolist() == [4, 5, 6, 7]
    assert a.is_allocated(range(8)).tolist() == [True] * 4 + [False] * 4


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))])
def test_copies_go_on_alone(duplicate):
    a, slots = take(SlotAllocator.create(600, 2), 1100)
    a = a.free(slots[6:10])
    b = duplicate(a)
    assert repr(b) == repr(a) == "SlotAllocator(104 of 1200 slots free, page_size=2)"
    assert b.free_slots.tolist() == a.free_slots.tolist()
    b.free(slots[:2]).check()
    assert a.available == 104


def test_two_threads_freeing_from_one_value_do_not_meet():
    full, slots = take(SlotAllocator.create(4096, 1), 4096)
    results = {}

    def give_back(name, mine):
        value = full
        for slot in mine:
            value = value.free([slot])
        results[name] = value

    parts = {"even": slots[::2][:600], "odd": slots[1::2][:600]}
    threads = [threading.Thread(target=give_back, args=part) for part in parts.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, part in parts.items():
        assert results[name].free_slots.tolist() == part.tolist()


def test_an_operation_costs_memory_by_its_slots_not_by_the_buffer():
    def peak(num_pages):
        a, slots = take(SlotAllocator.create(num_pages, 64), 64 * 8)
        a = a.free(slots)
        tracemalloc.start()
        for _ in range(5):
            a, slots = take(a, 64 * 8)
            a = a.free(slots)
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    small, large = peak(1_000), peak(512_000)
    assert large < small + 64_000  # flags alone would be 512,000 bytes, the free list 4 MB


class Allocations(RuleBasedStateMachine):
    """Runs the allocator beside a queue of pages, keeping every value ever made to see that none of them moves."""

    values = Bundle("values")

    def __init__(self):
        super().__init__()
        self.kept = []
        self.block, allocator_module._BLOCK = allocator_module._BLOCK, 4  # so that nine pages span three blocks

    def keep(self, *value):
        self.kept.append(value)
        return value

    def teardown(self):
        for allocator, free in self.kept:
            assert tuple(allocator.free_slots[:: allocator.page_size] // allocator.page_size) == free
            allocator.check()
        allocator_module._BLOCK = self.block

    @rule(target=values, pages=st.integers(1, 9), size=st.sampled_from([1, 2, 4]))
    def create(self, pages, size):
        return self.keep(SlotAllocator.create(pages, size), tuple(range(pages)))

    @rule(target=values, value=values, pages=st.integers(1, 9))
    def alloc(self, value, pages):
        allocator, free = value
        after, slots = allocator.alloc(pages * allocator.page_size)
        if pages > len(free):
            assert slots is None
            assert after is allocator
            return multiple()
        size = allocator.page_size
        assert slots.tolist() == [page * size + i for page in free[:pages] for i in range(size)]
        return self.keep(after, free[pages:])

    @rule(target=values, value=values, data=st.data())
    def free(self, value, data):
        allocator, free = value
        size = allocator.page_size
        chosen = data.draw(st.lists(st.integers(0, allocator.num_pages - 1), max_size=4))
        slots = [page * size + i for page in chosen for i in range(size)]
        if len(set(chosen)) < len(chosen) or set(chosen) & set(free):
            with pytest.raises(ValueError, match="Double free: slot"):
                allocator.free(slots)
            return multiple()
        return self.keep(allocator.free(slots), (*free, *chosen))

    @rule(value=values, slots=st.lists(st.integers(-2, 40), min_size=1, max_size=6))
    def free_anything(self, value, slots):
        allocator, free = value
        size = allocator.page_size
        used = set(range(allocator.num_pages)) - set(free)
        pages = {slot // size for slot in slots}
        whole = sorted(slots) == sorted(page * size + i for page in pages for i in range(size))
        if whole and pages <= used:
            assert allocator.free(slots).available == allocator.available + len(slots)
        else:
            with pytest.raises(ValueError, match="slot"):
                allocator.free(slots)


Allocations.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestAllocations = Allocations.TestCase
