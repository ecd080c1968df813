"""A store that breaks: damage is a miss, never data; a failed put is an error and may be repeated."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hosts import T1
from store_cases import page_bytes, random_host

from dots_jax.host import PageStore, PageStoreError, page_keys
from dots_jax.host import store as store_module

KEYS = page_keys(range(8), 2)


@pytest.fixture
def world(tmp_path):
    """A store with four pages, the buffer they came from, and where each file is."""
    host = random_host(T1, "page_first", 4)
    with PageStore.open(f"file://{tmp_path}/store", T1) as store:
        store.put(KEYS, host, range(8))
        files = [tmp_path / "store" / store.namespace / "pages" / key for key in KEYS]
        yield store, host, files


def check(store, host, expected_hits):
    """Reads all pages into another buffer: hits are the stored bytes, the rest is untouched."""
    target = random_host(T1, "page_first_direct", 4, seed=2)
    before, stored = page_bytes(target), page_bytes(host)
    result, hits = store.get(KEYS, target, range(8))
    assert hits == expected_hits
    assert page_bytes(result) == [stored[i] if hit else before[i] for i, hit in enumerate(hits)]


def test_an_object_cut_short_is_a_miss(world):
    store, host, files = world
    size = files[1].stat().st_size
    whole = files[1].read_bytes()
    for length in (0, 1, 127, 128, T1.page_bytes - 1, T1.page_bytes, T1.page_bytes + 127, size - 1):
        files[1].write_bytes(whole[:length])
        assert store.longest_prefix(KEYS) == 1
        check(store, host, [True, False, True, True])
    files[1].write_bytes(whole)
    check(store, host, [True] * 4)


def test_an_object_that_grew_is_a_miss(world):
    store, host, files = world
    files[2].write_bytes(files[2].read_bytes() + b"\0")
    assert store.longest_prefix(KEYS) == 2
    check(store, host, [True, True, False, True])


@pytest.mark.parametrize("place", [0, 100, T1.page_bytes - 1, T1.page_bytes, T1.page_bytes + 30, -1])
def test_a_flipped_bit_is_a_miss(world, place):
    store, host, files = world
    damaged = bytearray(files[0].read_bytes())
    damaged[place] ^= 4
    files[0].write_bytes(damaged)
    check(store, host, [False, True, True, True])


def test_a_torn_object_is_a_miss(world):
    """The right length, but the second half never reached the disk, or is that of another page."""
    store, host, files = world
    one, two = files[0].read_bytes(), files[1].read_bytes()
    half = len(one) // 2
    for torn in (
        one[:half] + bytes(len(one) - half),
        one[:half] + two[half:],
        two[:half] + one[half:],
        bytes(len(one)),
    ):
        files[0].write_bytes(torn)
        check(store, host, [False, True, True, True])


def test_an_object_under_another_name_is_a_miss(world):
    store, host, files = world
    shutil.copy(files[0], files[3])
    assert store.longest_prefix(KEYS) == 3
    check(store, host, [True, True, True, False])


def test_an_object_of_another_geometry_moved_here_is_a_miss(world, tmp_path):
    store, host, files = world
    with PageStore.open(f"file://{tmp_path}/store", T1, model_name="other") as other:
        other.put(KEYS, random_host(T1, "page_first", 4, seed=9), range(8))
        shutil.copy(tmp_path / "store" / other.namespace / "pages" / KEYS[2], files[2])
    assert store.longest_prefix(KEYS) == 2
    check(store, host, [True, True, False, True])


def test_a_removed_object_is_a_miss(world):
    store, host, files = world
    files[2].unlink()
    assert store.longest_prefix(KEYS) == 2
    check(store, host, [True, True, False, True])


def test_an_unreadable_object_is_a_miss(world, caplog):
    store, host, files = world
    files[2].unlink()
    files[2].symlink_to(files[2])  # opening it is an error of the system, not a missing file
    assert store.longest_prefix(KEYS) == 2
    check(store, host, [True, True, False, True])
    assert any(KEYS[2] in record.getMessage() for record in caplog.records)


def test_a_half_written_file_of_a_dead_writer_is_not_read(world):
    store, host, files = world
    whole = files[0].read_bytes()
    files[0].unlink()
    (files[0].parent / f"{KEYS[0]}.__lock").write_bytes(whole[: len(whole) // 2])
    assert store.longest_prefix(KEYS) == 0
    check(store, host, [False, True, True, True])
    store.put(KEYS[:1], host, [0, 1])
    check(store, host, [True] * 4)


def test_a_put_repairs_damage(world):
    store, host, files = world
    for file in files[:3]:
        file.write_bytes(b"?" * file.stat().st_size)
    check(store, host, [False, False, False, True])
    store.put(KEYS, host, range(8))
    check(store, host, [True] * 4)


def test_a_store_removed_altogether_is_all_misses(world):
    store, host, files = world
    shutil.rmtree(files[0].parents[2])
    assert store.longest_prefix(KEYS) == 0
    check(store, host, [False] * 4)
    assert store.put(KEYS, host, range(8)) == 4
    check(store, host, [True] * 4)


def strike_at(store, monkeypatch, page, strike):
    """Lets `strike` happen when the given page is about to be written."""
    seal, done = store_module.seal, threading.Event()

    def striking(*args, key, **options):
        value = seal(*args, key=key, **options)
        if key == KEYS[page] and not done.is_set():
            done.set()
            strike()
        return value

    monkeypatch.setattr(store_module, "seal", striking)


def consistent(store, host):
    """Whatever a get finds now is what was stored."""
    target = random_host(T1, "page_first", 4, seed=3)
    before, stored = page_bytes(target), page_bytes(host)
    result, hits = store.get(KEYS, target, range(8))
    assert page_bytes(result) == [stored[i] if hit else before[i] for i, hit in enumerate(hits)]


@pytest.mark.parametrize("page", [0, 2, 3])
def test_a_store_that_is_removed_during_a_put_is_an_error_and_the_put_may_be_repeated(world, page, monkeypatch):
    store, host, files = world
    root = files[0].parents[2]
    strike_at(store, monkeypatch, page, lambda: shutil.rmtree(root, ignore_errors=True))
    with pytest.raises(PageStoreError, match=r"was removed or replaced during a put|failed"):
        store.put(KEYS, host, range(8))
    consistent(store, host)
    assert store.put(KEYS, host, range(8)) == 4
    check(store, host, [True] * 4)


@pytest.fixture
def one_by_one(world):
    """The same with one write at a time, for strikes that take several steps."""
    store, host, files = world
    with PageStore.open(store.url, T1, concurrency=1) as store:
        yield store, host, files


def test_a_store_replaced_by_another_during_a_put_is_an_error(one_by_one, monkeypatch):
    store, host, files = one_by_one

    def replace():
        shutil.rmtree(files[0].parents[2])
        PageStore.open(store.url, T1).close()

    strike_at(store, monkeypatch, 3, replace)
    with pytest.raises(PageStoreError, match=r"was removed or replaced during a put|failed"):
        store.put(KEYS, host, range(8))
    consistent(store, host)


def test_a_store_that_cannot_be_written_any_more_is_an_error_and_the_put_may_be_repeated(one_by_one, monkeypatch):
    store, host, files = one_by_one
    root = files[0].parents[2]

    def block():
        root.rename(root.with_name("moved"))
        root.write_text("in the way")

    strike_at(store, monkeypatch, 1, block)
    with pytest.raises(PageStoreError, match=f"Page store file://{root}: .* failed: "):
        store.put(KEYS, host, range(8))
    with pytest.raises(PageStoreError):
        store.put(KEYS, host, range(8))
    consistent(store, host)
    root.unlink()
    root.with_name("moved").rename(root)
    assert store.put(KEYS, host, range(8)) == 4
    check(store, host, [True] * 4)


def test_a_reader_beside_a_writer_sees_whole_pages_only(tmp_path):
    """Two contents of the same keys are written over and over while another store object reads."""
    hosts = [random_host(T1, "page_first", 4, seed=seed) for seed in (1, 2)]
    contents = [page_bytes(host) for host in hosts]
    stop = threading.Event()
    with PageStore.open(f"file://{tmp_path}", T1) as writer, PageStore.open(f"file://{tmp_path}", T1) as reader:

        def write():
            i = 0
            while not stop.is_set():
                writer.put(KEYS, hosts[i % 2], range(8))
                i += 1

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for _ in range(20):
                result, hits = reader.get(KEYS, random_host(T1, "page_first", 4, seed=3), range(8))
                got = page_bytes(result)
                for page in np.flatnonzero(hits):
                    assert got[page] in (contents[0][page], contents[1][page])
        finally:
            stop.set()
            thread.join()


def test_openers_at_the_same_time_do_not_meet_and_leave_nothing(world):
    store, host, files = world
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda _: PageStore.open(store.url, T1).close(), range(24)):
            pass
    assert {path.name for path in files[0].parents[1].iterdir()} == {"manifest.json", "pages"}
    check(store, host, [True] * 4)


@pytest.mark.parametrize("donate", [False, True])
def test_an_interrupted_get_loses_only_a_donated_buffer(one_by_one, donate):
    store, _, _ = one_by_one
    target = random_host(T1, "page_first", 4, seed=2)
    before = page_bytes(target) if not donate else None  # a view would keep the memory

    def progress(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.get(KEYS, target, range(8), donate=donate, progress=progress)
    assert all(leaf.is_deleted() == donate for leaf in target.leaves.values())
    if not donate:
        assert page_bytes(target) == before


def test_no_temporary_files_stay_behind(world):
    _, _, files = world
    names = {path.name for path in Path(files[0].parent).iterdir()}
    assert names == set(KEYS)
