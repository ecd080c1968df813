"""The boundary: what is refused, in which order, before anything is compiled."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dots_jax.decode import mosaic_gpu, swa_latent_decode, swa_latent_decode_reference, xla
from dots_jax.pages import PageTable


def call(q=(2, 1, 2, 16), kv=(4, 64, 16), rows=2, page_size=64, dtype=jnp.float32, kv_dtype=None, table=..., **changes):
    if table is ...:
        table = PageTable(jnp.zeros((rows, 2), jnp.int32), jnp.ones(rows, jnp.int32), page_size=page_size)
    options = {"window": 513, "scale": 0.25, "v_dim": 8} | changes
    return swa_latent_decode(jnp.zeros(q, dtype), jnp.zeros(kv, kv_dtype or dtype), table, **options)


@pytest.mark.parametrize("page_size", [1, 16, 32, 128])
def test_page_size_error_names_the_value_and_compiles_nothing(page_size):
    def refuse(*_, **__):
        raise AssertionError("traced")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dots_jax.decode.implementations.choose", refuse)
        with pytest.raises(RuntimeError) as caught:
            call(page_size=page_size)
    assert str(caught.value) == f"Dots SWA latent decode requires page_size=64, got {page_size}."


def test_missing_table():
    with pytest.raises(RuntimeError) as caught:
        call(table=None)
    assert str(caught.value) == "Dots SWA latent decode requires an SWA page table."


REFUSED = {
    "q rank": ({"q": (2, 2, 16)}, ValueError, r"\(2, 2, 16\)"),
    "no queries": ({"q": (2, 0, 2, 16)}, ValueError, r"\(2, 0, 2, 16\)"),
    "rows": ({"rows": 3}, ValueError, "q .* has 2 rows.* has 3"),
    "cache rank": ({"kv": (4, 64, 1, 16)}, ValueError, r"\(4, 64, 1, 16\)"),
    "widths": ({"kv": (4, 64, 24)}, ValueError, "16 wide.* 24 wide"),
    "v_dim 0": ({"v_dim": 0}, ValueError, "1..16.*got 0"),
    "v_dim past the row": ({"v_dim": 17}, ValueError, "1..16.*got 17"),
    "v_dim fraction": ({"v_dim": 8.0}, ValueError, "got 8.0"),
    "page axis": ({"kv": (4, 32, 16)}, ValueError, "pages of 32 tokens.*of 64"),
    "dtypes differ": ({"kv_dtype": jnp.bfloat16}, TypeError, "q float32, cache bfloat16"),
    "integers": ({"dtype": jnp.int32}, TypeError, "int32"),
    "window 0": ({"window": 0}, ValueError, "window.*got 0"),
    "window fraction": ({"window": 2.5}, ValueError, "window.*got 2.5"),
    "scale 0": ({"scale": 0.0}, ValueError, "scale.*got 0.0"),
    "scale negative": ({"scale": -1.0}, ValueError, "scale.*got -1.0"),
    "scale NaN": ({"scale": float("nan")}, ValueError, "scale.*got nan"),
    "scale infinite": ({"scale": float("inf")}, ValueError, "scale.*got inf"),
    "counts rows": ({"counts": np.zeros(3, np.int32)}, ValueError, r"counts.*B=2.*\(3,\)"),
    "counts floats": ({"counts": np.zeros(2)}, TypeError, "counts.*float"),
    "counts past S": ({"counts": np.array([0, 2])}, ValueError, r"0\.\.S=1.*\[0, 2\]"),
    "counts negative": ({"counts": np.array([-1, 1])}, ValueError, r"0\.\.S=1.*\[-1, 1\]"),
    "implementation": ({"implementation": "triton"}, ValueError, "xla, mosaic_gpu, interpret; got 'triton'"),
    "table type": ({"table": np.zeros((2, 2))}, TypeError, "PageTable, got ndarray"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    arguments, kind, pattern = REFUSED[name]
    with pytest.raises(kind, match=pattern):
        call(**arguments)
    with pytest.raises(kind, match=pattern):
        jax.jit(lambda: call(**arguments))()


# Each argument set breaks the rule of its line and of every later line, so the first rule has to win.
ORDER = [
    ({"page_size": 16}, RuntimeError, "page_size"),
    ({"rows": 3}, ValueError, "rows"),
    ({"v_dim": 99}, ValueError, "v_dim"),
    ({"kv": (4, 32, 16)}, ValueError, "tokens"),
    ({"kv_dtype": jnp.bfloat16}, TypeError, "dtype"),
    ({"window": 0}, ValueError, "window"),
    ({"scale": -1.0}, ValueError, "scale"),
]


@pytest.mark.parametrize("first", range(len(ORDER)))
def test_order_of_the_checks(first):
    arguments = {}
    for changes, _, _ in ORDER[first:]:
        arguments |= changes
    _, kind, pattern = ORDER[first]
    with pytest.raises(kind, match=pattern):
        call(**arguments)


def test_counts_of_jax_arrays_act_as_the_nearest_bound():
    kv = jnp.arange(4 * 64 * 16, dtype=jnp.float32).reshape(4, 64, 16) / 1e4
    table = PageTable(jnp.zeros((2, 1), jnp.int32), jnp.array([5, 5]))
    q, static = jnp.ones((2, 2, 1, 16)), {"window": 4, "scale": 1.0, "v_dim": 8}
    wild, tame = (swa_latent_decode(q, kv, table, counts=jnp.array(counts), **static) for counts in ([-7, 9], [0, 2]))
    np.testing.assert_array_equal(wild, tame)
    expected, _ = swa_latent_decode_reference(q, kv, table, counts=np.array([-7, 9]), **static)
    np.testing.assert_allclose(wild, expected, atol=1e-6)


def test_forcing_the_kernel_on_a_cpu_names_the_device():
    with pytest.raises(NotImplementedError, match=r"'mosaic_gpu' cannot run: it needs a Hopper GPU.*cpu.*'xla'"):
        call(implementation="mosaic_gpu", dtype=jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="'mosaic_gpu' cannot run"):
        jax.jit(lambda: call(implementation="mosaic_gpu", dtype=jnp.bfloat16))()


@pytest.mark.parametrize(("threads", "runnable"), [("64", "'xla', 'interpret'."), ("", "'xla'.")])
def test_the_simulation_is_offered_only_where_it_has_threads(monkeypatch, threads, runnable):
    monkeypatch.setenv("NPROC", threads)
    with pytest.raises(NotImplementedError) as caught:
        call(q=(1, 1, 8, 1088), kv=(2, 64, 1088), rows=1, v_dim=1024, implementation="mosaic_gpu", dtype=jnp.bfloat16)
    assert str(caught.value).endswith(f"Here these can: {runnable}")


TRACED_ONCE = """
import sys
import jax, jax.numpy as jnp
from dots_jax import PageTable, swa_latent_decode
from dots_jax.decode import mosaic_gpu

