import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hosts import LATENT, SYMMETRIC, T1, bits, canonical, filled, random_device, stacked

from dots_jax.host import KVSpec, allocate_host_kv, staged
from dots_jax.host.moves import Moves, chunks
from dots_jax.host.relayout import block_to_pages, pages_to_block
from dots_jax.host.transfer import prepare_loads


@pytest.mark.parametrize(
    ("spec", "layout", "io_backend"),
    [
        (T1, "page_first", None),
        (T1, "page_first_direct", "direct"),
        (T1, "page_first", "kernel"),
        (SYMMETRIC, "page_head", None),
        (LATENT, "layer_first", None),
    ],
)
def test_the_chunk_size_does_not_matter(spec, layout, io_backend):
    host, _ = filled(spec, layout, 8, io_backend=io_backend)
    device = random_device(spec, 21, seed=2)
    pages = np.array([6, 1, 7, 0, 3])
    host_slots = (2 * pages[:, None] + np.arange(2)).reshape(-1)
    device_slots = (2 * np.array([9, 2, 5, 0, 7])[:, None] + 1 + np.arange(2)).reshape(-1)
    if io_backend == "kernel":
        host_slots, device_slots = np.roll(host_slots, 3)[::-1], device_slots[::-1]
    want = [side.copy() for side in canonical(host)]
    for side, source in zip(want, stacked(device), strict=True):
        side[host_slots] = source[device_slots]
    before = [side.copy() for side in canonical(host)]
    for chunk_pages in (1, 2, 3, 5, 64):
        got = host.backup(device, host_slots, device_slots, chunk_pages=chunk_pages)
        for a, b in zip(canonical(got), want, strict=True):
            np.testing.assert_array_equal(a, b)
    for a, b in zip(canonical(host), before, strict=True):
        np.testing.assert_array_equal(a, b)
    # A NumPy view of a leaf, as taken above, would keep its memory alive.
    host, _ = filled(spec, layout, 8, io_backend=io_backend)
    host.backup(device, host_slots, device_slots, chunk_pages=2, donate=True)
    assert all(leaf.is_deleted() for leaf in host.leaves.values())


