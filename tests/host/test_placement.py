"""A buffer's own device decides how it is handled, not the default one: here the default claims to be a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hosts import bits, canonical, random_device, stacked, zeros_like

from dots_jax.host import KVSpec, allocate_host_kv
from dots_jax.host.placement import platform_of
from dots_jax.host.transfer import needs_staging, prepare_loads
from dots_jax.host.workers import blocking_bytes

SPEC = KVSpec(2, 1, 96, 32, page_size=4, dtype="float8_e5m2")
SLOTS = np.arange(12)


@pytest.fixture
def gpu_by_default(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def arrays():
    """An empty buffer of fp8 on the CPU, and device arrays there with every pattern of 8 bits, NaNs included."""
    device = random_device(SPEC, 12)
    patterns = np.resize(np.arange(256, dtype=np.uint8), (12, 1, 96)).view(SPEC.dtype)
    device = type(device)((jnp.asarray(patterns), device.k[1]), device.v)
    return allocate_host_kv(SPEC, 3, layout="page_first"), device


@pytest.mark.parametrize("chunk_pages", [None, 2])
def test_fp8_is_exact_on_a_cpu_that_is_not_the_default(gpu_by_default, monkeypatch, chunk_pages):
    host, device = arrays()
    host = host.backup(device, SLOTS, SLOTS, chunk_pages=chunk_pages)
    for got, want in zip(canonical(host), stacked(device), strict=True):
        np.testing.assert_array_equal(got, want)
    if chunk_pages:
        monkeypatch.setattr("dots_jax.host.transfer.needs_staging", lambda *args: True)
    for layer in range(2):
        loaded = prepare_loads(host, zeros_like(device), SLOTS, SLOTS, donate=False)(layer)
        for got, want in zip(loaded, device.layer(layer), strict=True):
            np.testing.assert_array_equal(bits(got), bits(want))


def test_pages_of_fp8_are_exact_on_a_cpu_that_is_not_the_default(gpu_by_default):
    host = arrays()[0]
    data = np.resize(np.arange(256, dtype=np.uint8), SPEC.page_bytes)
    host = host.set_page(1, data)
    np.testing.assert_array_equal(host.get_page(1), data)
    assert not host.get_page(0).any()


def test_the_platform_is_that_of_the_arrays(gpu_by_default):
    host, device = arrays()
    assert platform_of(host) == platform_of((np.zeros(3), device)) == "cpu"
    assert platform_of([np.zeros(3)]) == "gpu"
    with jax.default_device("cpu"):
        assert platform_of([np.zeros(3)]) == "cpu"
    with jax.default_device(jax.devices("cpu")[0]):
        assert platform_of([]) == "cpu"
    # All memory kinds of a CPU are the same memory, and a call there waits for its copy.
    assert next(iter(host.leaves.values())).sharding.memory_kind != device.k[0].sharding.memory_kind
    assert not needs_staging(host, device)
    assert blocking_bytes((host, device), 5) == 5
    assert jax.eval_shape(lambda tree: jnp.zeros(blocking_bytes(tree, 5)), host).shape == (0,)
