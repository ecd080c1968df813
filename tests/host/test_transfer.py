import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hosts import (
    LATENT,
    LEGAL,
    LEGAL_IDS,
    SYMMETRIC,
    T1,
    bits,
    canonical,
    filled,
    random_device,
    stacked,
    zeros_like,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from dots_jax.host import DeviceKV, KVSpec, LatentSpec, allocate_host_kv

NUM_PAGES, NUM_DEVICE = 4, 11
SETTINGS = settings(max_examples=8, deadline=None, derandomize=True, database=None)


def backup_oracle(host, device, host_slots, device_slots):
    sides = [side.copy() for side in canonical(host)]
    for side, source in zip(sides, stacked(device), strict=True):
        side[host_slots] = source[device_slots]
    return sides


def load_oracle(host, device, layer, host_slots, device_slots):
    arrays = [side[:, layer].copy() for side in stacked(device)]
    for array, side in zip(arrays, canonical(host), strict=True):
        array[device_slots] = side[host_slots, layer]
    return arrays


def assert_same(got, want):
    got = [array for array in got if array is not None]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(bits(a).reshape(b.shape), b)


def check_against_oracle(host, device, host_slots, device_slots, layer, donate):
    want_host = backup_oracle(host, device, host_slots, device_slots)
    want_layer = load_oracle(host, device, layer, host_slots, device_slots)
    copy = jax.tree.map(jnp.copy, device)
    assert_same(host.load(copy, layer, host_slots, device_slots, donate=donate), want_layer)
    assert_same(canonical(host.backup(device, host_slots, device_slots, donate=donate)), want_host)


@pytest.mark.parametrize("io_backend", [None, "fitting"])
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_t1_back_up_clobber_load(layout, io_backend):
    if io_backend:
        io_backend = "kernel" if layout == "page_first" else "direct"
    count = 10 * 2
    device = DeviceKV(
        tuple((jnp.arange(count * 4) + 100 * i).reshape(10, 2, 4).astype(jnp.float16) for i in range(3)),
        tuple((10000 + jnp.arange(count * 6) + 100 * i).reshape(10, 2, 6).astype(jnp.float16) for i in range(3)),
    )
    host = allocate_host_kv(T1, 4, layout=layout, io_backend=io_backend)
    host = host.backup(device, [0, 1, 2, 3], [4, 5, 6, 7])
    for side in canonical(host):
        assert side[:4].any()
        assert not side[4:].any()
    blank = zeros_like(device)
    for layer in range(3):
        k, v = host.load(blank, layer, [0, 1, 2, 3], [4, 5, 6, 7])
        for got, original in ((k, device.k[layer]), (v, device.v[layer])):
            np.testing.assert_array_equal(got[4:8], original[4:8])
            assert not got[:4].any()
            assert not got[8:].any()


@pytest.mark.parametrize(("spec", "layout"), LEGAL, ids=LEGAL_IDS)
def test_whole_pages_match_the_scatter_oracle(spec, layout):
    @given(st.permutations(range(NUM_PAGES)), st.integers(0, NUM_PAGES), st.permutations(range(5)), st.integers(0, 1))
    @SETTINGS
    def check(pages, count, device_pages, shift):
        host, _ = filled(spec, layout, NUM_PAGES)
        device = random_device(spec, NUM_DEVICE, seed=2)
        host_slots = [2 * page + i for page in pages[:count] for i in range(2)]
        device_slots = [2 * page + shift + i for page in device_pages[:count] for i in range(2)]
        check_against_oracle(host, device, host_slots, device_slots, count % 3, True)

    check()


@pytest.mark.parametrize(
    ("spec", "layout", "io_backend"),
    [(s, x, "kernel") for s, x in LEGAL if x != "page_first_direct"]
    + [(SYMMETRIC, "layer_first", "direct"), (LATENT, "layer_first", None)],
)
def test_single_tokens_match_the_scatter_oracle(spec, layout, io_backend):
    num_slots = 2 * NUM_PAGES

    @given(st.permutations(range(num_slots)), st.integers(0, num_slots), st.permutations(range(NUM_DEVICE)))
    @SETTINGS
    def check(host_slots, count, device_slots):
        host, _ = filled(spec, layout, NUM_PAGES, io_backend=io_backend)
        device = random_device(spec, NUM_DEVICE, seed=2)
        check_against_oracle(host, device, host_slots[:count], device_slots[:count], count % 3, True)

    check()


@pytest.mark.parametrize(("spec", "layout"), LEGAL, ids=LEGAL_IDS)
def test_everything_comes_back_from_any_layout(spec, layout):
    host, device = filled(spec, layout, NUM_PAGES)
    assert_same(canonical(host), stacked(device))
    slots = np.arange(2 * NUM_PAGES)
    blank = zeros_like(device)
    for layer in range(3):
        got = host.load(blank, layer, slots, slots)
        assert_same(got, [side[:, layer] for side in stacked(device)])


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "bfloat16", "float16", "float32", "uint8", "int16"]
)
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_bytes_survive_in_every_dtype(dtype, layout):
    # Every pattern of 8 and of 16 bits is there, all NaN payloads included.
    spec = KVSpec(2, 1, 512, 256, page_size=64, dtype=dtype)
    device = random_device(spec, 192, seed=6)
    patterns = np.resize(np.arange(65536, dtype=np.uint16).view(np.uint8), 192 * 512 * spec.itemsize)
    patterns = patterns.view(spec.dtype).reshape(192, 1, 512)
    device = wrong(device, k=jnp.asarray(patterns))
    assert np.array_equal(bits(device.k[1]), bits(patterns))
    host = allocate_host_kv(spec, 3, layout=layout).backup(device, np.arange(192), np.arange(192))
    assert_same(canonical(host), stacked(device))
    got = host.load(zeros_like(device), 1, np.arange(192), np.arange(192))
    assert_same(got, [bits(device.k[1]), bits(device.v[1])])


