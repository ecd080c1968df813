import jax
import numpy as np
import pytest
from hosts import LATENT, T1, bits, filled, random_device

from dots_jax.host import transfer

SLOTS = [6, 7, 0, 1], [3, 4, 9, 10]


@pytest.fixture
def started(monkeypatch):
    """Layers whose load was started, in order."""
    layers = []
    update = transfer.update

    def recording(function, dtype, value, *args, **kwargs):
        if function is transfer._load and kwargs["side"].name == "k":
            layers.append(int(args[1]))
        return update(function, dtype, value, *args, **kwargs)

    monkeypatch.setattr(transfer, "update", recording)
    return layers


@pytest.mark.parametrize("spec", [T1, LATENT], ids=["asymmetric", "latent"])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
def test_layers_come_in_order_and_equal_single_loads(spec, prefetch):
    host, _ = filled(spec, "page_first", 4)
    device = random_device(spec, 11, seed=2)
    seen = []
    for layer, arrays in host.load_layers(device, *SLOTS, prefetch=prefetch):
        seen.append(layer)
        for got, want in zip(arrays, host.load(device, layer, *SLOTS), strict=True):
            assert (got is None and want is None) or np.array_equal(bits(got), bits(want))
    assert seen == [0, 1, 2]


def test_loads_run_ahead_by_no_more_than_asked(started):
    host, _ = filled(T1, "page_first", 4)
    started.clear()
    loads = host.load_layers(random_device(T1, 11), *SLOTS, prefetch=1)
    assert started == []
    for used, ahead in enumerate([[0, 1], [0, 1, 2], [0, 1, 2]]):
        assert next(loads).layer == used
        assert started == ahead
    with pytest.raises(StopIteration):
        next(loads)
    assert not hasattr(loads, "__getitem__")


def test_without_prefetch_each_load_waits_to_be_asked_for(started):
    host, _ = filled(T1, "page_first", 4)
    started.clear()
    loads = host.load_layers(random_device(T1, 11), *SLOTS, prefetch=0)
    for used in range(3):
        next(loads)
        assert started == list(range(used + 1))


def test_bad_slots_are_refused_before_the_first_layer(started):
    host, _ = filled(T1, "page_first", 4)
    device = random_device(T1, 11)
    started.clear()
    with pytest.raises(ValueError, match=r"host_slots\[1\]: slot 3 breaks"):
        host.load_layers(device, [0, 3], [0, 1], donate=True)
    with pytest.raises(ValueError, match="prefetch: expected at least 0, got -1"):
        host.load_layers(device, [0, 1], [0, 1], prefetch=-1)
    assert started == []
    assert not any(array.is_deleted() for array in jax.tree.leaves(device))


def test_donation_gives_up_one_layer_at_a_time():
    host, _ = filled(T1, "page_first", 4)
    device = random_device(T1, 11)
    loads = host.load_layers(device, *SLOTS, prefetch=0, donate=True)
    for layer in range(3):
        next(loads)
        assert [array.is_deleted() for array in device.k] == [i <= layer for i in range(3)]
