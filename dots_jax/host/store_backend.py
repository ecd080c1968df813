"""Opening tensorstore's key-value stores, and running many operations on one at a time."""

import logging
import queue
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorstore as ts

_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


class PageStoreError(OSError):
    """The store itself failed: it cannot be reached or written, or it went away. The operation may be repeated."""


def open_kvstore(
    url: str | Mapping[str, Any], *, durable: bool, context: Mapping[str, Any] | ts.Context | None
) -> ts.KvStore:
    """Opens a key-value store by URL or by tensorstore's own JSON.

    Raises:
      ValueError: not a URL, or not one that this build of tensorstore knows; naming it.
    """
    if isinstance(url, str) and "://" not in url:
        raise ValueError(f"url: expected a URL such as file:///path or memory://, got {url!r}.")
    if not isinstance(context, ts.Context):
        context = ts.Context({"file_io_sync": durable} | dict(context or {}))
    try:
        return ts.KvStore.open(url if isinstance(url, str) else dict(url), context=context).result()
    except Exception as error:
        raise ValueError(f"url: {url!r} is not a store that can be opened: {_reason(error)}") from error


def call(url: Any, doing: str, future: ts.Future, timeout: float) -> Any:
    """The result of one operation; a failure, or no answer in `timeout` seconds, is a `PageStoreError`."""
    try:
        return future.result(timeout=timeout)
    except TimeoutError as error:
        future.cancel()
        raise PageStoreError(f"Page store {url}: {doing} failed: no answer within {timeout:g} s.") from error
    except Exception as error:
        raise PageStoreError(f"Page store {url}: {doing} failed: {_reason(error)}") from error


def probe(url: Any, kv: ts.KvStore, timeout: float) -> None:
    """Proves that a store can be written now: a small object goes in, comes back and goes away.

    Its name is used once, so that several may do this at the same time.

    Raises:
      PageStoreError: it cannot be written, or does not come back.
    """
    name = f"probe-{uuid.uuid4().hex}"
    try:
        call(url, "writing a probe", kv.write(name, name.encode()), timeout)
        if call(url, "reading a probe", kv.read(name), timeout).value != name.encode():
            raise PageStoreError(f"Page store {url} does not keep what is written to it.")
    finally:
        try:
            call(url, "removing a probe", kv.write(name, None), timeout)
        except PageStoreError as error:  # pages are never removed, so a store that refuses it still serves
            _log.warning("%s (%s may stay behind)", error, name)


def run_all(
    pool: ThreadPoolExecutor, width: int, count: int, work: Callable[[int], None], progress: Progress | None
) -> None:
    """Calls `work(i)` for each i below `count`, `width` at a time, and `progress(done, count)` after each.

    `progress` runs in the calling thread. After the first error nothing new is started; what was begun is waited for,
    so that nothing goes on behind the caller's back, and then the error is raised.
    """
    remaining = iter(range(count))
    lock, stop = threading.Lock(), threading.Event()
    finished: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def runner() -> None:
        try:
            while not stop.is_set():
                with lock:
                    i = next(remaining, None)
                if i is None:
                    return
                work(i)
                finished.put(True)
        except BaseException:
            stop.set()
            raise
        finally:
            finished.put(False)

    runners = [pool.submit(runner) for _ in range(min(width, count))]
    try:
        running, done = len(runners), 0
        while running:
            if finished.get():
                done += 1
                if progress is not None:
                    progress(done, count)
            else:
                running -= 1
    finally:
        stop.set()
        errors = [runner.exception() for runner in runners]
    for error in errors:
        if error is not None:
            raise error


def _reason(error: Exception) -> str:
    """The message without its list of source positions."""
    return str(error).split(" [source locations=")[0]
