"""The decode against its definition: what every implementation must do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_kit import assert_close, make_problem, poison, uniform_problem, zero_unreadable
from hypothesis import given, settings
from hypothesis import strategies as st

from dots_jax.decode import swa_latent_decode, xla
from dots_jax.pages import PageTable

RAGGED = [0, 1, 63, 64, 65, 512, 513, 514, 576, 577, 640, 641]


@pytest.mark.parametrize(
    ("lengths", "window", "steps", "means"),
    [
        ([600], 513, 1, [343.0]),
        ([600], 512, 1, [343.5]),
        ([600], 514, 1, [342.5]),
        ([513], 513, 1, [256.0]),
        ([514], 513, 1, [257.0]),
        ([600], 513, 4, [340.0, 341.0, 342.0, 343.0]),
        ([600], None, 1, [299.5]),
    ],
)
def test_uniform_attention_averages_the_visible_positions(lengths, window, steps, means):
    problem = uniform_problem(lengths, window=window, steps=steps)
    for out, lse in (problem.decode(), problem.reference()):
        np.testing.assert_allclose(out[0, :, 0, 0], means, rtol=1e-6)
        if window is not None:
            np.testing.assert_allclose(lse[0, :, 0], np.log(window), rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "window", "steps"),
    [(jnp.bfloat16, window, steps) for window in (1, 64, 65, 513, None) for steps in (1, 4)]
    + [(jnp.float16, 513, 7), (jnp.float16, None, 1), (jnp.float32, 513, 7), (jnp.float32, 64, 4)],
)
def test_random_rows_agree_with_the_definition(dtype, window, steps):
    problem = make_problem(RAGGED, steps=steps, dtype=dtype, window=window)
    assert_close(problem.decode(), problem.reference())


def test_released_geometry():
    problem = make_problem([700, 3], steps=4, heads=64, width=1088, v_dim=1024)
    assert_close(problem.decode(), problem.reference())


@pytest.mark.parametrize("v_dim", [1, 47, 48])
def test_value_widths(v_dim):
    problem = make_problem([200, 65], v_dim=v_dim)
    assert_close(problem.decode(), problem.reference())


def test_long_window_in_blocks():
    lengths = [0, 1, xla.BLOCK_TOKENS, xla.BLOCK_TOKENS + 1, 9000]
    for window in (None, 5000):
        problem = make_problem(lengths, steps=3, dtype=jnp.float32, window=window, table_width=150)
        assert_close(poison(problem).decode(), problem.reference())


@pytest.mark.parametrize("window", [1, 64, 513, None])
def test_nobody_reads_what_it_may_not(window):
    problem = make_problem(RAGGED, steps=4, window=window)
    for got, expected in zip(poison(problem).decode(), zero_unreadable(problem).decode(), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_rows_of_length_zero_are_zero_among_poison():
    problem = make_problem([0, 70, 0], num_pages=5)
    out, lse = poison(problem).decode()
    assert not out[[0, 2]].any()
    assert np.isneginf(lse[[0, 2]]).all()
    assert_close((out, lse), problem.reference())


def test_more_queries_than_tokens():
    problem = make_problem([2], steps=4, heads=1, dtype=jnp.float32, window=4)
    out, lse = problem.decode()
    assert not out[0, :2].any()
    assert np.isneginf(lse[0, :2]).all()
    first = problem.kv_pages[problem.pages[0, 0], 0, : problem.v_dim]
    np.testing.assert_allclose(out[0, 2, 0], first, rtol=1e-6)
    assert_close((out, lse), problem.reference())


def test_absent_pages_are_not_page_zero():
    problem = make_problem([70], num_pages=4, dtype=jnp.float32)
    kv_pages = np.array(problem.kv_pages)
    kv_pages[0] = 1e4
    problem = problem.but(kv_pages=kv_pages, pages=np.array([[-1, 3]], np.int32))
    out, lse = problem.decode()
    assert_close((out, lse), problem.reference())
    assert np.abs(out).max() < 1
    only_page_3 = problem.but(pages=np.array([[3]], np.int32), lengths=np.array([6]), window=6)
    np.testing.assert_allclose(out, only_page_3.decode()[0], rtol=1e-6)


@pytest.mark.parametrize("page", [-(2**31), -2, -1, 4, 5, 2**31 - 1])
def test_page_ids_out_of_range_are_absent(page):
    problem = make_problem([130, 130], num_pages=8).but(pages=np.array([[0, page, 1], [2, 3, page]], np.int32))
    four = problem.but(kv_pages=problem.kv_pages[:4])
    assert_close(poison(four).decode(), four.reference())


def test_tokens_past_the_table_are_absent_and_rows_are_apart():
    problem = make_problem([132, 132], steps=4, table_width=2, dtype=jnp.float32)
    expected = problem.reference()
    assert_close(problem.decode(), expected)
    np.testing.assert_array_equal(problem.decode()[1][0], problem.but(lengths=np.array([132, 9])).decode()[1][0])
    spoilt = np.array(problem.kv_pages)
    spoilt[problem.pages[1]] = np.nan
    for got, clean in zip(problem.but(kv_pages=spoilt).decode(), problem.decode(), strict=True):
        np.testing.assert_array_equal(got[0], clean[0])


def test_lengths_far_past_the_table_see_nothing():
    problem = make_problem([100], steps=2).but(lengths=np.array([2**31 - 1]))
    out, lse = problem.decode()
    assert not out.any()
    assert np.isneginf(lse).all()


def test_pages_shared_between_rows_and_repeated_in_one():
    problem = make_problem([200, 200], num_pages=4).but(pages=np.array([[1, 1, 2, 1], [2, 1, 1, 0]], np.int32))
    assert_close(poison(problem).decode(), problem.reference())


def test_padding_rows_changes_no_bit():
    two = make_problem([600, 70], steps=4)
    four = two.but(
        q=np.concatenate([two.q, two.q]),
        pages=np.asarray(two.table.pad_rows(4).pages),
        lengths=np.asarray(two.table.pad_rows(4).lengths),
    )
    for got, expected in zip(four.decode(), two.decode(), strict=True):
        np.testing.assert_array_equal(got[:2], expected)
    assert np.isfinite(four.decode()[0]).all()


@pytest.mark.parametrize("counts", [[0, 1, 4, 2], [4, 4, 4, 4], [0, 0, 0, 0]])
def test_ragged_rows(counts):
    problem = make_problem([600, 64, 2, 577], steps=4, counts=np.array(counts, np.int32), window=65)
    out, lse = poison(problem).decode()
    assert_close((out, lse), problem.reference())
    for b, count in enumerate(counts):
        assert not out[b, count:].any()
        assert np.isneginf(lse[b, count:]).all()


def test_scores_of_ten_thousand():
    problem = make_problem([300], heads=4, dtype=jnp.float32)
    q = np.array(problem.q)
    q[..., 0] = [1e5, -1e5, 1e5, 0]
    kv_pages = np.array(problem.kv_pages)
    kv_pages[..., 0] = np.sign(kv_pages[..., 0])
    problem = problem.but(q=q, kv_pages=kv_pages, scale=0.1)
    assert_close(problem.decode(), problem.reference(), lse=1e-2)
    assert np.isfinite(problem.decode()[0]).all()


def test_two_runs_are_bit_identical():
    problem = make_problem(RAGGED, steps=4)
    for first, second in zip(problem.decode(), problem.decode(), strict=True):
        np.testing.assert_array_equal(first, second)


def test_empty_shapes():
    for problem in (
        make_problem([], table_width=2, num_pages=3),
        make_problem([5]).but(kv_pages=np.zeros((0, 64, 48), jnp.bfloat16)),
        make_problem([5]).but(pages=np.zeros((1, 0), np.int32)),
    ):
        out, lse = problem.decode()
        assert out.shape == (*problem.q.shape[:3], problem.v_dim)
        assert not out.any()
        assert np.isneginf(lse).all()


def plant_mistake(problem, mistake):
    """The problem that a wrong implementation would have solved."""
    if mistake == "oldest key dropped":
        return problem.but(window=problem.window - 1)
    if mistake == "window one too long":
        return problem.but(window=problem.window + 1)
    if mistake == "lengths off by one":
        return problem.but(lengths=problem.lengths - 1)
    if mistake == "value columns shifted":
        return problem.but(kv_pages=np.roll(problem.kv_pages, 1, axis=2), q=np.roll(problem.q, 1, axis=3))
    assert mistake == "columns of q shifted"
    return problem.but(q=np.roll(problem.q, 1, axis=3))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    "mistake",
    [
        "oldest key dropped",
        "window one too long",
        "lengths off by one",
        "value columns shifted",
        "columns of q shifted",
    ],
)
def test_the_comparison_notices_a_planted_mistake(mistake, dtype):
    problem = make_problem([700, 600], steps=4, heads=4, dtype=dtype)
    assert_close(problem.decode(), problem.reference())
    with pytest.raises(AssertionError):
        assert_close(plant_mistake(problem, mistake).decode(), problem.reference())


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.tuples(*[st.integers(0, 400)] * 3),
    steps=st.sampled_from([1, 3]),
    window=st.sampled_from([None, 1, 63, 64, 200]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_any_table_agrees_with_the_definition(lengths, steps, window, seed, data):
    problem = make_problem(
        lengths, steps=steps, window=window, seed=seed, table_width=5, num_pages=8, dtype=jnp.float32
    )
    entry = st.one_of(st.integers(-3, 9), st.sampled_from([-(2**31), 2**31 - 1]))
    row = st.tuples(*[entry] * 5)
    pages = np.array(data.draw(st.tuples(row, row, row)), np.int32)
    counts = np.array(data.draw(st.tuples(*[st.integers(0, steps)] * 3)), np.int32)
    problem = problem.but(pages=pages, counts=counts)
    assert_close(poison(problem).decode(), problem.reference())


def test_no_retrace_when_only_values_change():
    traces = []

    @jax.jit
    def step(q, kv_pages, table, counts):
        traces.append(1)
        return swa_latent_decode(q, kv_pages, table, window=65, scale=0.1, v_dim=32, counts=counts)

    for seed, lengths in enumerate(([1, 300], [300, 64], [0, 0])):
        problem = make_problem(lengths, seed=seed, table_width=5, num_pages=16)
        step(jnp.asarray(problem.q), jnp.asarray(problem.kv_pages), problem.table, jnp.ones(2, jnp.int32))
    assert len(traces) == 1
    bigger = make_problem([5, 5], table_width=5, num_pages=32)
    step(jnp.asarray(bigger.q), jnp.asarray(bigger.kv_pages), bigger.table, jnp.ones(2, jnp.int32))
    assert len(traces) == 2


def test_vmap_over_an_outer_axis():
    problems = [make_problem([90, 200], seed=seed, table_width=4, num_pages=9) for seed in range(3)]
    q, kv = (jnp.stack([jnp.asarray(getattr(p, name)) for p in problems]) for name in ("q", "kv_pages"))
    table = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[p.table for p in problems])
    out = jax.vmap(lambda *a: swa_latent_decode(*a, window=65, scale=0.0625, v_dim=32))(q, kv, table)
    for got, problem in zip(out, problems, strict=True):
        np.testing.assert_allclose(
            np.asarray(got.astype(jnp.float32)), problem.but(window=65).decode()[0], rtol=0, atol=1e-3
        )


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 11])
def test_any_number_of_rows_fits_the_groups_of_a_cpu(rows):
    assert xla.GROUP_TOKENS // 528 == 4
    problem = poison(make_problem((RAGGED * 2)[:rows], steps=4))
    assert_close(problem.decode(implementation="xla"), problem.reference())


def test_the_batched_form_for_wide_devices_agrees():
    # `platform_dependent` never lowers it on a CPU, so it is called as the other devices would.
    problem = poison(make_problem(RAGGED, steps=4))
    table = problem.table
    row = lambda q, pages, length, count: xla._decode_row(  # noqa: E731
        q, pages, length, count, kv_pages=jnp.asarray(problem.kv_pages), tokens=528, window=513, scale=0.0625, v_dim=32
    )
    counts = jnp.full(len(RAGGED), 4)
    out, lse = jax.jit(jax.vmap(row))(jnp.asarray(problem.q), table.pages, table.lengths, counts)
    assert_close((np.asarray(out.astype(jnp.float32)), np.asarray(lse)), problem.reference())


def test_table_is_an_ordinary_argument():
    table = PageTable(jnp.array([[0]]), jnp.array([3]))
    lowered = jax.jit(lambda q, kv, t: swa_latent_decode(q, kv, t, window=2, scale=1.0, v_dim=4)).lower(
        jnp.ones((1, 1, 1, 8)), jnp.ones((2, 64, 8)), table
    )
    assert lowered.compile() is not None
