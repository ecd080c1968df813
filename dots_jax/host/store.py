"""Pages of host K/V buffers in a key-value store: local files, object stores or memory."""

import json
import logging
import re
import threading
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import tensorstore as ts

from dots_jax.host.buffers import HostKV
from dots_jax.host.page_keys import page_keys
from dots_jax.host.slots import check_pages
from dots_jax.host.specs import Spec
from dots_jax.host.store_backend import PageStoreError, Progress, call, open_kvstore, probe, run_all
from dots_jax.host.store_local import local_objects
from dots_jax.host.store_namespace import describe_geometry, namespace_digest
from dots_jax.host.store_pages import PageReader, PageWriter
from dots_jax.host.store_record import TRAILER_NBYTES, Checksum, check_checksum, seal, trailer_algorithm, unseal

_log = logging.getLogger(__name__)
_KEY = re.compile(r"[0-9A-Za-z_-]{1,128}")


class PageStore:
    """Stores pages under their keys, in a namespace that only pools of the same geometry share.

    Build one with `PageStore.open`. What is in the store is a cache: `get` never fails because of it, and a page that
    is missing, torn, cut short, altered or unreadable is a miss that leaves the buffer's page as it was.

    Attributes:
      url: what was opened.
      spec: geometry of the pools it serves.
      namespace: digest of that geometry, 64 hexadecimal digits.
    """

    page_keys = staticmethod(page_keys)

    def __init__(
        self,
        url: Any,
        spec: Spec,
        namespace: str,
        geometry: dict,
        kv: ts.KvStore,
        checksum: Checksum,
        concurrency: int,
        timeout: float,
    ):
        self.url = url
        self.spec = spec
        self._sides = [nbytes for nbytes in (spec.k_page_bytes, spec.v_page_bytes) if nbytes]
        self.namespace = namespace
        self._checksum: Checksum = checksum
        self._width = concurrency
        self._timeout = timeout
        self._geometry = geometry
        self._root = kv / f"{namespace}/"
        self._objects = kv / f"{namespace}/pages/"
        self._local = local_objects(self._objects, spec.page_bytes + TRAILER_NBYTES)
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="page-store")
        self._background = ThreadPoolExecutor(1, thread_name_prefix="page-store-batch")

    @classmethod
    def open(
        cls,
        url: str | Mapping[str, Any],
        spec: Spec,
        *,
        model_name: str = "",
        rank: int = 0,
        num_ranks: int = 1,
        checksum: Checksum = "xxh3",
        durable: bool = False,
        concurrency: int = 4,
        timeout: float = 60.0,
        context: Mapping[str, Any] | ts.Context | None = None,
    ) -> "PageStore":
        """Opens a store for pools of one geometry, and proves that it can be written and read.

        Args:
          url: `file:///path`, `memory://`, `s3://bucket/path`, `gs://bucket/path`, or tensorstore's JSON for a
            key-value store. A memory store lives as long as this object, unless several are opened with one `context`.
          spec: geometry of the pools.
          model_name: name and revision of the weights.
          rank: tensor-parallel rank; left out of the namespace of a `LatentSpec`, whose pages all ranks share.
          num_ranks: tensor-parallel ranks.
          checksum: "xxh3" or "sha256", the first being the faster (see `store_record`). Each is understood
            when reading.
          durable: wait for the disk on each write (local files). Without it a power cut may lose pages; they are then
            misses.
          concurrency: operations in flight. A few are enough for local files; choose 32 or more for an object store.
          timeout: seconds to wait for any one operation; tensorstore itself goes on trying for many minutes when an
            object store does not answer.
          context: JSON of a tensorstore context, added to the above; or a context, which then decides on durability
            as well.

        Raises:
          TypeError: `spec` is no spec.
          ValueError: the URL, the checksum, a rank, the concurrency or the timeout makes no sense.
          PageStoreError: the store cannot be written and read back.
        """
        check_checksum(checksum)
        if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
            raise ValueError(f"concurrency: expected a positive integer, got {concurrency!r}.")
        if not timeout > 0:
            raise ValueError(f"timeout: expected a positive number of seconds, got {timeout!r}.")
        options = {"model_name": model_name, "rank": rank, "num_ranks": num_ranks}
        geometry = describe_geometry(spec, **options)
        kv = open_kvstore(url, durable=durable, context=context)
        store = cls(url, spec, namespace_digest(spec, **options), geometry, kv, checksum, concurrency, timeout)
        store._ensure_manifest()
        probe(url, store._root, timeout)
        return store

    def put(self, keys: Sequence[str], host_kv: Any, slots: Any, *, progress: Progress | None = None) -> int:
        """Writes pages of a buffer; an object that is there already is replaced.

        Args:
          keys: one key a page, all different.
          host_kv: the buffer.
          slots: slots of whole pages of it, `page_size` for each key.
          progress: called with (pages done, pages in all) after each page.

        Returns:
          Pages written.

        Raises:
          TypeError: `host_kv` is no host buffer.
          ValueError: keys and slots do not go together, or the buffer has another geometry.
          PageStoreError: a write failed, or the store was removed or replaced in the meantime. Pages written before may
            be there or not; each is whole or a miss, and the same call may simply be made again.
        """
        pages = self._check(keys, host_kv, slots)
        if len(set(keys)) < len(keys):
            raise ValueError(f"keys: {next(k for i, k in enumerate(keys) if k in keys[:i])!r} is there twice.")
        before = self._ensure_manifest()
        reader, own = PageReader(host_kv), threading.local()

        def write(i: int) -> None:
            if not hasattr(own, "memory"):  # one object's worth for each thread of this call
                own.memory = bytearray(self.spec.page_bytes + TRAILER_NBYTES)
            reader.read(int(pages[i]), np.frombuffer(own.memory, np.uint8, self.spec.page_bytes))
            seal(own.memory, self._sides, namespace=self.namespace, key=keys[i], checksum=self._checksum)
            self._call(f"writing page {keys[i]}", self._objects.write(keys[i], cast(bytes, own.memory)))

        run_all(self._pool, self._width, len(keys), write, progress)
        if self._manifest() != before:
            raise PageStoreError(f"Page store {self.url} was removed or replaced during a put; it may be repeated.")
        return len(keys)

    def get(
        self, keys: Sequence[str], host_kv: Any, slots: Any, *, donate: bool = False, progress: Progress | None = None
    ) -> tuple[Any, list[bool]]:
        """Reads pages into a buffer.

        Args:
          keys: one key a page.
          host_kv: the buffer.
          slots: slots of whole pages of it, `page_size` for each key.
          donate: give up the buffer's memory to the result. The cost then follows the pages read; without it the buffer
            is copied once (not at all if nothing hits). `host_kv` is deleted at the first hit: it is lost if this call
            is interrupted or `progress` raises, like an argument donated to a jitted function that fails.
          progress: called with (pages done, pages in all) after each page. What it raises is raised here.

        Returns:
          The buffer with the pages that were found, all others as they were, and for each key whether it was.

        Raises:
          TypeError: `host_kv` is no host buffer.
          ValueError: keys and slots do not go together, or the buffer has another geometry.
        """
        pages = self._check(keys, host_kv, slots)
        hits = [False] * len(keys)
        writer = PageWriter(host_kv, donate=donate)

        def read(i: int) -> None:
            value = self._read(keys[i])
            if value is None:
                return
            payload = unseal(value, sides_nbytes=self._sides, namespace=self.namespace, key=keys[i])
            if payload is None:
                _log.warning("page store %s: %s is damaged and counts as missing", self.url, keys[i])
                return
            writer.write(int(pages[i]), payload)
            hits[i] = True

        run_all(self._pool, self._width, len(keys), read, progress)
        return writer.finish(), hits

    def put_async(self, *args: Any, **options: Any) -> "Future[int]":
        """`put` in the background, one batch after the other; `progress` is called there.

        The buffer must not be deleted before the batch ends; donating it is safe, but copies it until then.
        """
        return self._background.submit(self.put, *args, **options)

    def get_async(self, *args: Any, **options: Any) -> "Future[tuple[Any, list[bool]]]":
        """`get` in the background, one batch after the other; `progress` is called there."""
        return self._background.submit(self.get, *args, **options)

    def longest_prefix(self, keys: Sequence[str]) -> int:
        """How many of the first keys have a page here, up to the first that has none.

        Looks at the last 128 bytes of each object, which shows missing, foreign and cut objects; only `get` reads the
        rest and has the last word on it.
        """
        ahead = 4 * self._width
        for start in range(0, len(keys), ahead):
            part = [self._check_key(key) for key in keys[start : start + ahead]]
            futures = [self._objects.read(key, byte_range=slice(-TRAILER_NBYTES, None)) for key in part]
            for i, (key, future) in enumerate(zip(part, futures, strict=True)):
                if not self._is_trailer(key, future):
                    return start + i
        return len(keys)

    def close(self) -> None:
        """Waits for batches in the background and ends the threads; the store is of no use after."""
        self._background.shutdown()
        self._pool.shutdown()

    def __enter__(self) -> "PageStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"PageStore({self.url!r}, {self.spec}, namespace={self.namespace[:12]}...)"

    def _check_key(self, key: str) -> str:
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ValueError(f"keys: expected letters, digits, '-' and '_' (1 to 128 of them), got {key!r}.")
        return key

    def _check(self, keys: Sequence[str], host_kv: Any, slots: Any) -> np.ndarray:
        if isinstance(keys, str):
            raise ValueError(f"keys: expected a list of keys, got the one string {keys!r}.")
        if not isinstance(host_kv, HostKV):
            raise TypeError(f"host_kv: expected a host buffer, got {type(host_kv).__name__}.")
        if host_kv.spec != self.spec:
            raise ValueError(f"host_kv: expected a buffer of {self.spec}, got {host_kv.spec}.")
        for key in keys:
            self._check_key(key)
        pages = check_pages("slots", slots, host_kv.num_pages, self.spec.page_size)
        if len(pages) != len(keys):
            raise ValueError(f"slots: expected one page for each of {len(keys)} keys, got {len(pages)} pages.")
        return pages

    def _call(self, doing: str, future: ts.Future) -> Any:
        return call(self.url, doing, future, self._timeout)

    def _read(self, key: str) -> bytes | memoryview | None:
        """The object's bytes, valid until this thread's next call; None if there is none or it cannot be read."""
        try:
            if self._local is not None:
                return self._local.read(key)
            result = self._call(f"reading page {key}", self._objects.read(key))
        except OSError as error:
            _log.warning("page store %s: %s (counts as missing)", self.url, error)
            return None
        return result.value if result.state == "value" else None

    def _is_trailer(self, key: str, future: ts.Future) -> bool:
        try:
            result = self._call(f"looking up page {key}", future)
        except PageStoreError as error:  # shorter than a trailer, or unreadable
            _log.warning("%s (counts as missing)", error)
            return False
        size = self.spec.page_bytes
        return trailer_algorithm(result.value, payload_nbytes=size, namespace=self.namespace, key=key) is not None

    def _manifest(self) -> bytes | None:
        result = self._call("reading the manifest", self._root.read("manifest.json"))
        return result.value if result.state == "value" else None

    def _ensure_manifest(self) -> bytes:
        """The manifest that marks this namespace, written if it is missing.

        Its random id tells a store that was removed and made anew from the one that was there.
        """
        found = self._call("reading the manifest", self._root.read("manifest.json"))
        if found.state != "value":
            text = json.dumps(self._geometry | {"store": uuid.uuid4().hex}, indent=1, sort_keys=True)
            write = self._root.write("manifest.json", text.encode(), if_equal=found.stamp.generation)
            self._call("writing the manifest", write)
        manifest = self._manifest()
        if manifest is None:
            raise PageStoreError(f"Page store {self.url} does not keep what is written to it.")
        return manifest
