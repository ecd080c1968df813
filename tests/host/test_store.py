"""The page store from the outside: round trips, namespaces, misuse."""

import dataclasses
import json
import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from hosts import LEGAL, LEGAL_IDS, T1
from store_cases import page_bytes, random_host
from test_store_namespace import CHANGES

from dots_jax.host import KVSpec, PageStore, PageStoreError, page_keys

KEYS = page_keys(range(8), 2)


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    return "memory://" if request.param == "memory" else f"file://{tmp_path}/a store"


@pytest.fixture
def files(tmp_path):
    return f"file://{tmp_path}/store"


@pytest.mark.parametrize(("spec", "layout"), LEGAL, ids=LEGAL_IDS)
def test_pages_come_back_whatever_the_layout(spec, layout, url):
    host = random_host(spec, layout, 4)
    expected = page_bytes(host)
    with PageStore.open(url, spec) as store:
        assert store.longest_prefix(KEYS) == 0
        assert store.put(KEYS[:3], host, [4, 5, 0, 1, 2, 3]) == 3
        assert store.longest_prefix(KEYS) == 3
        other = random_host(spec, "page_first", 4, seed=2)
        before = page_bytes(other)
        result, hits = store.get(KEYS, other, np.array([6, 7, 2, 3, 4, 5, 0, 1], np.int32))
    assert hits == [True, True, True, False]
    assert page_bytes(result) == [before[0], expected[0], expected[1], expected[2]]
    assert page_bytes(other) == before


def test_reads_go_into_a_donated_buffer(files):
    host = random_host(T1, "page_first", 4)
    with PageStore.open(files, T1) as store:
        store.put(KEYS[:2], host, range(4))
        target = random_host(T1, "page_first_direct", 4, seed=2)
        before = page_bytes(target)
        result, hits = store.get(["missing", "gone"], target, range(4), donate=True)
        assert hits == [False, False]
        assert result is target
        result, hits = store.get(KEYS[:2], target, range(4, 8), donate=True)
        assert hits == [True, True]
        assert target.k.is_deleted()
        assert page_bytes(result) == before[:2] + page_bytes(host)[:2]


def test_a_store_is_found_again(files):
    host = random_host(T1, "page_first", 4)
    with PageStore.open(files, T1, model_name="m") as store:
        store.put(KEYS, host, range(8))
        namespace = store.namespace
    with PageStore.open(files, T1, model_name="m", checksum="sha256", durable=True) as store:
        assert store.namespace == namespace
        assert store.longest_prefix(KEYS) == 4
        result, hits = store.get(KEYS, random_host(T1, "page_first", 4, seed=2), range(8))
        assert all(hits)
        assert page_bytes(result) == page_bytes(host)
        store.put(KEYS, host, range(8))
    with PageStore.open(files, T1, model_name="m") as store:
        assert store.get(KEYS, host, range(8))[1] == [True] * 4


@pytest.mark.parametrize("change", CHANGES)
def test_another_geometry_never_hits(change, files):
    host = random_host(T1, "page_first", 4)
    with PageStore.open(files, T1) as store:
        store.put(KEYS, host, range(8))
    other = CHANGES[change]
    with PageStore.open(files, other) as store:
        assert store.longest_prefix(KEYS) == 0
        target = random_host(other, "page_first", 4)
        _, hits = store.get(KEYS, target, range(4 * other.page_size))
        assert hits == [False] * 4
    with PageStore.open(files, T1, model_name="other") as store:
        assert store.longest_prefix(KEYS) == 0


def test_memory_stores_are_apart_unless_they_share_a_context():
    host = random_host(T1, "page_first", 4)
    context = ts.Context()
    with PageStore.open("memory://", T1, context=context) as store:
        store.put(KEYS, host, range(8))
        with PageStore.open("memory://", T1, context=context) as same:
            assert same.longest_prefix(KEYS) == 4
        with PageStore.open("memory://", T1) as other:
            assert other.longest_prefix(KEYS) == 0


