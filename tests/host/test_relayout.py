import jax.numpy as jnp
import numpy as np
import pytest
from hosts import T1, bits, canonical, filled, random_device, stacked

from dots_jax.host import KVSpec, allocate_host_kv, relayout

LAYERS = [jnp.arange(16 * 2 * 64, dtype=jnp.int32).reshape(16, 2, 64).astype(jnp.bfloat16) + i for i in range(2)]


def test_blocks_of_the_kernel_equal_those_of_xla():
    starts = np.array([12, 0, 8], np.int32)
    name = relayout.choose(LAYERS, starts, 4, "interpret")
    want = relayout.pages_to_block(LAYERS, starts, 4)
    got = relayout.pages_to_block(LAYERS, starts, 4, implementation=name)
    np.testing.assert_array_equal(bits(got), bits(want))
    zeros = [jnp.zeros_like(layer) for layer in LAYERS]
    outside = np.array([4, 16, 0], np.int32)
    for a, b in zip(
        relayout.block_to_pages(want, zeros, outside, implementation=name),
        relayout.block_to_pages(want, zeros, outside),
        strict=True,
    ):
        np.testing.assert_array_equal(bits(a), bits(b))


def test_staged_transfers_through_the_kernel(monkeypatch):
    choose = relayout.choose
    monkeypatch.setattr(
        "dots_jax.host.staged.choose", lambda layers, starts, run: choose(layers, starts, run, "interpret")
    )
    spec = KVSpec(2, 2, 64, 32, page_size=4)
    device = random_device(spec, 16)
    host = allocate_host_kv(spec, 4, layout="page_first_direct")
    host = host.backup(device, range(8, 16), [4, 5, 6, 7, 0, 1, 2, 3], chunk_pages=2)
    for got, source in zip(canonical(host), stacked(device), strict=True):
        np.testing.assert_array_equal(got[8:], source[[4, 5, 6, 7, 0, 1, 2, 3]])
    want = host.load(device, 1, range(8, 12), range(12, 16))
    monkeypatch.setattr("dots_jax.host.transfer.needs_staging", lambda *args: True)
    got = host.load(device, 1, range(8, 12), range(12, 16))
    assert all(np.array_equal(bits(a), bits(b)) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("starts", "run", "name", "words"),
    [
        ([0], 4, "mosaic_gpu", "'mosaic_gpu' cannot run: it needs a Hopper GPU, and the arrays are on"),
        ([0, 6], 4, "interpret", "'interpret' cannot run: device slot 6 does not start a page of 4"),
        ([0], 5, "interpret", "'interpret' cannot run: 16 slots are not whole pages of 5"),
        ([0], 4, "cuda", "expected one of xla, mosaic_gpu, interpret, got 'cuda'"),
    ],
)
def test_what_cannot_run_says_why(starts, run, name, words):
    with pytest.raises(ValueError, match=words):
        relayout.choose(LAYERS, np.array(starts), run, name)
    assert relayout.choose(LAYERS, np.array([0, 4]), 4) == "xla"


def test_leaves_are_exported_without_a_copy():
    host, _ = filled(T1, "page_first", 4)
    exporter = host.k
    view = np.from_dlpack(exporter)
    assert view.ctypes.data == exporter.unsafe_buffer_pointer()
    np.testing.assert_array_equal(view.view(np.uint16), canonical(host)[0])
