import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hosts import LEGAL, LEGAL_IDS, SYMMETRIC, T1

from dots_jax.host import HostMemoryError, KVSpec, allocate_host_kv, host_memory_budget
from dots_jax.host.budget import GIB, check_budget


@pytest.mark.parametrize(("spec", "layout"), LEGAL, ids=LEGAL_IDS)
@pytest.mark.parametrize("memory_kind", ["pinned_host", "unpinned_host", "cpu"])
def test_leaves_are_zero_and_stay_in_the_chosen_memory(spec, layout, memory_kind):
    kind = jax.devices("cpu")[0] if memory_kind == "cpu" else memory_kind
    host = allocate_host_kv(spec, 4, layout=layout, memory_kind=kind)
    want = "device" if memory_kind == "cpu" else memory_kind
    assert all(leaf.sharding.memory_kind == want for leaf in host.leaves.values())
    assert not any(np.asarray(leaf).any() for leaf in host.leaves.values())
    host = host.set_page(1, bytes(spec.page_bytes), donate=True)
    assert all(leaf.sharding.memory_kind == want for leaf in host.leaves.values())


@pytest.mark.parametrize("kind", ["device", "pinned", ""])
def test_unknown_memory_kind_lists_what_there_is(kind):
    with pytest.raises(ValueError, match="offers pinned_host, unpinned_host or a CPU device"):
        allocate_host_kv(T1, 4, layout="page_first", memory_kind=kind)


def test_budget_of_one_byte_less_is_refused():
    need = 8 * T1.bytes_per_token
    assert allocate_host_kv(T1, 4, layout="page_first", memory_budget=need).nbytes == need
    with pytest.raises(HostMemoryError, match=f"requested {need} bytes .*available {need - 1} bytes") as caught:
        allocate_host_kv(T1, 4, layout="page_first", memory_budget=need - 1)
    assert (caught.value.requested, caught.value.available) == (need, need - 1)
    assert isinstance(caught.value, ValueError)


def test_asymmetric_buffers_are_not_charged_for_two_k_sides():
    need = 8 * T1.bytes_per_token
    assert need < 8 * 2 * T1.v_bytes_per_token
    allocate_host_kv(T1, 4, layout="page_first", memory_budget=need)


def test_four_ranks_share_what_the_reserve_leaves():
    reserve = 10 * GIB
    budget = host_memory_budget(available=reserve + 64 * GIB, reserve=reserve, ranks_on_host=4)
    assert budget == 16 * GIB
    device = jax.devices("cpu")[0]
    check_budget(16 * GIB, memory_budget=budget, memory_kind="pinned_host", device=device)
    with pytest.raises(HostMemoryError, match=rf"available {16 * GIB} bytes \(17\.18 GB\)"):
        check_budget(16 * GIB + 1, memory_budget=budget, memory_kind="pinned_host", device=device)


def test_default_budget_is_asked_from_the_host(monkeypatch):
    monkeypatch.setattr("dots_jax.host.budget.available_host_memory", lambda: 1000)
    monkeypatch.setattr("dots_jax.host.budget.default_reserve", lambda: 40)
    with pytest.raises(HostMemoryError, match=r"requested 480 bytes .*available 240 bytes"):
        allocate_host_kv(T1, 2, layout="page_first", ranks_on_host=4)
    assert allocate_host_kv(T1, 1, layout="page_first", ranks_on_host=4).nbytes == 240
    assert host_memory_budget(available=10, reserve=40) == 0
    with pytest.raises(ValueError, match="ranks_on_host"):
        host_memory_budget(ranks_on_host=0)


def test_real_default_budget_is_sane():
    assert 0 < host_memory_budget() < 1 << 50


class FakeGpu:
    platform = "gpu"


def test_pinned_pool_cap_is_named_where_it_binds(monkeypatch):
    gpu = FakeGpu()
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", raising=False)
    check = {"memory_budget": 1000 * GIB, "device": gpu}
    check_budget(64 * GIB, memory_kind="pinned_host", **check)
    check_budget(65 * GIB, memory_kind="device", **check)
    with pytest.raises(HostMemoryError, match=rf"available {64 * GIB} bytes.*XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"):
        check_budget(64 * GIB + 1, memory_kind="pinned_host", **check)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "200")
    check_budget(65 * GIB, memory_kind="pinned_host", **check)
    # The budget is what binds here, so the pool is not to blame.
    with pytest.raises(HostMemoryError) as caught:
        check_budget(300 * GIB, memory_kind="pinned_host", **(check | {"memory_budget": 100 * GIB}))
    assert "LIMIT_GB" not in str(caught.value)


def test_nothing_is_allocated_when_refused():
    with pytest.raises(HostMemoryError):
        allocate_host_kv(KVSpec(64, 8, 192, 128), 1 << 40, layout="page_first")


@pytest.mark.parametrize(
    ("num_pages", "error"), [(0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)]
)
def test_number_of_pages(num_pages, error):
    with pytest.raises(error, match="num_pages"):
        allocate_host_kv(SYMMETRIC, num_pages, layout="page_first")
    with pytest.raises(TypeError, match="expected a KVSpec or a LatentSpec"):
        allocate_host_kv({}, 1, layout="page_first")  # pyright: ignore[reportArgumentType]


def test_fp8_is_stored_as_itself():
    spec = KVSpec(2, 1, 4, 6, 2, jnp.float8_e4m3fn)
    assert allocate_host_kv(spec, 2, layout="page_first").k.dtype == jnp.float8_e4m3fn


def test_a_budget_that_is_no_number_allows_nothing():
    with pytest.raises(HostMemoryError, match="available nan bytes"):
        allocate_host_kv(T1, 4, layout="page_first", memory_budget=float("nan"))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.complex128])
def test_a_dtype_that_jax_would_narrow_is_refused_before_allocation(monkeypatch, dtype):
    monkeypatch.setattr("dots_jax.host.allocate._zeros", lambda *_: pytest.fail("memory was allocated"))
    with pytest.raises(ValueError, match=f"spec.dtype: .* got {np.dtype(dtype)}, which it holds as"):
        allocate_host_kv(KVSpec(1, 1, 4, page_size=2, dtype=dtype), 2, layout="page_first", memory_budget=0)
