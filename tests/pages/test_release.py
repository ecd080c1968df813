import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dots_jax.pages import PagePool, PageTable, check_pool, extend, fork, free_rows, release_outside_window, rollback

ROWS = 3  # one shape for all tests here: each new one is a compilation


def rows(*values):
    return np.array([*values, *[0] * (ROWS - len(values))])


def grown(*lengths):
    start = PageTable.empty(ROWS, 16)
    pool, table, granted, _ = extend(PagePool.create(64), start, rows(*lengths))
    assert granted.all()
    return pool, table


@pytest.mark.parametrize(
    ("next_query", "first_kept"),
    [(0, 0), (512, 0), (575, 0), (576, 1), (577, 1), (639, 1), (640, 2), (2**31 - 1, 11), (-1, 0), (-(2**31), 0)],
)
def test_a_page_goes_when_its_last_token_leaves_the_smallest_query(next_query, first_kept):
    pool, table = grown(642)
    pool, table = release_outside_window(pool, table, 513, jnp.array([next_query, 0, 0]))
    check_pool(pool, table)
    np.testing.assert_array_equal(np.asarray(table.pages[0]) >= 0, [first_kept <= c < 11 for c in range(16)])
    assert int(table.lengths[0]) == 642


def test_release_after_rejected_drafts_keeps_what_the_next_query_sees():
    # Rows 638..641 were verified and 3 rejected, so 639 is next, not 642: key 127 is seen, page 1 stays.
    pool, table = grown(642)
    pool, table = rollback(pool, table, rows(639))
    pool, table = release_outside_window(pool, table, 513, rows(639))
    assert np.flatnonzero(np.asarray(table.pages[0]) >= 0).tolist() == list(range(1, 10))
    check_pool(pool, table)


def test_release_takes_any_window():
    pool, table = grown(64 * 8)
    assert (release_outside_window(pool, table, None, rows(512))[1].pages == table.pages).all()
    assert (release_outside_window(pool, table, 2**31 - 1, rows(512))[1].pages == table.pages).all()
    _, alone = release_outside_window(pool, table, 1, rows(512))  # a query that sees only itself
    assert (alone.pages == -1).all()
    traced = jax.jit(release_outside_window)(pool, table, 129, rows(512))[1]
    assert np.flatnonzero(np.asarray(traced.pages[0]) >= 0).tolist() == [6, 7]
    with pytest.raises(ValueError, match="window must be at least 1 and fit int32, got 0"):
        release_outside_window(pool, table, 0, rows(512))
    with pytest.raises(TypeError, match=r"window must be an integer, got 513\.0"):
        release_outside_window(pool, table, 513.0, rows(512))


@pytest.mark.parametrize(("length", "kept"), [(200, 4), (193, 4), (192, 3), (129, 3), (128, 2), (1, 1), (0, 0)])
def test_rollback_gives_up_pages_wholly_past_the_new_length(length, kept):
    pool, table = grown(200, 70)
    pool, shorter = rollback(pool, table, rows(length, 70))
    check_pool(pool, shorter)
    assert int((shorter.pages[0] >= 0).sum()) == kept
    np.testing.assert_array_equal(shorter.lengths, rows(length, 70))
    np.testing.assert_array_equal(shorter.pages[1], table.pages[1])


def test_rollback_refuses_what_is_no_rollback():
    pool, table = grown(200, 70)
    with pytest.raises(ValueError, match=r"row 1: rollback cannot make a row longer \(length 71, present 70\)"):
        rollback(pool, table, rows(200, 71))
    with pytest.raises(ValueError, match=r"row 0: a length must not be negative \(length -1\)"):
        rollback(pool, table, rows(-1, 70))
    new_pool, after = jax.jit(rollback)(pool, table, rows(-1, 71))
    np.testing.assert_array_equal(after.pages, table.pages)
    np.testing.assert_array_equal(after.lengths, table.lengths)
    check_pool(new_pool, after)


def test_freeing_rows_gives_back_everything_of_theirs_and_nothing_else():
    pool, table = grown(200, 70, 5)
    pool, after = free_rows(pool, table, [True, False, True])
    check_pool(pool, after)
    np.testing.assert_array_equal(after.lengths, [0, 70, 0])
    assert int(pool.num_free) == 62
    pool, after = free_rows(pool, after, np.ones(3, bool))
    assert int(pool.num_free) == 64


def test_a_page_held_twice_is_freed_once_and_only_by_the_last_holder():
    pool, table = grown(70)
    pool, twins = fork(pool, table, [0, 0, -1])
    pool, table = free_rows(pool, table, [True] * 3)
    check_pool(pool, table, twins)
    assert int(pool.num_free) == 62
    pool, twins = free_rows(pool, twins, [True] * 3)  # both holders in one call
    check_pool(pool, table, twins)
    assert int(pool.num_free) == 64


def test_entries_outside_the_pool_and_double_frees_do_not_damage_it():
    pool, table = grown(70)
    odd = np.full((ROWS, 16), -1)
    odd[0, :4] = 64, -7, 2**31 - 1, -(2**31)
    new_pool, after = free_rows(pool, PageTable(jnp.asarray(odd), jnp.full(ROWS, 256)), [True, False, True])
    check_pool(new_pool, table)
    assert (after.pages[0] == -1).all()
    freed, _ = free_rows(pool, table, [True] * 3)
    again, empty = free_rows(freed, table, [True] * 3)  # an old table: its pages are free by now
    check_pool(again, empty)
    assert int(again.num_free) == 64


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda p, t: rollback(p, t, [1, 2]), ValueError, r"lengths .* expected shape \(3,\), got \(2,\)"),
        (lambda p, t: rollback(p, t, [1.0, 2.0, 3.0]), TypeError, "lengths must have an integer dtype, got float64"),
        (lambda p, t: release_outside_window(p, t, 4, [[1, 2]]), ValueError, r"next_query .* got \(1, 2\)"),
        (lambda p, t: free_rows(p, t, [1, 0]), TypeError, "mask must be boolean, got int64"),
        (lambda p, t: free_rows(p, t, [True]), ValueError, r"mask .* expected shape \(3,\), got \(1,\)"),
    ],
)
def test_arguments_are_checked_before_tracing(call, error, says):
    pool, table = grown(200, 70)
    with pytest.raises(error, match=says):
        call(pool, table)


def test_under_donation_the_pool_is_updated_in_place():
    # A copy of the pool's counts or free list would show as temporary memory that grows with the pool.
    def temporary_bytes(num_pages):
        arguments = PagePool.create(num_pages), PageTable.empty(ROWS, 16), np.ones(ROWS, bool)
        memory = jax.jit(free_rows, donate_argnums=(0, 1)).lower(*arguments).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    assert temporary_bytes(1 << 16) == temporary_bytes(1 << 10)
