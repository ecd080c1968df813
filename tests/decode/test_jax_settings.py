"""The decode, the cache and the page functions under JAX's strict settings and with arrays sharded by type."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dots_jax import PagePool, PageTable, gather_latent, merge_attention, swa_latent_decode, write_latent
from dots_jax.decode import swa_latent_decode_reference
from dots_jax.pages import copy_pages, extend, fork, free_rows, release_outside_window, rollback, swa_table_from_slots

STATIC = {"window": 65, "scale": 0.3, "v_dim": 128}
ROWS = jnp.array([3, 1], jnp.int32)
DESCRIPTION = jax.ShapeDtypeStruct((2, 2, 2, 192), jnp.bfloat16)
GROWN = extend(PagePool.create(9), PageTable.empty(2, 4), np.array([70, 3]))


def problem(columns=3):
    random = np.random.default_rng(0)
    q = jnp.asarray(random.standard_normal((2, 2, 2, 192)), jnp.bfloat16)
    kv_pages = jnp.asarray(random.standard_normal((9, 64, 192)), jnp.bfloat16)
    return q, kv_pages, PageTable(random.integers(0, 9, (2, columns), np.int32), [150, 70])


def decode(window=65, columns=3):
    arrays = problem(columns)
    got = swa_latent_decode(*arrays, **STATIC | {"window": window}, return_lse=True, implementation="xla")
    expected = swa_latent_decode_reference(*arrays, **STATIC | {"window": window})
    for value, reference in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.asarray(value, np.float32), reference, atol=0.03)


def on_cache(function):
    q, kv_pages, table = problem()
    return lambda: function(kv_pages, table, q[:, :, 0])


CALLS = {
    "decode": decode,
    "decode, full, block by block": lambda: decode(None, 70),
    "write_latent": on_cache(write_latent),
    "gather_latent": on_cache(lambda kv, table, _: gather_latent(kv, table, ROWS, 5)),
    "merge_attention": lambda: merge_attention(jnp.ones((2, 3, 4)), jnp.zeros((2, 3))),
    "extend": lambda: extend(GROWN.pool, GROWN.table, ROWS),
    "rollback": lambda: rollback(GROWN.pool, GROWN.table, ROWS),
    "release_outside_window": lambda: release_outside_window(GROWN.pool, GROWN.table, 5, ROWS),
    "fork": lambda: fork(GROWN.pool, GROWN.table, ROWS // 2),
    "free_rows": lambda: free_rows(GROWN.pool, GROWN.table, ROWS > 1),
    "copy_pages": lambda: copy_pages(problem()[1], GROWN.copies),
    "swa_table_from_slots": lambda: swa_table_from_slots(jnp.zeros((2, 128), jnp.int32), ROWS, ROWS),
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_relies_on_implicit_ranks_or_dtypes(name):
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        CALLS[name]()


def test_a_compiled_step_moves_nothing_between_host_and_device():
    q, kv_pages, table = problem()

    @jax.jit
    def step(q, kv_pages, table):
        kv_pages = write_latent(kv_pages, table, q[:, :, 0])
        return swa_latent_decode(q, kv_pages, table, **STATIC, return_lse=True), kv_pages

    step(q, kv_pages, table)
    with jax.transfer_guard("disallow"):
        step(q, kv_pages, table)


def test_bytes_that_nobody_sees_do_not_trip_the_search_for_nan():
    q, kv_pages, table = problem()
    hidden = PageTable(jnp.full_like(table.pages, -1), table.lengths)
    poison = jnp.full_like(kv_pages, jnp.nan)
    with jax.debug_nans(True):
        assert not swa_latent_decode(q, poison, hidden, **STATIC).any()


@pytest.mark.parametrize("field", [0, 1, 2])
def test_rows_or_pages_sharded_by_type_are_refused_with_the_way_out(field):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    arrays = [jax.device_put(array, NamedSharding(mesh, P())) for array in problem()]
    swa_latent_decode(*arrays, **STATIC)
    arrays[field] = jax.device_put(arrays[field], NamedSharding(mesh, P("x")))
    q, kv_pages, table = arrays
    with pytest.raises(NotImplementedError, match=r"explicit mesh axes x: call this in jax\.shard_map"):
        swa_latent_decode(*arrays, **STATIC)
    if field:
        with pytest.raises(NotImplementedError, match=r"explicit mesh axes x: call this in jax\.shard_map"):
            write_latent(kv_pages, table, q[:, :, 0])
    specs = tuple(P("x") if array is arrays[field] else P() for array in arrays)
    step = jax.shard_map(
        lambda *a: swa_latent_decode(*a, **STATIC), mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=False
    )
    np.testing.assert_array_equal(step(*arrays), swa_latent_decode(*problem(), **STATIC))


def test_heads_sharded_by_type_are_decoded_but_not_by_the_kernel():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    q, kv_pages, table = jax.device_put(problem(), NamedSharding(mesh, P()))
    plain = q[:, :1]
    q = jax.device_put(plain, NamedSharding(mesh, P(None, None, "x")))
    expected = swa_latent_decode(plain, kv_pages, table, **STATIC)
    np.testing.assert_array_equal(swa_latent_decode(q, kv_pages, table, **STATIC), expected)
    with pytest.raises(NotImplementedError, match=r"'interpret' cannot run: q or the cache is sharded over"):
        swa_latent_decode(q, kv_pages, table, **STATIC, implementation="interpret")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q": [1.0]}, TypeError, "q must be an array, got list"),
        ({"q": DESCRIPTION}, TypeError, "q must be an array, got ShapeDtypeStruct"),
        ({"kv_pages": None}, TypeError, "kv_pages must be an array, got NoneType"),
        ({"scale": 1j}, ValueError, r"scale must be a number, .*got 1j"),
        ({"scale": 10**400}, ValueError, "scale must be a number, finite and > 0 in float32"),
        ({"scale": 1e39}, ValueError, "scale must be a number, finite and > 0 in float32, got 1e.39"),
        ({"scale": 1e-46}, ValueError, "scale must be a number, finite and > 0 in float32, got 1e-46"),
        ({"v_dim": True}, ValueError, "v_dim must be an integer in 1..192.*got True"),
        ({"window": "65"}, ValueError, "window must be an integer >= 1.*got '65'"),
    ],
)  # fmt: skip
def test_what_is_no_array_or_no_number_is_named(change, error, words):
    q, kv_pages, table = problem()
    with pytest.raises(error, match=words):
        swa_latent_decode(**{"q": q, "kv_pages": kv_pages, "table": table} | STATIC | change)


def test_a_table_changed_leaf_by_leaf_is_read_as_int32_or_refused():
    q, kv_pages, table = problem()
    expected = swa_latent_decode(q, kv_pages, table, **STATIC)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.int64), table)
        np.testing.assert_array_equal(swa_latent_decode(q, kv_pages, wide, **STATIC), expected)
    with pytest.raises(TypeError, match="pages must have an integer dtype, got float32"):
        swa_latent_decode(q, kv_pages, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), table), **STATIC)
