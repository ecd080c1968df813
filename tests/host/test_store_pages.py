"""Many pages at once: the same bytes as `get_page`, and no value that anyone has seen ever changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hosts import LEGAL, LEGAL_IDS, T1, canonical, filled
from store_cases import random_host

from dots_jax.host import KVSpec, store_pages
from dots_jax.host.store_pages import PageReader, PageWriter


@pytest.fixture(params=["plain memory", "through get_page"])
def path(request, monkeypatch):
    """Both ways to a page: the second is the one for memory that NumPy cannot look at."""
    if request.param == "through get_page":
        monkeypatch.setattr(store_pages, "_is_plain_memory", lambda leaf: False)
    return request.param


def read(host, page):
    out = np.empty(host.spec.page_bytes, np.uint8)
    PageReader(host).read(page, out)
    return out


def pointers(host):
    return [leaf.unsafe_buffer_pointer() for leaf in host.leaves.values()]


@pytest.mark.parametrize(("spec", "layout"), LEGAL, ids=LEGAL_IDS)
def test_pages_are_read_and_written_as_single_ones_are(spec, layout, path):
    host = random_host(spec, layout, 4)
    for page in range(4):
        assert np.array_equal(read(host, page), host.get_page(page))
    empty = random_host(spec, layout, 4, seed=2)
    writer = PageWriter(empty, donate=False)
    for page in (3, 1):
        writer.write(page, host.get_page(page))
    result = writer.finish()
    for page in range(4):
        expected = host if page in (3, 1) else empty
        assert np.array_equal(result.get_page(page), expected.get_page(page))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32, jnp.uint8])
def test_bytes_of_every_dtype_survive(dtype, path):
    host = random_host(KVSpec(2, 1, 3, 5, page_size=2, dtype=dtype), "page_first", 3)
    writer = PageWriter(host, donate=False)
    writer.write(0, read(host, 2))
    assert np.array_equal(writer.finish().get_page(0), host.get_page(2))


@pytest.mark.parametrize("memory_kind", ["pinned_host", "unpinned_host"])
def test_a_donated_buffer_keeps_its_memory_and_its_place(memory_kind):
    host, _ = filled(T1, "page_first", 4, memory_kind=memory_kind)
    page = host.get_page(1)
    before, shardings = pointers(host), [leaf.sharding for leaf in host.leaves.values()]
    read(host, 0)  # reading leaves nothing behind that would force a copy
    writer = PageWriter(host, donate=True)
    writer.write(2, page)
    result = writer.finish()
    assert pointers(result) == before
    assert [leaf.sharding for leaf in result.leaves.values()] == shardings
    assert host.k.is_deleted()
    assert np.array_equal(result.get_page(2), page)


def test_without_donation_the_old_buffer_stays():
    host, _ = filled(T1, "page_first_direct", 4)
    old = [side.copy() for side in canonical(host)]
    writer = PageWriter(host, donate=False)
    writer.write(0, np.zeros(T1.page_bytes, np.uint8))
    result = writer.finish()
    assert not set(pointers(result)) & set(pointers(host))
    for a, b in zip(canonical(host), old, strict=True):
        assert np.array_equal(a, b)


def test_a_batch_copies_the_buffer_once(monkeypatch):
    copies, copy = [], store_pages._copy
    monkeypatch.setattr(store_pages, "_copy", lambda leaf: copies.append(leaf.nbytes) or copy(leaf))
    host = random_host(T1, "page_first", 4)
    writer = PageWriter(host, donate=False)
    for page in range(4):
        writer.write(page, np.zeros(T1.page_bytes, np.uint8))
    assert not writer.finish().get_page(3).any()
    assert sum(copies) == host.nbytes


def test_a_view_that_someone_holds_never_changes():
    host, _ = filled(T1, "page_first", 4)
    view = np.asarray(host.k)
    old = view.copy()
    writer = PageWriter(host, donate=True)
    writer.write(0, np.full(T1.page_bytes, 255, np.uint8))
    result = writer.finish()
    assert np.array_equal(view.view(np.uint8), old.view(np.uint8))
    assert result.get_page(0).all()


def test_memory_that_belongs_to_numpy_never_changes():
    array = np.zeros((8, 3, 2, 4), np.float16)
    host, _ = filled(T1, "page_first", 4)
    borrowed = type(host)(jax.device_put(array, may_alias=True), jnp.zeros((8, 3, 2, 6), jnp.float16), T1)
    writer = PageWriter(borrowed, donate=True)
    writer.write(0, np.full(T1.page_bytes, 255, np.uint8))
    assert writer.finish().get_page(0).all()
    assert not array.any()


def test_nothing_written_gives_the_same_buffer():
    host, _ = filled(T1, "page_first", 4)
    assert PageWriter(host, donate=True).finish() is host
    assert not host.k.is_deleted()


def test_later_operations_see_the_written_pages():
    """A buffer written behind XLA's back must read the same inside a compiled function."""
    host, _ = filled(T1, "page_first", 4)
    page = host.get_page(3)
    writer = PageWriter(host, donate=True)
    writer.write(1, page)
    result = writer.finish()
    rows = jax.jit(lambda h: jax.lax.bitcast_convert_type(h.k, jnp.uint16)[2:4])(result)
    assert np.array_equal(np.asarray(rows), canonical(result)[0][2:4])
    assert np.array_equal(np.asarray(rows), canonical(result)[0][6:8])
