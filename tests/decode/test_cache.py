"""Writing and reading the cache by position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dots_jax.decode import gather_latent, write_latent
from dots_jax.decode.positions import locate
from dots_jax.pages import PageTable

jitted_write = jax.jit(write_latent)
jitted_gather = jax.jit(gather_latent, static_argnums=3)


def table_of(pages, lengths, page_size=64):
    return PageTable(jnp.asarray(pages, jnp.int32), jnp.asarray(lengths, jnp.int32), page_size=page_size)


def write_by_hand(kv_pages, pages, lengths, latent, counts):
    expected = np.array(kv_pages)
    page_size = expected.shape[1]
    for b, row in enumerate(latent):
        for j in range(counts[b]):
            position = lengths[b] - counts[b] + j
            if 0 <= position < pages.shape[1] * page_size and 0 <= pages[b, position // page_size] < len(expected):
                expected[pages[b, position // page_size], position % page_size] = row[j]
    return expected


@settings(max_examples=60, deadline=None)
@given(data=st.data(), steps=st.sampled_from([1, 3]), dtype=st.sampled_from([jnp.float32, jnp.bfloat16]))
def test_write_and_gather_agree_with_loops(data, steps, dtype):
    pages = np.array([[4, -1, 2], [0, 7, 1]], np.int32) if data.draw(st.booleans()) else np.full((2, 3), -9, np.int32)
    lengths = np.array(data.draw(st.tuples(st.integers(-1, 14), st.integers(-1, 14))), np.int32)
    counts = np.array(data.draw(st.tuples(st.integers(0, steps), st.integers(0, steps))), np.int32)
    rng = np.random.default_rng(0)
    kv_pages = rng.standard_normal((5, 4, 3)).astype(dtype)
    kv_pages[3] = np.nan
    latent = rng.standard_normal((2, steps, 3)).astype(dtype)
    table = table_of(pages, lengths, page_size=4)
    got = jitted_write(jnp.asarray(kv_pages), table, jnp.asarray(latent), counts=jnp.asarray(counts))
    expected = write_by_hand(kv_pages, pages, lengths, latent, counts)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), expected.view(np.uint8))

    starts = np.array(data.draw(st.tuples(st.integers(-5, 14), st.integers(-5, 14))), np.int32)
    rows, valid = jitted_gather(got, table, jnp.asarray(starts), 6)
    rows = np.asarray(rows)
    for b in range(2):
        for i in range(6):
            position = starts[b] + i
            present = 0 <= position < min(lengths[b], 12) and 0 <= pages[b, position // 4] < 5
            assert valid[b, i] == present
            want = expected[pages[b, position // 4], position % 4] if present else np.zeros(3, dtype)
            np.testing.assert_array_equal(rows[b, i], want)


def test_the_old_cache_stays_readable_and_a_donated_one_is_deleted():
    kv_pages, table, latent = jnp.zeros((3, 64, 8)), table_of([[1]], [5]), jnp.ones((1, 2, 8))
    written = jax.jit(write_latent)(kv_pages, table, latent)
    assert not kv_pages.any()
    assert written.sum() == 16
    jax.jit(write_latent, donate_argnums=0)(kv_pages, table, latent)
    assert kv_pages.is_deleted()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_a_donated_write_needs_no_memory_that_grows_with_the_pool(dtype):
    def extra_bytes(num_pages):
        kv_pages = jax.ShapeDtypeStruct((num_pages, 64, 128), dtype)
        table = jax.eval_shape(lambda: table_of([[1]] * 8, [5] * 8))
        latent = jax.ShapeDtypeStruct((8, 4, 128), dtype)
        memory = jax.jit(write_latent, donate_argnums=0).lower(kv_pages, table, latent).compile().memory_analysis()
        assert memory.alias_size_in_bytes == kv_pages.size * kv_pages.dtype.itemsize
        return memory.temp_size_in_bytes

    assert extra_bytes(4096) == extra_bytes(64) < 64 * 1024


def test_latents_are_converted_to_the_dtype_of_the_cache():
    written = write_latent(jnp.zeros((1, 64, 2), jnp.bfloat16), table_of([[0]], [1]), jnp.full((1, 1, 2), 1 / 3))
    assert written.dtype == jnp.bfloat16
    assert written[0, 0, 0] == jnp.bfloat16(1 / 3)


REFUSED = {
    "rows": (lambda kv, t: write_latent(kv, t, jnp.zeros((2, 1, 8))), ValueError, r"B=1.*\(2, 1, 8\)"),
    "width": (lambda kv, t: write_latent(kv, t, jnp.zeros((1, 1, 9))), ValueError, r"D=8.*\(1, 1, 9\)"),
    "counts": (lambda kv, t: write_latent(kv, t, jnp.zeros((1, 1, 8)), counts=np.array([2])), ValueError, r"0\.\.S=1"),
    "page axis": (lambda kv, t: write_latent(kv[:, :32], t, jnp.zeros((1, 1, 8))), ValueError, "32 tokens"),
    "no table": (lambda kv, t: write_latent(kv, None, jnp.zeros((1, 1, 8))), TypeError, "PageTable, got NoneType"),
    "starts": (lambda kv, t: gather_latent(kv, t, jnp.zeros(2, jnp.int32), 3), ValueError, r"B=1.*\(2,\)"),
    "float starts": (lambda kv, t: gather_latent(kv, t, jnp.zeros(1), 3), TypeError, "starts.*float32"),
    "negative size": (lambda kv, t: gather_latent(kv, t, jnp.zeros(1, jnp.int32), -1), ValueError, "got -1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    call, kind, pattern = REFUSED[name]
    with pytest.raises(kind, match=pattern):
        call(jnp.zeros((2, 64, 8)), table_of([[0]], [1]))


def test_empty_pool():
    rows, valid = gather_latent(jnp.zeros((0, 64, 8)), table_of([[0]], [1]), np.array([0]), 2)
    assert rows.shape == (1, 2, 8)
    assert not valid.any()
    assert write_latent(jnp.zeros((0, 64, 8)), table_of([[0]], [1]), jnp.ones((1, 1, 8))).shape == (0, 64, 8)


def test_offsets_past_two_to_the_31():
    """Page 30,841 of a 1088-wide cache starts past element 2^31: no index may be a flat offset."""
    page, offset, present = locate(jnp.array([[30_841]]), jnp.array([[63]]), 64, 30_842)
    assert 30_841 * 64 * 1088 > 2**31
    assert (int(page[0, 0]), int(offset[0, 0]), bool(present[0, 0])) == (30_841, 63, True)
    # The lowered write and read index the cache in its three dimensions; nothing reshapes it.
    kv_pages, table = jax.ShapeDtypeStruct((30_842, 64, 1088), jnp.bfloat16), table_of([[30_841]], [64])
    for lowered in (
        jax.jit(write_latent).lower(kv_pages, table, jax.ShapeDtypeStruct((1, 1, 1088), jnp.bfloat16)),
        jax.jit(gather_latent, static_argnums=3).lower(kv_pages, table, jnp.array([63]), 1),
    ):
        assert f"{30_842 * 64}x" not in lowered.as_text()
        assert f"{30_842 * 64 * 1088}x" not in lowered.as_text()
