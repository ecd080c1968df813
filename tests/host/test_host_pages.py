import jax.numpy as jnp
import numpy as np
import pytest
from hosts import F1_GLOBAL, LATENT, LEGAL, LEGAL_IDS, SYMMETRIC, T1, canonical, filled

from dots_jax.host import PageBuffer, allocate_host_kv


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_t1_page_buffers(layout):
    host = allocate_host_kv(T1, 4, layout=layout)
    assert host.page_buffers([4, 5, 0, 1]) == [
        PageBuffer("k", 192, 96),
        PageBuffer("v", 288, 144),
        PageBuffer("k", 0, 96),
        PageBuffer("v", 0, 144),
    ]
    assert host.page_buffers([]) == []
    with pytest.raises(ValueError, match=r"host_slots\[0\]: slot 5 does not start a page of 2"):
        host.page_buffers([5, 6])


@pytest.mark.parametrize("slots", [[0], [0, 1, 3], [0, 2], [1, 0], [0, 1, 0, 1], [8, 9], [-2, -1]])
def test_page_buffers_need_whole_pages(slots):
    host = allocate_host_kv(T1, 4, layout="page_first")
    with pytest.raises(ValueError, match="host_slots"):
        host.page_buffers(slots)


def test_global_pool_page_sizes():
    host = allocate_host_kv(F1_GLOBAL, 2, layout="page_first")
    assert host.page_buffers(range(64, 128)) == [PageBuffer("k", 884736, 884736), PageBuffer("v", 589824, 589824)]


@pytest.mark.parametrize(("spec", "layout"), LEGAL, ids=LEGAL_IDS)
def test_page_buffers_cover_every_byte_once(spec, layout):
    host, _ = filled(spec, layout, 4)
    covered = {name: np.zeros(leaf.nbytes, int) for name, leaf in host.leaves.items()}
    for buffer in host.page_buffers(np.arange(8)):
        covered[buffer.leaf][buffer.offset : buffer.offset + buffer.nbytes] += 1
    assert all((count == 1).all() for count in covered.values())
    assert len(host.page_buffers([2, 3])) == (3 if layout == "layer_first" else 1) * (1 if spec is LATENT else 2)


@pytest.mark.parametrize(("spec", "layout"), LEGAL, ids=LEGAL_IDS)
def test_page_buffers_name_the_bytes_of_the_page(spec, layout):
    host, _ = filled(spec, layout, 4)
    raw = {name: np.asarray(leaf).reshape(-1).view(np.uint8) for name, leaf in host.leaves.items()}
    got = np.concatenate([raw[b.leaf][b.offset : b.offset + b.nbytes] for b in host.page_buffers([4, 5])])
    assert sorted(got) == sorted(host.get_page(2))


@pytest.mark.parametrize(("spec", "layout"), LEGAL, ids=LEGAL_IDS)
def test_page_bytes_do_not_depend_on_the_layout(spec, layout):
    host, _ = filled(spec, layout, 4)
    for page in range(4):
        want = [side[2 * page : 2 * page + 2].swapaxes(0, 1).reshape(-1).view(np.uint8) for side in canonical(host)]
        got = host.get_page(page)
        assert got.dtype == np.uint8
        assert got.shape == (spec.page_bytes,)
        np.testing.assert_array_equal(got, np.concatenate(want))


@pytest.mark.parametrize(("spec", "layout"), LEGAL, ids=LEGAL_IDS)
@pytest.mark.parametrize("donate", [False, True])
def test_set_page_is_the_inverse_and_touches_nothing_else(spec, layout, donate):
    host, _ = filled(spec, layout, 4)
    before = [host.get_page(page).copy() for page in range(4)]
    data = np.random.default_rng(5).integers(0, 256, spec.page_bytes, np.uint8)
    new = host.set_page(2, data, donate=donate)
    for page in range(4):
        np.testing.assert_array_equal(new.get_page(page), data if page == 2 else before[page])
    if donate:
        assert all(leaf.is_deleted() for leaf in host.leaves.values())
    else:
        np.testing.assert_array_equal(host.get_page(2), before[2])


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, np.asarray])
def test_set_page_takes_any_bytes(wrap):
    host, _ = filled(T1, "page_first", 4)
    data = wrap(host.get_page(1))
    other = allocate_host_kv(T1, 4, layout="page_first_direct").set_page(3, data)
    np.testing.assert_array_equal(other.get_page(3), host.get_page(1))


def test_bad_pages_and_sizes_are_refused():
    host = allocate_host_kv(SYMMETRIC, 4, layout="page_head")
    for page in (-1, 4):
        with pytest.raises(ValueError, match=f"page: expected 0 to 3, got {page}"):
            host.get_page(page)
        with pytest.raises(ValueError, match=f"page: expected 0 to 3, got {page}"):
            host.set_page(page, bytes(SYMMETRIC.page_bytes))
    with pytest.raises(ValueError, match=f"expected {SYMMETRIC.page_bytes} bytes"):
        host.set_page(0, bytes(SYMMETRIC.page_bytes - 1))


@pytest.mark.parametrize("page", [1.0, 1.5, -0.5, True, np.True_, np.float32(1), "1", None, [1]])
def test_a_page_number_is_an_integer(page):
    host, _ = filled(T1, "page_first", 4)
    with pytest.raises(TypeError, match="page: expected an integer"):
        host.get_page(page)
    with pytest.raises(TypeError, match="page: expected an integer"):
        host.set_page(page, bytes(T1.page_bytes))
    for same in (np.int64(1), np.uint8(1), jnp.int32(1)):
        np.testing.assert_array_equal(host.get_page(same), host.get_page(1))