def test_latent_rows_come_with_or_without_their_one_head():
    flat = DeviceKV(tuple(array[:, 0] for array in random_device(LATENT, NUM_DEVICE).k))
    host = allocate_host_kv(LATENT, 4, layout="page_first")
    want = host.backup(random_device(LATENT, NUM_DEVICE), [2, 3], [4, 5])
    got = host.backup(flat, [2, 3], [4, 5])
    assert_same(canonical(got), canonical(want))
    k, v = got.load(DeviceKV(tuple(jnp.zeros_like(k) for k in flat.k)), 1, [2, 3], [4, 5])
    assert v is None
    assert k.shape == (NUM_DEVICE, 5)
    np.testing.assert_array_equal(bits(k[4:6]), bits(flat.k[1][4:6]))


def test_old_values_stay_or_are_given_up():
    host, device = filled(T1, "page_first", NUM_PAGES)
    before = [side.copy() for side in canonical(host)]
    zero = zeros_like(device)
    new = host.backup(zero, [0, 1], [0, 1])
    assert_same(canonical(host), before)
    host.load(device, 0, [0, 1], [2, 3])
    assert not any(array.is_deleted() for array in jax.tree.leaves(device))
    newer = new.backup(device, [0, 1], [0, 1], donate=True)
    assert all(leaf.is_deleted() for leaf in new.leaves.values())
    assert_same(canonical(newer), before)
    newer.load(device, 1, [0, 1], [2, 3], donate=True)
    assert [a.is_deleted() for a in device.k] == [a.is_deleted() for a in device.v] == [False, True, False]


@pytest.mark.parametrize("memory_kind", ["pinned_host", "unpinned_host", "cpu"])
def test_results_stay_where_the_buffer_was(memory_kind):
    kind = jax.devices("cpu")[0] if memory_kind == "cpu" else memory_kind
    host, device = filled(T1, "page_first", NUM_PAGES, memory_kind=kind)
    want = next(iter(host.leaves.values())).sharding
    for donate in (False, True):
        host = host.backup(device, [0, 1], [0, 1], donate=donate)
        assert all(leaf.sharding == want for leaf in host.leaves.values())
    k, v = host.load(device, 0, [0, 1], [0, 1])
    assert k.sharding.memory_kind == v.sharding.memory_kind == "device"


