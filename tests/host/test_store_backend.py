"""Running many operations: order of errors, progress, and that nothing is left running."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from dots_jax.host.store_backend import PageStoreError, open_kvstore, probe, run_all


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_each_item_is_worked_on_once_and_reported(pool):
    seen, steps, threads = [], [], set()

    def progress(done, total):
        steps.append((done, total))
        threads.add(threading.current_thread())

    run_all(pool, 4, 50, seen.append, progress)
    assert sorted(seen) == list(range(50))
    assert steps == [(i, 50) for i in range(1, 51)]
    assert threads == {threading.current_thread()}


def test_nothing_to_do_is_done_at_once(pool):
    run_all(pool, 4, 0, lambda i: pytest.fail("no item"), lambda done, total: pytest.fail("no step"))


def test_after_an_error_nothing_new_starts_and_nothing_goes_on(pool):
    begun, running = [], []

    def work(i):
        begun.append(i)
        running.append(i)
        time.sleep(0.01)
        running.remove(i)
        if i == 5:
            raise OSError("item 5")

    with pytest.raises(OSError, match="item 5"):
        run_all(pool, 4, 1000, work, None)
    assert not running
    assert len(begun) < 50
    time.sleep(0.05)
    assert len(begun) < 50


def test_an_error_of_the_callback_stops_the_work(pool):
    begun = []

    def work(i):
        begun.append(i)
        time.sleep(0.005)

    def progress(done, total):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        run_all(pool, 2, 1000, work, progress)
    assert len(begun) < 50


@pytest.mark.parametrize("url", ["/tmp/pages", "pages", ""])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ValueError, match=rf"url: expected a URL such as file:///path or memory://, got '{url}'"):
        open_kvstore(url, durable=False, context=None)


def test_unknown_schemes_are_refused_by_name():
    with pytest.raises(ValueError, match=r"url: 'ftp://host/x' is not a store .*unsupported URL scheme"):
        open_kvstore("ftp://host/x", durable=False, context=None)


@pytest.mark.parametrize("durable", [True, False])
def test_durability_is_the_file_driver_s_own(durable, tmp_path):
    kv = open_kvstore(f"file://{tmp_path}", durable=durable, context=None)
    assert f"'file_io_sync': {durable}" in repr(kv)
    changed = open_kvstore(f"file://{tmp_path}", durable=durable, context={"file_io_sync": not durable})
    assert f"'file_io_sync': {not durable}" in repr(changed)


class Broken:
    """A store in memory that treats one kind of operation otherwise."""

    def __init__(self, **operations):
        self.kv = open_kvstore("memory://", durable=False, context=None)
        self.operations = operations

    def write(self, name, value):
        return self.operations.get("remove" if value is None else "write", self.kv.write)(name, value)

    def read(self, name):
        return self.operations.get("read", self.kv.read)(name)


def failing(*args):
    future = Future()
    future.set_exception(ValueError("refused"))
    return future


@pytest.mark.parametrize(
    ("operations", "message"),
    [
        ({}, None),
        ({"write": failing}, "Page store x: writing a probe failed: refused"),
        ({"read": failing}, "Page store x: reading a probe failed: refused"),
        (
            {"write": lambda name, value: Broken().write(name, value)},
            "Page store x does not keep what is written to it",
        ),
    ],
)
def test_a_probe_finds_what_is_broken_and_leaves_nothing(operations, message):
    kv = Broken(**operations)
    if message is None:
        probe("x", kv, 5)  # pyright: ignore[reportArgumentType]
    else:
        with pytest.raises(PageStoreError, match=message):
            probe("x", kv, 5)  # pyright: ignore[reportArgumentType]
    assert kv.kv.list().result() == []


def test_a_probe_that_cannot_be_removed_is_a_warning(caplog):
    kv = Broken(remove=failing)
    probe("x", kv, 5)  # pyright: ignore[reportArgumentType]
    (name,) = kv.kv.list().result()
    assert f"removing a probe failed: refused ({name.decode()} may stay behind)" in caplog.text