mosaic_gpu._wrong_device = lambda device: None  # as on a Hopper GPU; lowered for a CPU, XLA's branch runs
traces = 0

@jax.jit
def step(q, kv_pages, table):
    global traces
    traces += 1
    return swa_latent_decode(
        q, kv_pages, table, window=513, scale=0.1, v_dim=1024, implementation=eval(sys.argv[1])
    )

table = PageTable(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
for _ in range(2):
    step(jnp.zeros((1, 1, 8, 1088), jnp.bfloat16), jnp.zeros((2, 64, 1088), jnp.bfloat16), table).block_until_ready()
print(traces)
"""


@pytest.mark.parametrize("implementation", [None, "interpret"])
def test_the_first_use_of_the_kernel_in_a_process_is_traced_once(implementation):
    """Importing parts of Pallas changes what JAX looks traces up by, so it must not happen in the first trace."""
    command = [sys.executable, "-c", TRACED_ONCE, repr(implementation)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("1\n", "", 0)


def test_shapes_that_the_kernel_cannot_take_are_named():
    with pytest.raises(NotImplementedError, match=r"'interpret' cannot run: dtype float32 is not.*'xla'"):
        call(implementation="interpret")


@pytest.mark.parametrize(
    ("platform", "capability", "pattern"),
    [
        ("gpu", "9.0", None),
        ("gpu", "8.0", "has 8.0"),
        ("gpu", "10.0", "has 10.0"),
        ("cpu", "", "Hopper"),
        ("tpu", "", "Hopper"),
    ],
)
def test_which_devices_take_the_kernel(platform, capability, pattern):
    class Device:
        device_kind = "some device"

    device = Device()
    device.platform, device.compute_capability = platform, capability
    q, kv_pages = jnp.zeros((1, 1, 8, 1088), jnp.bfloat16), jnp.zeros((2, 64, 1088), jnp.bfloat16)
    table = PageTable(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
    reason = mosaic_gpu.cannot_run(q, kv_pages, table, window=513, v_dim=1024, device=device)
    assert reason is None if pattern is None else re.search(pattern, reason)


def test_the_default_on_a_hopper_gpu_is_the_kernel_where_it_fits(monkeypatch):
    """With the device check passing, a trace holds the kernel for CUDA beside XLA, which is what runs on a CPU."""
    traced = []

    def kernel(*arrays, **static):
        traced.append(arrays[0].shape)
        return xla.decode(*(array * 0 for array in arrays), **static)

    monkeypatch.setattr(mosaic_gpu, "_wrong_device", lambda device: None)
    monkeypatch.setattr(mosaic_gpu, "decode", kernel)
    random = np.random.default_rng(0)
    q = jnp.asarray(random.standard_normal((1, 1, 9, 1088)), jnp.bfloat16)
    kv_pages = jnp.asarray(0.1 * random.standard_normal((2, 64, 1088)), jnp.bfloat16)
    table = PageTable(jnp.zeros((1, 1), jnp.int32), jnp.full(1, 50))
    static = {"window": 513, "scale": 0.1, "v_dim": 1024}
    got = swa_latent_decode(q, kv_pages, table, **static)
    assert traced == [q.shape]
    expected, _ = swa_latent_decode_reference(q, kv_pages, table, **static)
    np.testing.assert_allclose(got.astype(jnp.float32), expected, atol=2e-3)
    swa_latent_decode(q[..., :576], kv_pages[..., :576], table, **static | {"v_dim": 500})  # a v_dim that does not tile
    assert traced == [q.shape]


def test_a_simulation_that_would_hang_is_refused_with_what_it_needs_and_what_can_run(monkeypatch):
    monkeypatch.delenv("NPROC", raising=False)
    shapes = {"q": (1, 1, 8, 1088), "kv": (2, 64, 1088), "rows": 1, "v_dim": 1024, "dtype": jnp.bfloat16}
    words = r"'interpret' cannot run: simulating the kernel needs NPROC=16 .*deadlock\. Here these can: 'xla'\."
    with pytest.raises(RuntimeError, match=words):
        call(**shapes, implementation="interpret")
    with pytest.raises(RuntimeError, match=words):
        jax.jit(lambda: call(**shapes, implementation="interpret"))()