@pytest.mark.parametrize("chunk_pages", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("io_backend", [None, "kernel"])
def test_no_block_is_larger_than_a_chunk(monkeypatch, chunk_pages, io_backend):
    sizes, call = [], staged.call

    def measured(*args, **kwargs):
        result = call(*args, **kwargs)
        sizes.extend(block.shape[0] * block.shape[1] for block in jax.tree.leaves(result))
        return result

    monkeypatch.setattr(staged, "call", measured)
    monkeypatch.setattr(staged, "CHUNK_PAGES", chunk_pages)
    monkeypatch.setattr("dots_jax.host.transfer.needs_staging", lambda *args: True)
    host, device = allocate_host_kv(T1, 8, layout="page_first", io_backend=io_backend), random_device(T1, 14)
    slots = np.arange(14)[:: -1 if io_backend else 1]  # backwards, they move one by one
    host = host.backup(device, slots, slots, chunk_pages=chunk_pages)
    host.load(device, 1, slots, slots)
    assert sizes
    assert max(sizes) <= chunk_pages * T1.page_size
    assert max(sizes) <= 16


def test_chunks_have_few_lengths():
    for size in (1, 5, 6, 64):
        lengths = set()
        for total in range(4 * size):
            slots = np.arange(total, dtype=np.int32)
            parts = list(chunks(Moves(slots, slots, np.int32(total)), size))
            assert [s for part in parts for s in part.host[: part.total]] == list(range(total))
            lengths |= {len(part.host) for part in parts}
        assert lengths == {1 << i for i in range(size.bit_length()) if 1 << i < size} | {size}


def test_chunks_are_checked_like_the_rest():
    host, device = filled(T1, "page_first", 4)
    with pytest.raises(ValueError, match="chunk_pages: expected at least 1, got 0"):
        host.backup(device, [0, 1], [0, 1], chunk_pages=0)
    with pytest.raises(ValueError, match=r"host_slots\[1\]: slot 3 breaks"):
        host.backup(device, [0, 3], [0, 1], chunk_pages=1)
    same = host.backup(device, [], [], chunk_pages=1)
    assert np.array_equal(canonical(same)[0], canonical(host)[0])


def test_staged_loads_equal_direct_ones(monkeypatch):
    host, _ = filled(T1, "page_first_direct", 4)
    device = random_device(T1, 11, seed=2)
    slots = [6, 7, 0, 1, 2, 3], [3, 4, 9, 10, 0, 1]
    want = host.load(device, 1, *slots)
    monkeypatch.setattr("dots_jax.host.transfer.needs_staging", lambda *args: True)
    for chunk_pages in (1, 2, 64):
        monkeypatch.setattr("dots_jax.host.staged.CHUNK_PAGES", chunk_pages)
        got = prepare_loads(host, device, *slots, donate=False)(1)
        assert all(np.array_equal(bits(a), bits(b)) for a, b in zip(got, want, strict=True))
    assert not any(array.is_deleted() for array in jax.tree.leaves(device))


def test_blocks():
    layers = [jnp.arange(30).reshape(10, 1, 3) + 100 * i for i in range(2)]
    block = pages_to_block(layers, jnp.array([4, 1]), 2)
    assert block.shape == (2, 2, 2, 1, 3)
    np.testing.assert_array_equal(block[0, :, 1], layers[1][4:6])
    np.testing.assert_array_equal(block[1, :, 0], layers[0][1:3])
    back = block_to_pages(block, [jnp.zeros_like(layer) for layer in layers], jnp.array([0, 10]))
    for i in range(2):
        np.testing.assert_array_equal(back[i][:2], layers[i][4:6])
        assert not back[i][2:].any()


def test_fp8_blocks_are_exact():
    spec = KVSpec(2, 1, 64, 32, page_size=4, dtype="float8_e5m2")
    device = random_device(spec, 12)
    host = allocate_host_kv(spec, 3, layout="page_first").backup(device, np.arange(12), np.arange(12), chunk_pages=2)
    for got, want in zip(canonical(host), stacked(device), strict=True):
        np.testing.assert_array_equal(got, want)


SCRIPT = """
import sys
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
sys.path.insert(0, "tests/host")
from hosts import T1, bits, canonical, random_device, stacked
from dots_jax.host import allocate_host_kv
accelerator, cpu = jax.devices()
host = allocate_host_kv(T1, 4, layout="page_first", memory_kind=cpu)
assert all(leaf.devices() == {cpu} for leaf in host.leaves.values())
device = jax.device_put(random_device(T1, 11), accelerator)
host = host.backup(device, [4, 5, 0, 1], [6, 7, 2, 3], donate=True)
assert all(leaf.devices() == {cpu} for leaf in host.leaves.values())
for side, source in zip(canonical(host), stacked(device), strict=True):
    assert np.array_equal(side[[4, 5, 0, 1]], source[[6, 7, 2, 3]])
    assert not side[[2, 3, 6, 7]].any()
k, v = host.load(device, 2, [0, 1], [9, 10])
for got, was, side in ((k, device.k[2], canonical(host)[0]), (v, device.v[2], canonical(host)[1])):
    assert got.devices() == {accelerator}
    want = bits(was).copy()
    want[[9, 10]] = side[[0, 1], 2]
    assert np.array_equal(bits(got), want)
print("moved")
"""


def test_buffer_on_another_device():
    """A second CPU device stands for the CPU beside an accelerator: no one function may see both."""
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "moved\n"


@pytest.mark.parametrize("numpy_side", ["host", "device", "both"])
def test_chunks_of_numpy_arrays_give_the_same_result(numpy_side):
    host, device = filled(T1, "page_first", 4)[0], random_device(T1, 8, seed=2)
    want = canonical(host.backup(device, [0, 1, 6, 7], [2, 3, 4, 5]))
    if numpy_side != "device":
        host = jax.tree.map(np.asarray, host)
    if numpy_side != "host":
        device = jax.tree.map(np.asarray, device)
    got = canonical(host.backup(device, [0, 1, 6, 7], [2, 3, 4, 5], chunk_pages=1))
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
