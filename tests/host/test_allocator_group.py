"""Groups of pools: all of a request or none of it."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dots_jax.host.allocator import SlotAllocator
from dots_jax.host.allocator_group import AllocatorGroup


def take(group, counts, **options):
    group, slots = group.alloc(counts, **options)
    assert slots is not None
    return group, slots


def make(**pages):
    return AllocatorGroup({name: SlotAllocator.create(count, 2) for name, count in pages.items()})


def test_a_request_takes_from_every_pool():
    group, slots = take(make(full=4, swa=2), {"swa": 2, "full": 6})
    assert {name: taken.tolist() for name, taken in slots.items()} == {"full": [0, 1, 2, 3, 4, 5], "swa": [0, 1]}
    assert group.available == {"full": 2, "swa": 2}
    group = group.free({"full": [2, 3], "swa": [0, 1]})
    assert group.available == {"full": 4, "swa": 4}


def test_if_one_pool_is_short_no_pool_gives_anything():
    group = make(full=4, swa=2)
    after, slots = group.alloc({"full": 2, "swa": 6})
    assert slots is None
    assert after is group
    assert group.available == {"full": 8, "swa": 4}


def test_pools_left_out_are_not_touched():
    group, slots = take(make(full=4, swa=2), {"full": 2})
    assert list(slots) == ["full"]
    assert group.available == {"full": 6, "swa": 4}


def test_one_refused_free_frees_nothing():
    group, _ = make(full=4, swa=2).alloc({"full": 4, "swa": 2})
    with pytest.raises(ValueError, match=r"^Pool 'swa': Double free: slot 2 is not allocated\.$"):
        group.free({"full": [0, 1], "swa": [2, 3]})
    assert group.available == {"full": 4, "swa": 2}


@pytest.mark.parametrize("count", [3, 0, -2])
def test_a_bad_count_is_an_error_even_if_another_pool_is_short(count):
    with pytest.raises(ValueError, match=rf"^Pool 'swa': Slots to allocate .* got {count}\.$"):
        make(full=1, swa=2).alloc({"full": 100, "swa": count})


def test_reclaim_is_asked_once_with_the_whole_request():
    group, held = take(make(full=4, swa=2), {"full": 8, "swa": 2})
    asked = []

    def reclaim(group, counts):
        asked.append(dict(counts))
        return group.free({"full": held["full"][:4]})

    group, slots = take(group, {"full": 4, "swa": 2}, reclaim=reclaim)
    assert asked == [{"full": 4, "swa": 2}]
    assert slots["full"].tolist() == [0, 1, 2, 3]
    assert slots["swa"].tolist() == [2, 3]
    _, slots = group.alloc({"full": 8, "swa": 2}, reclaim=reclaim_nothing(asked))
    assert slots is None
    assert len(asked) == 2


def reclaim_nothing(asked):
    def reclaim(group, counts):
        asked.append(dict(counts))
        return group

    return reclaim


def test_what_reclaim_evicted_stays_evicted_when_it_was_not_enough():
    group, held = take(make(full=4), {"full": 8})
    after, slots = group.alloc({"full": 6}, reclaim=lambda g, _: g.free({"full": held["full"][:2]}))
    assert slots is None
    assert after.available == {"full": 2}


def test_reclaim_is_not_asked_when_there_is_room():
    def reclaim(group, counts):
        raise AssertionError("not needed")

    assert make(full=4).alloc({"full": 8}, reclaim=reclaim)[1] is not None


def test_malformed_groups_and_requests_are_refused():
    pool = SlotAllocator.create(1, 1)
    with pytest.raises(ValueError, match="at least one pool; got none"):
        AllocatorGroup({})
    with pytest.raises(ValueError, match="Pool 'a' is given twice"):
        AllocatorGroup([("a", pool), ("b", pool), ("a", pool)])
    with pytest.raises(TypeError, match="Pool 'a' must be a SlotAllocator; got int"):
        AllocatorGroup({"a": 3})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"Unknown pool 'draft'; this group has \['full', 'swa'\]"):
        make(full=1, swa=1).alloc({"draft": 2})
    with pytest.raises(ValueError, match="Unknown pool 'draft'"):
        make(full=1, swa=1).free({"draft": [0, 1]})
    with pytest.raises(ValueError, match="at least one pool; got none"):
        make(full=1).alloc({})
    with pytest.raises(TypeError, match="reclaim must return an AllocatorGroup; got NoneType"):
        make(full=1).alloc({"full": 4}, reclaim=lambda g, c: None)  # pyright: ignore[reportArgumentType]


def test_the_pools_cannot_be_replaced():
    group = make(full=1)
    with pytest.raises(TypeError):
        group.pools["full"] = SlotAllocator.create(2, 2)  # pyright: ignore[reportIndexIssue]
    assert pickle.loads(pickle.dumps(group)).available == {"full": 2}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.booleans()), max_size=12))
def test_the_pools_together_never_lose_a_page(requests):
    group, held = make(full=6, swa=5), []
    for full, swa, give_back in requests:
        fits = group.available["full"] >= 2 * full and group.available["swa"] >= 2 * swa
        group, slots = group.alloc({"full": 2 * full, "swa": 2 * swa})
        assert (slots is not None) == fits
        if slots is not None:
            held.append(slots)
        if give_back and held:
            group = group.free(held.pop(0))
        group.check()
        for name, pool in group.pools.items():
            out = sorted(slot for taken in held for slot in taken[name].tolist())
            assert sorted([*out, *pool.free_slots.tolist()]) == list(range(pool.num_slots))
