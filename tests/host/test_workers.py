import threading

import numpy as np
import pytest
from hosts import T1, bits, canonical, filled, random_device

from dots_jax.host import workers


@pytest.fixture
def threaded(monkeypatch):
    monkeypatch.setattr(workers, "MIN_BYTES", 1)


def test_large_calls_run_side_by_side(threaded):
    # Each waits for the other, so that neither could return first.
    barrier = threading.Barrier(2, timeout=60)
    assert sorted(workers.run_together([barrier.wait, barrier.wait], 1)) == [0, 1]
    assert workers.run_together([lambda: 1, lambda: 2], 1) == [1, 2]


def test_small_and_traced_calls_stay_on_this_thread():
    names = workers.run_together([lambda: threading.current_thread().name] * 2, 0)
    assert set(names) == {threading.current_thread().name}
    assert workers.start(lambda: threading.current_thread().name, 0).result() == names[0]


def test_a_failure_reaches_the_caller_and_the_other_call_is_finished(threaded):
    finished = []

    def fail():
        raise ValueError("broken")

    for calls in ([fail, lambda: finished.append(1)], [lambda: finished.append(2), fail]):
        with pytest.raises(ValueError, match="broken"):
            workers.run_together(calls, 1)
    assert finished == [1, 2]
    with pytest.raises(ValueError, match="broken"):
        workers.start(fail, 1).result()


def test_a_started_call_does_not_block(threaded):
    go = threading.Event()
    future = workers.start(lambda: go.wait(60), 1)
    assert not future.done()
    go.set()
    assert future.result()


def test_threads_change_no_result(threaded):
    slots = [6, 7, 0, 1], [3, 4, 9, 10]
    host, _ = filled(T1, "page_first", 4)
    device = random_device(T1, 11, seed=2)
    want = [side.copy() for side in canonical(host)]
    for side, source in zip(want, (device.k, device.v), strict=True):
        for layer in range(3):
            side[slots[0], layer] = bits(source[layer])[slots[1]]
    new = host.backup(device, *slots)
    for got, side in zip(canonical(new), want, strict=True):
        np.testing.assert_array_equal(got, side)
    for layer, arrays in new.load_layers(random_device(T1, 11, seed=5), *slots, prefetch=2):
        for got, side in zip(arrays, want, strict=True):
            np.testing.assert_array_equal(bits(got)[slots[1]], side[slots[0], layer])