def test_a_key_may_be_read_into_two_pages(url):
    host = random_host(T1, "page_first", 4)
    with PageStore.open(url, T1) as store:
        store.put(KEYS[:1], host, [2, 3])
        result, hits = store.get([KEYS[0], KEYS[0]], host, [4, 5, 6, 7])
    pages = page_bytes(host)
    assert hits == [True, True]
    assert page_bytes(result) == [pages[0], pages[1], pages[1], pages[1]]


def test_the_last_put_of_a_key_counts(url):
    host = random_host(T1, "page_first", 4)
    with PageStore.open(url, T1) as store:
        store.put([KEYS[0]], host, [0, 1])
        store.put([KEYS[0]], host, [2, 3])
        result, _ = store.get([KEYS[0]], host, [4, 5])
    assert page_bytes(result)[2] == page_bytes(host)[1]


def test_progress_is_reported_page_by_page_in_the_calling_thread(url):
    host = random_host(T1, "page_first", 4)
    steps, threads = [], set()

    def progress(done, total):
        steps.append((done, total))
        threads.add(threading.current_thread())

    with PageStore.open(url, T1) as store:
        store.put(KEYS, host, range(8), progress=progress)
        store.get([*KEYS[:3], "missing"], host, range(8), progress=progress)
    assert steps == 2 * [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert threads == {threading.current_thread()}


def test_batches_in_the_background_run_in_order(url):
    host = random_host(T1, "page_first", 4)
    with PageStore.open(url, T1) as store:
        written = store.put_async(KEYS, host, range(8))
        read = store.get_async(KEYS, random_host(T1, "page_first", 4, seed=2), range(8))
        result, hits = read.result(timeout=60)
        assert written.done()
        assert written.result() == 4
    assert hits == [True] * 4
    assert page_bytes(result) == page_bytes(host)


def test_nothing_to_do(url):
    host = random_host(T1, "page_first", 4)
    with PageStore.open(url, T1) as store:
        assert store.put([], host, []) == 0
        result, hits = store.get([], host, [])
        assert result is host
        assert hits == []
        assert store.longest_prefix([]) == 0


def test_the_longest_prefix_stops_at_the_first_gap(url):
    host = random_host(T1, "page_first", 4)
    keys = page_keys(range(100), 2)
    with PageStore.open(url, T1, concurrency=2) as store:
        for start in range(0, 48, 4):
            store.put(keys[start : start + 4], host, range(8))
        assert store.longest_prefix(keys) == 48
        assert store.longest_prefix(keys[47:]) == 1
        assert store.longest_prefix(keys[48:]) == 0
        assert store.longest_prefix([*keys[:3], *keys[48:], *keys[3:6]]) == 3


@pytest.mark.parametrize(
    ("keys", "slots", "message"),
    [
        (KEYS[:2], [0, 1], "slots: expected one page for each of 2 keys, got 1 pages"),
        (KEYS[:1], [0, 1, 2, 3], "slots: expected one page for each of 1 keys, got 2 pages"),
        (KEYS[:1], [1, 2], r"slots\[0\]: slot 1 does not start a page"),
        (KEYS[:1], [0, 3], r"slots\[1\]: slot 3 breaks the page"),
        (KEYS[:1], [8, 9], r"slots\[0\]: slot 8 is out of range"),
        (KEYS[:1], [-2, -1], r"slots\[0\]: slot -2 is negative"),
        (KEYS[:2], [0, 1, 0, 1], r"slots\[2\]: slot 0 is a duplicate"),
        (KEYS[:1], [0.0, 1.0], "slots: expected integer slots, got float64"),
        ("ab", [0, 1, 2, 3], "keys: expected a list of keys, got the one string 'ab'"),
        (["a/b"], [0, 1], "keys: expected letters, digits.*got 'a/b'"),
        (["../x"], [0, 1], "keys: expected letters"),
        ([""], [0, 1], "keys: expected letters"),
        ([3], [0, 1], "keys: expected letters.*got 3"),
    ],
)
def test_keys_and_slots_that_do_not_fit_are_refused(keys, slots, message):
    host = random_host(T1, "page_first", 4)
    with PageStore.open("memory://", T1) as store:
        for call in (store.put, store.get):
            with pytest.raises(ValueError, match=message):
                call(keys, host, slots)
        assert store.longest_prefix(KEYS) == 0


def test_the_same_key_twice_is_refused_by_put():
    host = random_host(T1, "page_first", 4)
    with PageStore.open("memory://", T1) as store, pytest.raises(ValueError, match="keys: 'b' is there twice"):
        store.put(["a", "b", "b"], host, range(6))


def test_a_buffer_of_another_geometry_is_refused():
    host = random_host(KVSpec(3, 2, 4, 4, page_size=2, dtype=jnp.float16), "page_first", 4)
    with PageStore.open("memory://", T1) as store:
        for call in (store.put, store.get):
            with pytest.raises(ValueError, match=r"host_kv: expected a buffer of KVSpec\(.*v_head_dim=6.*v_head_dim=4"):
                call(KEYS[:1], host, [0, 1])


def test_anything_but_a_buffer_is_refused():
    with PageStore.open("memory://", T1) as store:
        for call in (store.put, store.get):
            with pytest.raises(TypeError, match="host_kv: expected a host buffer, got int"):
                call(KEYS[:1], 3, [0, 1])


def test_a_store_that_cannot_serve_is_refused_when_opened(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(PageStoreError, match=f"Page store file://{tmp_path}/file/x: .* the manifest failed"):
        PageStore.open(f"file://{tmp_path}/file/x", T1)
    with pytest.raises(PageStoreError, match=r"Page store http://127.0.0.1:9/x: .* the manifest failed"):
        PageStore.open("http://127.0.0.1:9/x", T1, timeout=1)
    with pytest.raises(ValueError, match="expected a URL"):
        PageStore.open(str(tmp_path), T1)
    with pytest.raises(ValueError, match="unsupported URL scheme"):
        PageStore.open("nowhere://x", T1)
    with pytest.raises(TypeError, match="spec: expected a KVSpec or a LatentSpec, got tuple"):
        PageStore.open("memory://", (3, 2))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="checksum: expected one of"):
        PageStore.open("memory://", T1, checksum="md5")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="concurrency: expected a positive integer, got 0"):
        PageStore.open("memory://", T1, concurrency=0)
    with pytest.raises(ValueError, match="timeout: expected a positive number of seconds, got 0"):
        PageStore.open("memory://", T1, timeout=0)


