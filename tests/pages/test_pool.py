import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dots_jax.pages import (
    PagePool,
    PagePoolError,
    PageTable,
    check_pool,
    extend,
    fork,
    free_rows,
    release_outside_window,
    rollback,
)


@pytest.mark.parametrize("size", [0, -1, 2**31])
def test_a_pool_has_at_least_one_page_and_ids_that_fit_int32(size):
    with pytest.raises(ValueError, match=f"num_pages must be at least 1 and fit int32, got {size}"):
        PagePool.create(size)


@pytest.mark.parametrize("size", [2.0, "2", True, None])
def test_the_number_of_pages_is_an_integer(size):
    with pytest.raises(TypeError, match="num_pages must be an integer"):
        PagePool.create(size)


def test_a_new_pool_reserves_nothing():
    pool = PagePool.create(np.int64(3))  # pyright: ignore[reportArgumentType]
    check_pool(pool)
    assert (pool.num_pages, int(pool.num_free), repr(pool)) == (3, 3, "PagePool(3 of 3 pages free, 0 shared)")


def grown():
    pool, table, _, _ = extend(PagePool.create(8), PageTable.empty(2, 4, 4), [6, 9])
    return pool, table


def replace(pool, **changes):
    return dataclasses.replace(pool, **changes)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda p, t: (PagePool.create(8), [t]), "page 0 is both free and held: table 0 row 0 column 0"),
        (lambda p, t: (p, []), "page 0 is held by nobody and not free either; the pool counts 1 holders"),
        (
            lambda p, t: (p, [t, t]),
            "page 0 is counted wrongly: the pool says 1 holders, there are 2: table 0 .* table 1",
        ),
        (lambda p, t: (replace(p, holders=p.holders.at[3].set(2)), [t]), "page 3 is counted wrongly: .* 2 .* are 1"),
        (lambda p, t: (replace(p, holders=p.holders.at[6].set(1)), [t]), "page 6 is counted wrongly: .* 1 .* are 0"),
        (lambda p, t: (replace(p, free_pages=p.free_pages.at[0].set(6)), [t]), "page 6 is on the free list 2 times"),
        (lambda p, t: (replace(p, free_pages=p.free_pages.at[0].set(8)), [t]), "page 8 is on the free list of a pool"),
        (lambda p, t: (replace(p, num_free=p.num_free - 1), [t]), "page 5 is held by nobody and not free"),
        (lambda p, t: (replace(p, num_free=jnp.int32(9)), [t]), "9 of its 8 pages are free"),
        (lambda p, t: (fork(p, t, [0])[0], [t]), "page 0 is counted wrongly: the pool says 2 holders, there are 1"),
    ],
)
def test_check_pool_names_the_page(damage, says):
    pool, table = grown()
    check_pool(pool, table)
    pool, tables = damage(pool, table)
    with pytest.raises(PagePoolError, match=says):
        check_pool(pool, *tables)


def test_entries_outside_the_pool_count_as_absent():
    pool, table = grown()
    check_pool(pool, table, PageTable(jnp.array([[8, -2, 2**31 - 1]]), jnp.array([12]), 4))


def test_a_pool_is_checked_when_built():
    pool = PagePool.create(4)
    with pytest.raises(ValueError, match="num_free must have 0 dimensions"):
        replace(pool, num_free=pool.holders)
    with pytest.raises(ValueError, match=r"free_pages has shape \(4,\), but holders has \(3,\)"):
        replace(pool, holders=pool.holders[:3])
    with pytest.raises(TypeError, match="holders must have an integer dtype"):
        replace(pool, holders=pool.holders.astype(jnp.float32))


CALLS = {
    "extend": lambda pool, table: extend(pool, table, 1),
    "release_outside_window": lambda pool, table: release_outside_window(pool, table, 513, 0),
    "rollback": lambda pool, table: rollback(pool, table, 0),
    "fork": lambda pool, table: fork(pool, table, [0]),
    "free_rows": lambda pool, table: free_rows(pool, table, [True]),
    "check_pool": check_pool,
}


@pytest.mark.parametrize("name", CALLS)
def test_exchanged_arguments_are_named(name):
    pool, table = PagePool.create(2), PageTable.empty(1, 1)
    with pytest.raises(TypeError, match="pool must be a PagePool, got PageTable"):
        CALLS[name](table, pool)
    with pytest.raises(TypeError, match="table must be a PageTable, got ArrayImpl"):
        CALLS[name](pool, table.pages)
