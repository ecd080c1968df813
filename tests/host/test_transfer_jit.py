"""Transfers inside a caller's own `jit`: unknown slots, donation, memory and compilation counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hosts import LATENT, LEGAL, LEGAL_IDS, SYMMETRIC, T1, bits, canonical, filled, random_device, stacked

from dots_jax.host import KVSpec, SlotTypeError, allocate_host_kv

BACKUP = jax.jit(lambda host, device, a, b: host.backup(device, a, b))
LOAD = jax.jit(lambda host, device, a, b: host.load(device, 1, a, b))


@pytest.mark.parametrize(("spec", "layout"), LEGAL, ids=LEGAL_IDS)
def test_traced_slots_give_the_same_result(spec, layout):
    host, _ = filled(spec, layout, 4)
    device = random_device(spec, 11, seed=4)
    slots = jnp.array([6, 7, 0, 1]), jnp.array([3, 4, 9, 10])
    for got, want in zip(canonical(BACKUP(host, device, *slots)), canonical(host.backup(device, *slots)), strict=True):
        np.testing.assert_array_equal(got, want)
    got, want = LOAD(host, device, *slots), host.load(device, 1, *slots)
    assert all(np.array_equal(bits(a), bits(b)) for a, b in zip(got, want, strict=True) if a is not None)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8])
@pytest.mark.parametrize(
    ("host_slots", "device_slots"),
    [
        ([-2, -1], [0, 1]),
        ([8, 9], [0, 1]),
        ([7, 8], [0, 1]),
        ([127, 126], [0, 1]),
        ([0, 1], [-1, 0]),
        ([0, 1], [10, 11]),
        ([1, 2], [0, 1]),
        ([0, 3], [0, 1]),
        ([1, 0], [0, 1]),
        ([0, 1], [4, 6]),
    ],
)
def test_traced_pages_that_may_not_move_do_not(host_slots, device_slots, dtype):
    host, _ = filled(T1, "page_first_direct", 4)
    device = random_device(T1, 11, seed=4)
    # A good page on either side of the bad one still moves.
    a = jnp.array([4, 5, *host_slots, 6, 7], dtype)
    b = jnp.array([2, 3, *device_slots, 7, 8], dtype)
    want = [side.copy() for side in canonical(host)]
    for side, source in zip(want, stacked(device), strict=True):
        side[[4, 5, 6, 7]] = source[[2, 3, 7, 8]]
    for got, side in zip(canonical(BACKUP(host, device, a, b)), want, strict=True):
        np.testing.assert_array_equal(got, side)
    k, v = LOAD(host, device, a, b)
    for got, array, side in ((k, device.k[1], canonical(host)[0]), (v, device.v[1], canonical(host)[1])):
        rows = bits(array).copy()
        rows[[2, 3, 7, 8]] = side[[4, 5, 6, 7], 1]
        np.testing.assert_array_equal(bits(got), rows)


def test_traced_tokens_out_of_range_move_nothing():
    host, _ = filled(SYMMETRIC, "page_head", 4, io_backend="kernel")
    device = random_device(SYMMETRIC, 11, seed=4)
    a, b = jnp.array([3, -1, 8, 0, 1]), jnp.array([5, 1, 2, -1, 11])
    for got, was, source in zip(canonical(BACKUP(host, device, a, b)), canonical(host), stacked(device), strict=True):
        want = was.copy()
        want[3] = source[5]
        np.testing.assert_array_equal(got, want)


def test_a_traced_layer_that_does_not_exist_moves_nothing():
    host, _ = filled(T1, "page_first", 4)
    device = random_device(T1, 11)
    load = jax.jit(lambda layer: host.load(device, layer, [0, 1], [2, 3], device_layer=1))
    for layer in (-1, 3):
        k, v = load(layer)
        np.testing.assert_array_equal(bits(k), bits(device.k[1]))
        np.testing.assert_array_equal(bits(v), bits(device.v[1]))
    k, _ = load(2)
    np.testing.assert_array_equal(bits(k)[2:4], canonical(host)[0][:2, 2])


def test_one_known_vector_is_still_checked():
    host, _ = filled(T1, "page_first", 4)
    device = random_device(T1, 11)
    with pytest.raises(ValueError, match=r"host_slots\[0\]: slot 1 does not start"):
        jax.jit(lambda h, d, b: h.backup(d, [1, 2], b))(host, device, jnp.array([0, 1]))
    with pytest.raises(ValueError, match="multiple of the page size 2"):
        BACKUP(host, device, jnp.array([0]), jnp.array([0]))
    with pytest.raises(ValueError, match="expected equal lengths"):
        BACKUP(host, device, jnp.array([0, 1]), jnp.array([0]))
    with pytest.raises(TypeError, match="integer slots"):
        BACKUP(host, device, jnp.array([0.0, 1.0]), jnp.array([0, 1]))


@pytest.mark.parametrize(
    ("spec", "layout"),
    [(T1, "page_first"), (T1, "page_first_direct"), (SYMMETRIC, "page_head"), (LATENT, "layer_first")],
)
def test_donated_backup_and_load_happen_in_place(spec, layout):
    big = type(spec)(**{name: getattr(spec, name) for name in spec.__dataclass_fields__} | {"num_layers": 2})
    host = allocate_host_kv(big, 512, layout=layout)
    device = random_device(big, 2048)
    slots = jnp.arange(8, dtype=jnp.int32)
    moved = 8 * big.bytes_per_token

    stats = jax.jit(lambda h, d, a, b: h.backup(d, a, b), donate_argnums=0).lower(host, device, slots, slots)
    stats = stats.compile().memory_analysis()
    assert stats is not None
    assert stats.alias_size_in_bytes >= host.nbytes
    assert stats.temp_size_in_bytes <= 2 * moved + 1024

    load = jax.jit(lambda k, v, h, a, b: h.load(type(device)(k, v), 1, a, b), donate_argnums=(0, 1))
    stats = load.lower(device.k, device.v, host, slots, slots).compile().memory_analysis()
    assert stats is not None
    assert stats.alias_size_in_bytes >= (len(device.k) and 2048 * big.bytes_per_token // 2)
    assert stats.temp_size_in_bytes <= 2 * moved + 1024


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_donated_memory_is_really_reused(layout):
    host = allocate_host_kv(T1, 64, layout=layout)
    device = random_device(T1, 32)
    for _ in range(2):
        before = {name: leaf.unsafe_buffer_pointer() for name, leaf in host.leaves.items()}
        host = host.backup(device, [6, 7], [2, 3], donate=True)
        assert before == {name: leaf.unsafe_buffer_pointer() for name, leaf in host.leaves.items()}
    before = device.k[1].unsafe_buffer_pointer(), device.v[1].unsafe_buffer_pointer()
    k, v = host.load(device, 1, [6, 7], [2, 3], donate=True)
    assert before == (k.unsafe_buffer_pointer(), v.unsafe_buffer_pointer())


def test_new_slots_do_not_compile_again(caplog):
    spec = KVSpec(2, 1, 3, 5, page_size=2)
    host = allocate_host_kv(spec, 16, layout="page_first")
    device = random_device(spec, 32)

    def run(pages):
        nonlocal host
        slots = (np.asarray(pages)[:, None] * 2 + np.arange(2)).reshape(-1)
        host = host.backup(device, slots, slots[::-1].reshape(-1, 2)[:, ::-1].reshape(-1), donate=True)
        for layer in range(2):
            host.load(device, layer, slots, slots)

    run([0, 1, 2])
    with jax.log_compiles(), caplog.at_level("WARNING", "jax"):
        run([9, 5, 7])
        run([15, 0, 8, 3, 1])
        assert not [record.getMessage() for record in caplog.records if "Compiling" in record.getMessage()]
        jax.jit(lambda x: x + 1)(jnp.float32(1))
        assert [record.getMessage() for record in caplog.records if "Compiling" in record.getMessage()]


@pytest.mark.parametrize(("spec", "layout"), LEGAL, ids=LEGAL_IDS)
@pytest.mark.parametrize("known", [(), (0,), (1,)], ids=["both traced", "host known", "device known"])
def test_no_traced_slots_at_all_move_nothing(spec, layout, known):
    host, device = filled(spec, layout, 4)[0], random_device(spec, 8, seed=4)
    empty = [[] if side in known else jnp.zeros(0, jnp.int32) for side in (0, 1)]
    traced = [vector for vector in empty if not isinstance(vector, list)]

    def both(host, device, *traced):
        vectors = iter(traced)
        slots = [[] if side in known else next(vectors) for side in (0, 1)]
        return host.backup(device, *slots), host.load(device, 1, *slots)

    kept, loaded = jax.jit(both)(host, device, *traced)
    assert all(np.array_equal(a, b) for a, b in zip(canonical(kept), canonical(host), strict=True))
    sources = [side[1] for side in (device.k, device.v) if side]
    assert all(np.array_equal(bits(a), bits(b)) for a, b in zip(jax.tree.leaves(loaded), sources, strict=True))


def test_a_list_of_traced_scalars_is_refused_by_name():
    host, device = filled(T1, "page_first", 4)[0], random_device(T1, 8)
    with pytest.raises(SlotTypeError, match=r"host_slots: expected a vector .* got a list of traced scalars"):
        jax.jit(lambda host, a: host.backup(device, [a, a + 1], [0, 1]))(host, 2)
