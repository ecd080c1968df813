"""The decode and the page functions under transformations, in 64-bit mode, and at the ends of int32."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dots_jax import PagePool, PageTable, gather_latent, swa_latent_decode, write_latent
from dots_jax.decode import swa_latent_decode_reference
from dots_jax.pages import extend

STATIC = {"window": 65, "scale": 0.3, "v_dim": 5}
INT32_MAX = 2**31 - 1


@pytest.fixture
def problem():
    random = np.random.default_rng(0)
    q = jnp.asarray(random.standard_normal((3, 8, 2, 8)), jnp.float32)
    kv_pages = jnp.asarray(random.standard_normal((9, 64, 8)), jnp.float32)
    return q, kv_pages, PageTable([[0, 1, 2, -1], [3, 4, -1, -1], [5, -1, -1, -1]], [150, 70, 3])


def widened(table):
    """The same table, wide enough for the decode to go block by block."""
    return PageTable(jnp.pad(table.pages, ((0, 0), (0, 100)), constant_values=-1), table.lengths)


@pytest.mark.parametrize("window", [INT32_MAX - 3, INT32_MAX, 2**40])
@pytest.mark.parametrize("wide", [False, True])
def test_windows_up_to_the_end_of_int32_and_past_it(problem, window, wide):
    q, kv_pages, table = problem
    table = widened(table) if wide else table
    got = swa_latent_decode(q, kv_pages, table, return_lse=True, **STATIC | {"window": window})
    expected = swa_latent_decode_reference(q, kv_pages, table, **STATIC | {"window": window})
    np.testing.assert_allclose(got[0], expected[0], atol=2e-6)
    np.testing.assert_allclose(got[1], expected[1], atol=1e-5)


@pytest.mark.parametrize("window", [65, None])
def test_a_length_below_zero_holds_nothing(problem, window):
    q, kv_pages, table = problem
    table = PageTable(table.pages, [-1, -5, -(2**31)])
    out, lse = swa_latent_decode(q, kv_pages, table, return_lse=True, **STATIC | {"window": window})
    assert not np.any(out)
    assert np.all(np.isneginf(lse))


@pytest.mark.parametrize("window", [65, None])
def test_dtypes_do_not_change_in_64_bit_mode(problem, window):
    q, kv_pages, table = problem
    with jax.enable_x64(True):
        out, lse = swa_latent_decode(q, kv_pages, widened(table), return_lse=True, **STATIC | {"window": window})
    assert (out.dtype, lse.dtype) == (jnp.float32, jnp.float32)


def test_numpy_arrays_are_taken_everywhere(problem):
    q, kv_pages, table = problem
    plain = np.asarray(q), np.asarray(kv_pages)
    np.testing.assert_array_equal(
        swa_latent_decode(*plain, table, **STATIC), swa_latent_decode(q, kv_pages, table, **STATIC)
    )
    latent = np.ones((3, 1, 8), np.float32)
    np.testing.assert_array_equal(write_latent(plain[1], table, latent), write_latent(kv_pages, table, latent))
    starts = np.zeros(3, np.int64)
    rows, _ = jax.jit(lambda table: gather_latent(plain[1], table, starts, 4))(table)
    np.testing.assert_array_equal(rows, gather_latent(kv_pages, table, starts, 4)[0])


def test_a_start_past_int32_does_not_wrap(problem):
    _, kv_pages, table = problem
    with pytest.raises(ValueError, match="starts must fit int32"):
        gather_latent(kv_pages, table, np.full(3, 2**32), 4)
    with jax.enable_x64(True):
        _, valid = gather_latent(kv_pages, table, jnp.full(3, 2**32, jnp.int64), 4)
    assert not valid.any()


def test_counts_of_no_rows_may_be_an_empty_list(problem):
    q, kv_pages, table = problem
    assert swa_latent_decode(q[:0], kv_pages, table.pad_rows(0), counts=[], **STATIC).shape == (0, 8, 2, 5)


@pytest.mark.parametrize("scale", [None, "0.3", np.array([0.3])])
def test_a_scale_that_is_no_number_is_named(problem, scale):
    with pytest.raises(ValueError, match="scale must be a number"):
        swa_latent_decode(*problem, **STATIC | {"scale": scale})


def test_weakly_typed_tables_do_not_trace_a_step_twice():
    traces = []

    @jax.jit
    def step(pool, table):
        traces.append(1)
        grown = extend(pool, table, 1)
        return grown.pool, grown.table

    pool, table = PagePool.create(8), PageTable(jnp.full((2, 3), -1), jnp.full(2, 0))
    for _ in range(3):
        pool, table = step(pool, table)
    assert len(traces) == 1


def test_stacked_tables_and_pools_can_be_shown(problem):
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), (problem[2], PagePool.create(3)))
    assert repr(stacked[0]) == "PageTable(pages=int32[2, 3, 4], lengths=int32[2, 3], page_size=64)"
    assert stacked[0]._repr_html_() is None
    assert repr(stacked[1]) == "PagePool((2, 3))"


_SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec
from dots_jax import PagePool, PageTable, swa_latent_decode
from dots_jax.pages import extend

mesh, rows = Mesh(np.array(jax.devices()), "d"), PartitionSpec("d")
def step(pools, table, kv_pages, q):
    grown = extend(jax.tree.map(lambda leaf: leaf[0], pools), table, jnp.array([70, 3], jnp.int32))
    static = {"scale": 0.3, "v_dim": 5}
    decode = lambda window: swa_latent_decode(q, kv_pages[0], grown.table, window=window, **static)
    return grown.granted, decode(65), decode(None)

pools = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), PagePool.create(3))
q, kv_pages = jnp.ones((4, 1, 2, 8)), jnp.ones((2, 3, 64, 8))
sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=rows, out_specs=rows))
granted, *outs = sharded(pools, PageTable.empty(4, 100), kv_pages, q)
assert granted.all() and all(np.allclose(out, 1) for out in outs)
"""


def test_growth_and_decode_in_shard_map_over_two_devices():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run([sys.executable, "-c", _SHARDED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
