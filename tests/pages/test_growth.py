import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dots_jax.pages import PagePool, PageTable, check_pool, copy_pages, extend, fork, free_rows

ROWS, COLUMNS, PAGES, PAGE_SIZE = 8, 4, 16, 4  # one shape for nearly all tests here: each new one is a compilation


def rows(*values):
    return np.array([*values, *[0] * (ROWS - len(values))])


def parents(*values):
    return np.array([*values, *[-1] * (ROWS - len(values))])


def start(*lengths, without=0):
    """Rows of these lengths, page 0 first, and a second table whose first row keeps `without` further pages."""
    empty = PageTable.empty(ROWS, COLUMNS, PAGE_SIZE)
    pool, table, granted, _ = extend(PagePool.create(PAGES), empty, rows(*lengths))
    assert granted.all()
    per_row = [min(COLUMNS, max(0, without - COLUMNS * row)) for row in range(ROWS)]
    pool, others, granted, _ = extend(pool, empty, np.array(per_row) * PAGE_SIZE)
    assert granted.all()
    return pool, table, others


@pytest.mark.parametrize(
    ("lengths", "new", "num_pages", "granted", "free"),
    [
        ([0], [0], 1, [True], 1),
        ([0], [1], 1, [True], 0),
        ([0], [4], 1, [True], 0),
        ([0], [5], 1, [False], 1),
        ([4], [1], 1, [False], 0),
        ([3], [1], 1, [True], 0),  # fits the page it has
        ([0], [16], 8, [True], 4),
        ([0], [17], 8, [False], 8),  # too narrow a table, with pages to spare
        ([15], [2], 8, [False], 4),
        ([0, 0, 0], [9, 5, 4], 4, [True, False, True], 0),  # a refused row does not stop those after it
        ([0, 0, 0], [16, 8, 8], 3, [False, True, False], 1),
        ([0, 0, 0, 0], [8, 8, 0, 4], 1, [False, False, True, True], 0),
        ([0, 0], [2**31 - 1, 4], 8, [False, True], 7),
        ([9, 0], [2**31 - 9, 4], 8, [False, True], 4),  # the sum is past the end of int32
    ],
)
def test_growth_is_all_or_nothing_per_row_and_in_order(lengths, new, num_pages, granted, free):
    pool, table, others = start(*lengths, without=PAGES - num_pages)
    result = extend(pool, table, rows(*new))
    check_pool(result.pool, result.table, others)
    granted = np.array([*granted, *[True] * (ROWS - len(granted))])
    np.testing.assert_array_equal(result.granted, granted)
    assert int(result.pool.num_free) == free
    expected = np.where(granted, rows(*lengths) + rows(*new), rows(*lengths))
    np.testing.assert_array_equal(result.table.lengths, expected)
    np.testing.assert_array_equal((result.table.pages >= 0).sum(1), -(-expected // 4))
    np.testing.assert_array_equal(result.table.pages[~granted], table.pages[~granted])
    assert (result.copies == -1).all()


def test_every_page_of_the_pool_is_used_page_0_included():
    pool, table, _ = start(16, 16, 16, 16)
    assert sorted(np.asarray(table.pages[:4]).ravel().tolist()) == list(range(PAGES))
    assert int(pool.num_free) == 0


def test_a_shared_partial_page_is_replaced_and_copied():
    pool, table, _ = start(6)
    pool, child = fork(pool, table, parents(0))
    pool, child, granted, copies = extend(pool, child, rows(1))
    check_pool(pool, table, child)
    assert granted.all()
    assert copies[0].tolist() == [1, 2]
    assert child.pages[0].tolist() == [0, 2, -1, -1]  # the full page stays shared
    cache = copy_pages(jnp.arange(PAGES * 4, dtype=jnp.float32).reshape(PAGES, 4), copies)
    np.testing.assert_array_equal(cache[2], [4, 5, 6, 7])
    pool, table, _, copies = extend(pool, table, rows(1))  # alone by now
    assert (copies == -1).all()
    check_pool(pool, table, child)


def test_a_shared_full_last_page_is_not_replaced():
    pool, table, _ = start(8)
    pool, child = fork(pool, table, parents(0))
    pool, child, _, copies = extend(pool, child, rows(3))
    check_pool(pool, table, child)
    assert child.pages[0].tolist() == [0, 1, 2, -1]
    assert (copies == -1).all()


def test_growing_by_nothing_replaces_nothing():
    pool, table, _ = start(6)
    pool, child = fork(pool, table, parents(0))
    result = extend(pool, child, rows(0))
    assert result.granted.all()
    assert (result.copies == -1).all()
    np.testing.assert_array_equal(result.table.pages, child.pages)


def test_the_last_of_several_sharers_in_one_call_keeps_the_page():
    pool, table, _ = start(6)
    pool, children = fork(pool, table, parents(0, 0, 0))
    pool, table = free_rows(pool, table, np.ones(ROWS, bool))
    pool, children, granted, copies = extend(pool, children, rows(1, 1, 1))
    check_pool(pool, table, children)
    assert granted.all()
    np.testing.assert_array_equal(copies[:3], [[1, 2], [1, 3], [-1, -1]])
    np.testing.assert_array_equal(children.pages[:3, 1], [2, 3, 1])


def test_a_sharer_that_is_refused_goes_on_holding_the_page():
    # Two free pages. Row 0 wants three and gets none, so it still shares page 1 when row 1 is served.
    pool, table, others = start(6, without=12)
    pool, children = fork(pool, table, parents(0, 0))
    pool, table = free_rows(pool, table, np.ones(ROWS, bool))
    pool, children, granted, copies = extend(pool, children, rows(10, 6))
    check_pool(pool, table, children, others)
    assert granted[:2].tolist() == [False, True]
    assert copies[:2].tolist() == [[-1, -1], [1, 14]]


def test_a_replacement_counts_among_the_pages_a_row_needs():
    pool, table, others = start(6, without=13)
    pool, child = fork(pool, table, parents(0))
    refused = extend(pool, child, rows(3))  # one column and one replacement, one page free
    assert not refused.granted[0]
    check_pool(refused.pool, table, refused.table, others)
    assert extend(pool, child, rows(2)).granted.all()


def by_hand(table, row, **changes):
    pages, lengths = changes.get("pages"), changes.get("length")
    return PageTable(
        table.pages if pages is None else table.pages.at[row].set(jnp.array(pages)),
        table.lengths if lengths is None else table.lengths.at[row].set(lengths),
        table.page_size,
    )


def test_an_absent_partial_page_stays_absent():
    pool, table, _ = start(0)
    pool, table, _, _ = extend(pool, by_hand(table, 0, length=6), rows(4))
    check_pool(pool, table)
    assert table.pages[0].tolist() == [-1, -1, 0, -1]
    assert int(table.lengths[0]) == 10


def test_entries_past_the_length_are_kept_unless_another_entry_holds_them():
    pool, table, _ = start(8)
    shortened = by_hand(table, 0, length=3)  # without rollback
    result = extend(pool, shortened, rows(6))
    check_pool(result.pool, result.table)
    assert result.table.pages[0].tolist() == [0, 1, 2, -1]
    pool, child = fork(pool, table, parents(0))
    blocked = extend(pool, shortened, rows(6, 1))
    assert blocked.granted[:2].tolist() == [False, True]
    check_pool(blocked.pool, blocked.table, child)


def test_ids_outside_the_pool_count_as_absent():
    pool, table, others = start(4, without=13)
    odd = by_hand(table, 0, pages=[0, 99, -5, 16])
    pool, grown, granted, _ = extend(pool, odd, rows(8))
    check_pool(pool, grown, others)
    assert granted.all()
    assert grown.pages[0].tolist() == [0, 14, 15, 16]  # column 3 was not reached


def test_negative_growth_is_refused_and_a_traced_one_is_not_granted():
    pool, table, _ = start(6, 2)
    with pytest.raises(ValueError, match=r"row 1: new_tokens must not be negative \(new_tokens -3\)"):
        extend(pool, table, rows(1, -3))
    result = jax.jit(extend)(pool, table, rows(1, -3))
    assert result.granted.tolist() == [True, False] + [True] * 6
    assert result.table.lengths[:2].tolist() == [7, 2]
    with pytest.raises(ValueError, match="must not be negative"):  # a constant inside a trace is still known
        jax.jit(lambda p, t: extend(p, t, rows(1, -3)))(pool, table)


@pytest.mark.parametrize(
    ("new", "error", "says"),
    [
        ([1], ValueError, r"new_tokens .* expected shape \(8,\), got \(1,\)"),
        ([[1, 2]], ValueError, r"got \(1, 2\)"),
        ([1.5] * 8, TypeError, "new_tokens must have an integer dtype, got float64"),
        ([True] * 8, TypeError, "got bool"),
        ([2**31, 1], ValueError, "new_tokens must fit int32, got values from 1 to 2147483648"),
    ],
)
def test_new_tokens_are_checked(new, error, says):
    with pytest.raises(error, match=says):
        extend(PagePool.create(PAGES), PageTable.empty(ROWS, COLUMNS), new)


def one_row_at_a_time(pool, table, new):
    """The definition of a batch's growth: each row served alone, after those before it."""
    granted, copies = [], []
    for row in range(ROWS):
        pool, table, ok, pairs = extend(pool, table, np.where(np.arange(ROWS) == row, new, 0))
        granted.append(bool(ok[row]))
        copies.append(np.asarray(pairs[row]))
    return pool, table, granted, copies


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_is_served_as_if_one_row_at_a_time(seed):
    rng = np.random.default_rng(seed)
    pool, table, _ = start(*rng.integers(0, 9, 3))
    pool, children = fork(pool, table, rng.integers(0, 3, ROWS))
    new = rng.integers(0, 11, ROWS)
    batch = extend(pool, children, new)
    check_pool(batch.pool, table, batch.table)
    pool, children, granted, copies = one_row_at_a_time(pool, children, new)
    np.testing.assert_array_equal(batch.granted, granted)
    np.testing.assert_array_equal(batch.table.lengths, children.lengths)
    np.testing.assert_array_equal(batch.table.pages, children.pages)
    np.testing.assert_array_equal(batch.copies, copies)
    assert int(batch.pool.num_free) == int(pool.num_free)


def test_empty_tables_are_tables():
    pool = PagePool.create(2)
    assert extend(pool, PageTable.empty(0, 3), []).granted.shape == (0,)
    np.testing.assert_array_equal(extend(pool, PageTable.empty(2, 0), [0, 1]).granted, [True, False])


@pytest.mark.parametrize("shape", [(8,), (8, 4, 3)])
def test_copies_move_whole_pages_and_skip_absent_ones(shape):
    cache = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    copies = np.array([[-1, -1], [2, 5], [-1, 3], [4, -1], [8, 1], [1, 8], [0, 7]])
    expected = cache.copy()
    expected[[5, 7]] = cache[[2, 0]]
    np.testing.assert_array_equal(copy_pages(jnp.asarray(cache), copies), expected)
    np.testing.assert_array_equal(copy_pages(jnp.asarray(cache), np.zeros((0, 2), np.int32)), cache)
    with pytest.raises(ValueError, match=r"\[rows, 2\], got \(3,\)"):
        copy_pages(jnp.asarray(cache), np.zeros(3, np.int32))
