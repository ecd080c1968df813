"""The page store on an object store: tensorstore's S3 client against a server of the same protocol on this machine."""

import pytest
from hosts import T1
from object_server import object_server
from store_cases import page_bytes, random_host

from dots_jax.host import PageStore, PageStoreError, page_keys

KEYS = page_keys(range(8), 2)


def test_pages_come_back_from_an_object_store():
    host = random_host(T1, "page_first", 4)
    with object_server() as (url, server), PageStore.open(url, T1, timeout=20) as store:
        assert store.longest_prefix(KEYS) == 0
        store.put(KEYS[:3], host, range(6))
        assert sorted(path.rsplit("/", 1)[1] for path in server.objects) == sorted([*KEYS[:3], "manifest.json"])
        assert store.longest_prefix(KEYS) == 3
        target = random_host(T1, "page_first", 4, seed=2)
        result, hits = store.get(KEYS, target, range(8))
        assert hits == [True, True, True, False]
        assert page_bytes(result) == [*page_bytes(host)[:3], page_bytes(target)[3]]


def test_damaged_objects_are_misses():
    host = random_host(T1, "page_first", 4)
    with object_server() as (url, server), PageStore.open(url, T1, timeout=20) as store:
        store.put(KEYS, host, range(8))
        path = {key: next(p for p in server.objects if p.endswith(key)) for key in KEYS}
        server.objects[path[KEYS[1]]] = server.objects[path[KEYS[1]]][:-1]
        server.objects[path[KEYS[2]]] = b"x"
        server.objects[path[KEYS[3]]] = b"y" + server.objects[path[KEYS[3]]][1:]
        assert store.longest_prefix(KEYS) == 1
        assert store.get(KEYS, host, range(8))[1] == [True, False, False, False]


def test_a_store_that_became_read_only_is_refused_when_opened_again():
    with object_server() as (url, server):
        PageStore.open(url, T1).close()
        before = dict(server.objects)
        server.refuse = True
        with pytest.raises(PageStoreError, match="writing a probe failed"):
            PageStore.open(url, T1, timeout=20)
        server.refuse = False
        PageStore.open(url, T1).close()
        assert server.objects == before  # and no probe is left


def test_a_store_that_denies_writes_is_refused_when_opened_and_an_error_later():
    host = random_host(T1, "page_first", 4)
    with object_server() as (url, server):
        with PageStore.open(url, T1, timeout=20) as store:
            server.refuse = True
            with pytest.raises(PageStoreError, match=r"writing page .* failed: .*403"):
                store.put(KEYS, host, range(8))
            server.refuse = False
            assert store.put(KEYS, host, range(8)) == 4
        server.refuse = True
        server.objects.clear()
        with pytest.raises(PageStoreError, match="writing the manifest failed"):
            PageStore.open(url, T1, timeout=20)