def test_the_manifest_says_what_the_namespace_is_for(tmp_path):
    with PageStore.open(f"file://{tmp_path}/s", T1, model_name="m") as store:
        manifest = json.loads((tmp_path / "s" / store.namespace / "manifest.json").read_text())
    assert {name: manifest[name] for name in ("model_name", "head_dim", "v_head_dim", "dtype", "page_size")} == {
        "model_name": "m",
        "head_dim": 4,
        "v_head_dim": 6,
        "dtype": "float16",
        "page_size": 2,
    }


def test_storages_given_as_json_work_too(tmp_path):
    spec = dataclasses.replace(T1)
    with PageStore.open({"driver": "file", "path": f"{tmp_path}/s"}, spec) as store:
        store.put(KEYS[:1], random_host(T1, "page_first", 4), [0, 1])
    with PageStore.open(f"file://{tmp_path}/s", spec) as store:
        assert store.longest_prefix(KEYS) == 1


def test_page_keys_are_at_hand(caplog):
    with caplog.at_level(logging.WARNING):
        assert PageStore.page_keys(range(8), 2) == KEYS
    assert not caplog.records


@pytest.mark.parametrize(("spec", "layout"), LEGAL, ids=LEGAL_IDS)
@pytest.mark.parametrize("donate", [False, True])
def test_a_buffer_of_numpy_arrays_is_served_too(spec, layout, donate, url):
    host = random_host(spec, layout, 4)
    mine = jax.tree.map(lambda leaf: np.array(leaf), host)
    with PageStore.open(url, spec) as store:
        store.put(KEYS[:2], mine, [4, 5, 0, 1])
        got, hits = store.get(KEYS[:3], mine, [0, 1, 6, 7, 2, 3], donate=donate)
    want = page_bytes(host)
    assert hits == [True, True, False]
    assert page_bytes(got) == [want[2], want[1], want[2], want[0]]
    assert page_bytes(mine) == want
