import jax.numpy as jnp
import numpy as np
import pytest

from dots_jax.pages import PagePool, PageTable, check_pool, extend, fork, free_rows, release_outside_window


def start(lengths):
    return extend(PagePool.create(16), PageTable.empty(len(lengths), 4, 4), lengths)[:2]


def test_new_rows_share_their_parents_pages_and_the_old_table_stays_in_use():
    pool, table = start([6, 16])
    new_pool, children = fork(pool, table, jnp.array([1, 0, 1]))
    check_pool(new_pool, table, children)
    np.testing.assert_array_equal(children.pages, np.asarray(table.pages)[[1, 0, 1]])
    np.testing.assert_array_equal(children.lengths, [16, 6, 16])
    assert int(new_pool.num_free) == int(pool.num_free)
    check_pool(pool, table)  # the old value of the pool still goes with the old table


def test_a_parent_that_does_not_exist_makes_an_empty_row():
    pool, table = start([6, 16])
    pool, children = fork(pool, table, [-1, 2, 0])
    check_pool(pool, table, children)
    np.testing.assert_array_equal(children.lengths, [0, 0, 6])
    assert (children.pages[:2] == -1).all()
    pool, none = fork(pool, PageTable.empty(0, 4, 4), [0])
    assert int(none.lengths[0]) == 0


def test_released_pages_stay_absent_and_freeing_the_children_gives_nothing_away():
    pool, table = start([16])
    pool, table = release_outside_window(pool, table, 4, [12])
    pool, children = fork(pool, table, [0, 0])
    assert (children.pages[:, :2] == -1).all()
    pool, children = free_rows(pool, children, [True, True])
    check_pool(pool, table, children)
    assert int(pool.num_free) == 14


def test_parents_are_checked():
    pool, table = start([6, 16])
    with pytest.raises(TypeError, match="parents must have an integer dtype, got float64"):
        fork(pool, table, [0.0])
    with pytest.raises(ValueError, match=r"parents must have shape \[new rows\], got \(1, 1\)"):
        fork(pool, table, [[0]])
