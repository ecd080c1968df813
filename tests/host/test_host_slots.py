import jax.numpy as jnp
import numpy as np
import pytest
from hosts import T1, bits, filled, random_device

from dots_jax.host import SlotTypeError, allocate_host_kv
from dots_jax.host.slots import check_pair, find_broken_page

# What is wrong with a vector of host slots of a buffer of 4 pages of 2, and the words that name the first offender.
BAD = {
    "misaligned": ([1, 2], r"host_slots\[0\]: slot 1 does not start a page of 2"),
    "fragmented": ([0, 3], r"host_slots\[1\]: slot 3 breaks the page that starts with slot 0; expected slot 1"),
    "reordered": ([1, 0], r"host_slots\[0\]: slot 1 does not start a page"),
    "second page broken": ([4, 5, 2, 0], r"host_slots\[3\]: slot 0 breaks the page that starts with slot 2"),
    "duplicate": ([0, 1, 4, 1], r"host_slots\[3\]: slot 1 is a duplicate of host_slots\[1\]"),
    "duplicate page": ([6, 7, 6, 7], r"host_slots\[2\]: slot 6 is a duplicate of host_slots\[0\]"),
    "negative": ([0, 1, -2, -1], r"host_slots\[2\]: slot -2 is negative"),
    "out of range": ([6, 7, 8, 9], r"host_slots\[2\]: slot 8 is out of range; there are 8 slots"),
    "far out of range": ([0, 2**40], r"host_slots\[1\]: slot 1099511627776 is out of range"),
    "float": ([0.0, 1.0], "host_slots: expected integer slots, got float64"),
    "bool": ([False, True], "host_slots: expected integer slots, got bool"),
    "part of a page": ([0, 1, 2], "host_slots: expected a multiple of the page size 2, got 3 slots"),
    "matrix": ([[0, 1]], r"host_slots: expected a vector of slots, got shape \(1, 2\)"),
}


@pytest.mark.parametrize("io_backend", [None, "direct"])
@pytest.mark.parametrize("name", BAD)
def test_page_path_refuses_and_moves_nothing(name, io_backend):
    slots, words = BAD[name]
    host, _ = filled(T1, "page_first_direct", 4, io_backend=io_backend)
    device = random_device(T1, 12, seed=3)
    before = [bits(leaf).copy() for leaf in (*host.leaves.values(), *device.k, *device.v)]
    other = np.arange(np.size(slots))
    for donate in (False, True):
        with pytest.raises(ValueError, match=words):
            host.backup(device, slots, other, donate=donate)
        with pytest.raises(ValueError, match=words):
            host.load(device, 1, slots, other, donate=donate)
    after = [bits(leaf) for leaf in (*host.leaves.values(), *device.k, *device.v)]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_single_tokens_on_the_page_path_point_to_the_other():
    host, _ = filled(T1, "page_first", 4)
    with pytest.raises(ValueError, match=r"This buffer moves whole pages; .* with io_backend='kernel'"):
        host.backup(random_device(T1, 12), [3], [5])


@pytest.mark.parametrize("name", ["duplicate", "negative", "out of range", "float", "bool", "matrix"])
def test_token_path_refuses_what_no_path_can_move(name):
    slots, words = BAD[name]
    host, _ = filled(T1, "page_first", 4, io_backend="kernel")
    with pytest.raises(ValueError, match=words):
        host.backup(random_device(T1, 12), slots, np.arange(np.size(slots)))


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        ([3, 3], r"device_slots\[1\]: slot 3 is a duplicate of device_slots\[0\]"),
        ([-1, 0], r"device_slots\[0\]: slot -1 is negative"),
        ([11, 12], r"device_slots\[1\]: slot 12 is out of range; there are 12 slots"),
        ([0, 2], r"device_slots\[1\]: slot 2 breaks the page that starts with slot 0"),
        ([1, 0], r"device_slots\[1\]: slot 0 breaks the page that starts with slot 1"),
        ([0.5, 1], "device_slots: expected integer slots"),
        ([0], "expected equal lengths, got 2 and 1"),
        ([0, 1, 2, 3], "expected equal lengths, got 2 and 4"),
    ],
)
def test_device_slots_are_checked_too(slots, words):
    host = allocate_host_kv(T1, 4, layout="page_first")
    with pytest.raises(ValueError, match=words):
        host.backup(random_device(T1, 12), [0, 1], slots)


def test_float_slots_are_also_a_type_error():
    host = allocate_host_kv(T1, 4, layout="page_first")
    with pytest.raises(TypeError, match="integer slots"):
        host.page_buffers(np.array([0.0, 1.0]))
    assert issubclass(SlotTypeError, ValueError)


def test_device_runs_may_start_anywhere():
    pair = check_pair([2, 3, 0, 1], [5, 6, 8, 9], num_host=8, num_device=12, page_size=2, need_pages=True)
    assert pair.by_page
    assert find_broken_page("x", np.array([5, 6]), 2, aligned=True) is not None


@pytest.mark.parametrize(
    "kind",
    [list, tuple, np.array, lambda s: np.array(s, np.int32), lambda s: np.array(s, np.uint8), jnp.array, iter],
    ids=["list", "tuple", "int64", "int32", "uint8", "device array", "iterator"],
)
def test_slots_of_every_kind_mean_the_same(kind):
    host = allocate_host_kv(T1, 4, layout="page_first")
    device = random_device(T1, 12)
    want = host.backup(device, [4, 5, 0, 1], [6, 7, 2, 3])
    if kind is iter:
        with pytest.raises(SlotTypeError):
            host.backup(device, iter([4, 5, 0, 1]), [6, 7, 2, 3])
        return
    got = host.backup(device, kind([4, 5, 0, 1]), kind([6, 7, 2, 3]))
    for a, b in zip(want.leaves.values(), got.leaves.values(), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))