def wrong(device, **changes):
    """Device arrays with one side's layer 1 replaced."""
    k, v = list(device.k), list(device.v)
    for side, array in changes.items():
        (k if side == "k" else v)[1] = array
    return DeviceKV(tuple(k), tuple(v))


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_device_arrays_that_do_not_fit_are_refused(layout):
    host, device = filled(T1, layout, NUM_PAGES)
    before = [side.copy() for side in canonical(host)]
    cases = {
        r"device\.v\[1\]: expected rows 6 wide .* got 4": wrong(device, v=jnp.zeros((8, 2, 4), jnp.float16)),
        r"device\.k\[1\]: expected rows 4 wide .* got 6": wrong(device, k=jnp.zeros((8, 2, 6), jnp.float16)),
        r"device\.k\[1\]: expected shape \[slots, 2, 4\], got \(8, 3, 4\)": wrong(
            device, k=jnp.zeros((8, 3, 4), jnp.float16)
        ),
        r"device\.k\[1\]: expected float16, got bfloat16": wrong(device, k=jnp.zeros((8, 2, 4), jnp.bfloat16)),
        r"device\.k\[1\]: expected 8 slots, got 6": wrong(device, k=jnp.zeros((6, 2, 4), jnp.float16)),
        r"device\.k: expected 3 layers, got 2": DeviceKV(device.k[:2], device.v[:2]),
        r"device\.v: expected 3 layers, got 0": DeviceKV(device.k),
    }
    for words, bad in cases.items():
        with pytest.raises(ValueError, match=words):
            host.backup(bad, [0, 1], [0, 1], donate=True)
        with pytest.raises(ValueError, match=words):
            host.load(bad, 0, [0, 1], [0, 1], donate=True)
    assert_same(canonical(host), before)
    with pytest.raises(TypeError, match="expected a DeviceKV"):
        host.backup((device.k, device.v), [0, 1], [0, 1])


def test_model_with_v_as_wide_as_k_is_named_with_both_widths():
    host = allocate_host_kv(KVSpec(1, 1, 192, 128, page_size=2), 2, layout="page_first")
    bad = DeviceKV((jnp.zeros((4, 1, 192), jnp.bfloat16),), (jnp.zeros((4, 1, 192), jnp.bfloat16),))
    with pytest.raises(ValueError, match=r"expected rows 128 wide.*got 192"):
        host.backup(bad, [0, 1], [0, 1])


@pytest.mark.parametrize("layer", [-1, 3, 1.0])
def test_layers_are_checked(layer):
    host, device = filled(T1, "page_first", NUM_PAGES)
    with pytest.raises((ValueError, TypeError), match="layer: expected"):
        host.load(device, layer, [0, 1], [0, 1])


def test_latent_buffers_take_no_v():
    host = allocate_host_kv(LatentSpec(3, 4, 2, jnp.float16), 4, layout="page_first")
    with pytest.raises(ValueError, match="expected no V for a latent buffer"):
        host.backup(random_device(SYMMETRIC, 8), [0, 1], [0, 1])


def test_device_kv():
    device = random_device(T1, 4)
    with pytest.raises(ValueError, match="as many V as K layers, got 3 K and 2 V"):
        DeviceKV(device.k, device.v[:2])
    k, v = device.layer(1)
    assert device.with_layer(0, (k, v)).k[0] is k
    assert device.append(device).num_layers == 6
    jax.tree.map(lambda _: None, device)


@pytest.mark.parametrize("value", [None, 1.0, [0.0]], ids=["None", "float", "list"])
@pytest.mark.parametrize("side", ["k", "v"])
def test_device_layers_that_are_no_arrays_are_refused_by_name(side, value):
    host, device = filled(T1, "page_first", 4)
    layers = {"k": device.k, "v": device.v}
    layers[side] = (layers[side][0], value, layers[side][2])
    text = rf"device\.{side}\[1\]: expected an array of float16, got {type(value).__name__}"
    with pytest.raises(ValueError, match=text):
        host.backup(DeviceKV(**layers), [0, 1], [0, 1])
    with pytest.raises(ValueError, match=text):
        host.load(DeviceKV(**layers), 0, [0, 1], [0, 1])
