"""Whole lives of pages: random steps against a model in plain Python, and the loop of speculative decoding."""

import dataclasses
from collections import Counter

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dots_jax.pages import PagePool, PagePoolError, PageTable, check_pool, copy_pages, extend, fork, free_rows, rollback
from dots_jax.pages import release_outside_window as release

ROWS, COLUMNS, PAGES, PAGE_SIZE = 4, 5, 20, 4
PER_ROW = st.lists(st.integers(0, 9), min_size=ROWS, max_size=ROWS)
WHICH = st.integers(0, 1)

traces = Counter()


def counted(function):
    """Jits a function and counts its traces: the shapes never change here, so there is one for each."""

    def traced(*args):
        traces[function.__name__] += 1
        return function(*args)

    return jax.jit(traced)


EXTEND, ROLLBACK, RELEASE, FORK, FREE = (counted(f) for f in (extend, rollback, release, fork, free_rows))
COPY = counted(copy_pages)


class PageLives(RuleBasedStateMachine):
    """Two tables of one pool, and for each row the tokens that must be readable.

    The cache holds in each token's place a number that nothing else was ever written as, so a page that was reused
    while somebody still held it, or that was not copied in time, shows as a wrong number.
    """

    def __init__(self):
        super().__init__()
        self.pool = PagePool.create(PAGES)
        self.tables = [PageTable.empty(ROWS, COLUMNS, PAGE_SIZE) for _ in range(2)]
        self.cache = jnp.zeros((PAGES, PAGE_SIZE), jnp.int32)
        self.tokens = [[[] for _ in range(ROWS)] for _ in range(2)]  # numbers, None where released
        self.holes = [[set() for _ in range(ROWS)] for _ in range(2)]  # columns whose page is absent
        self.written = 0

    def free_now(self):
        held = {p for table in self.tables for p in np.asarray(table.pages).ravel().tolist() if p >= 0}
        return PAGES - len(held)

    @initialize(lengths=st.lists(st.integers(3, 9), min_size=ROWS, max_size=ROWS))
    def prompts(self, lengths):
        self.extend(0, lengths)

    @rule(which=WHICH, new=st.lists(st.integers(0, 2), min_size=ROWS, max_size=ROWS))
    def extend_a_little(self, which, new):
        self.extend(which, new)

    @rule(which=WHICH)
    def extend_by_a_step_of_drafts(self, which):
        self.extend(which, [3] * ROWS)

    @rule(which=WHICH, new=PER_ROW)
    def extend(self, which, new):
        free, expected = self.free_now(), []
        holders = Counter(p for t in self.tables for p in np.asarray(t.pages).ravel().tolist() if p >= 0)
        before = np.asarray(self.tables[which].pages)
        for row, count in enumerate(new):  # the model: one row after the other
            length = len(self.tokens[which][row])
            need = -(-(length + count) // PAGE_SIZE) - -(-length // PAGE_SIZE)
            tail = int(before[row, length // PAGE_SIZE]) if length % PAGE_SIZE else -1
            replaces = count > 0 and tail >= 0 and holders[tail] > 1
            fits = length + count <= COLUMNS * PAGE_SIZE and need + replaces <= free
            expected.append(fits or count == 0)
            if fits:
                free -= need + replaces
                holders[tail] -= replaces
        self.pool, self.tables[which], granted, copies = EXTEND(self.pool, self.tables[which], jnp.array(new))
        assert granted.tolist() == expected
        self.cache = COPY(self.cache, copies)
        self.write(which, np.where(granted, new, 0))

    def write(self, which, new):
        pages, cache = np.asarray(self.tables[which].pages), np.asarray(self.cache).copy()
        for row, count in enumerate(new):
            for _ in range(count):
                self.written += 1
                column, offset = divmod(len(self.tokens[which][row]), PAGE_SIZE)
                absent = column in self.holes[which][row]
                assert (pages[row, column] < 0) == absent
                if not absent:
                    cache[pages[row, column], offset] = self.written
                self.tokens[which][row].append(None if absent else self.written)
        self.cache = jnp.asarray(cache)

    @rule(which=WHICH, by=PER_ROW)
    def rollback(self, which, by):
        rows = self.tokens[which]
        lengths = [max(0, len(tokens) - less) for tokens, less in zip(rows, by, strict=True)]
        self.pool, self.tables[which] = ROLLBACK(self.pool, self.tables[which], jnp.array(lengths))
        self.tokens[which] = [tokens[:length] for tokens, length in zip(rows, lengths, strict=True)]
        self.close_holes(which)

    def close_holes(self, which):
        for row, tokens in enumerate(self.tokens[which]):
            self.holes[which][row] = {c for c in self.holes[which][row] if c * PAGE_SIZE < len(tokens)}

    @rule(which=WHICH, longer=st.lists(st.integers(1, 3), min_size=ROWS, max_size=ROWS))
    def rollback_that_is_none(self, which, longer):
        lengths = self.tables[which].lengths + jnp.array(longer)
        self.pool, self.tables[which] = ROLLBACK(self.pool, self.tables[which], lengths)

    @rule(which=WHICH, window=st.integers(1, 9), back=PER_ROW)
    def release(self, which, window, back):
        next_query = [len(tokens) - less for tokens, less in zip(self.tokens[which], back, strict=True)]
        self.pool, self.tables[which] = RELEASE(self.pool, self.tables[which], window, jnp.array(next_query))
        for row, position in enumerate(next_query):
            for column in range(COLUMNS):
                if PAGE_SIZE * (column + 1) <= position - (window - 1):
                    self.holes[which][row].add(column)
                    span = slice(column * PAGE_SIZE, (column + 1) * PAGE_SIZE)
                    self.tokens[which][row][span] = [None] * PAGE_SIZE
        self.close_holes(which)

    @rule(parents=st.lists(st.integers(-1, ROWS), min_size=ROWS, max_size=ROWS))
    def fork(self, parents):
        """The second table is finished and replaced by children of the first."""
        self.free(1, [True] * ROWS)
        self.pool, self.tables[1] = FORK(self.pool, self.tables[0], jnp.array(parents))
        known = [p if 0 <= p < ROWS else None for p in parents]
        self.tokens[1] = [[] if p is None else list(self.tokens[0][p]) for p in known]
        self.holes[1] = [set() if p is None else set(self.holes[0][p]) for p in known]

    @rule(which=WHICH, mask=st.lists(st.booleans(), min_size=ROWS, max_size=ROWS))
    def free(self, which, mask):
        self.pool, self.tables[which] = FREE(self.pool, self.tables[which], jnp.array(mask))
        for row in np.flatnonzero(mask):
            self.tokens[which][row], self.holes[which][row] = [], set()

    @precondition(lambda self: self.written % 7 == 3)
    @rule()
    def an_older_value_stays_readable(self):
        """Steps taken from here and thrown away leave the values of before as they were."""
        pool, table, _, copies = EXTEND(self.pool, self.tables[0], jnp.array([5] * ROWS))
        COPY(self.cache, copies).at[:].set(-1)
        FREE(pool, table, jnp.ones(ROWS, bool))

    @invariant()
    def pool_and_tables_agree(self):
        check_pool(self.pool, *self.tables)
        assert int(self.pool.num_free) == self.free_now()

    @invariant()
    def every_row_reads_its_own_tokens(self):
        cache = np.asarray(self.cache)
        for which, table in enumerate(self.tables):
            pages = np.asarray(table.pages)
            assert table.lengths.tolist() == [len(tokens) for tokens in self.tokens[which]]
            for row, tokens in enumerate(self.tokens[which]):
                for position, token in enumerate(tokens):
                    page = pages[row, position // PAGE_SIZE]
                    read = None if page < 0 else cache[page, position % PAGE_SIZE]
                    assert read == token or (token is None and page >= 0), (which, row, position)
                assert (pages[row, -(-len(tokens) // PAGE_SIZE) :] == -1).all()


def run(machine, examples, steps):
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


def test_random_lives_keep_pool_tables_and_contents_in_step():
    run(PageLives, examples=12, steps=40)
    assert set(traces.values()) == {1}, traces


@pytest.mark.long
def test_thousands_of_random_steps():
    run(PageLives, examples=150, steps=60)
    assert set(traces.values()) == {1}, traces


class WithoutCopies(PageLives):
    """A planted mistake: the copies of copy-on-write are not applied."""

    @rule(which=WHICH, new=PER_ROW)
    def extend(self, which, new):
        self.pool, self.tables[which], granted, _ = EXTEND(self.pool, self.tables[which], jnp.array(new))
        self.write(which, np.where(granted, new, 0))


class ForkForgets(PageLives):
    """A planted mistake: a fork whose new holders are not counted."""

    @rule(parents=st.lists(st.integers(-1, ROWS), min_size=ROWS, max_size=ROWS))
    def fork(self, parents):
        before = self.pool.holders
        super().fork(parents)
        self.pool = dataclasses.replace(self.pool, holders=jnp.minimum(self.pool.holders, jnp.maximum(before, 1)))


@pytest.mark.parametrize(
    ("machine", "error", "says"),
    [(WithoutCopies, AssertionError, r"\(\d, \d, \d\)"), (ForkForgets, PagePoolError, "wrongly")],
)
def test_the_machine_finds_planted_mistakes(machine, error, says):
    with pytest.raises(error, match=says):
        run(machine, examples=20, steps=40)


def test_speculative_decoding_holds_the_live_window_and_gives_everything_back():
    window, drafts, rows, columns, steps = 513, 4, 3, 64, 1000
    rng = np.random.default_rng(5)
    step_traces = []

    @jax.jit
    def step(pool, table, accepted):
        step_traces.append(1)
        pool, table, granted, _ = extend(pool, table, jnp.full(rows, drafts))
        pool, table = rollback(pool, table, table.lengths - drafts + accepted)
        return *release(pool, table, window, table.lengths), granted

    pool, table = PagePool.create(rows * 11), PageTable.empty(rows, columns)
    peak, lengths = 0, np.zeros(rows)
    for _ in range(steps):
        pool, table, granted = step(pool, table, jnp.asarray(rng.integers(1, drafts + 1, rows)))
        assert granted.all()
        lengths = np.asarray(table.lengths)
        live = -(-lengths // 64) - np.maximum(0, lengths - (window - 1)) // 64
        np.testing.assert_array_equal((table.pages >= 0).sum(1), live)
        peak = max(peak, int(live.max()))
        check_pool(pool, table)
    assert lengths.min() > 2000
    assert peak in (9, 10)
    assert len(step_traces) == 1
    pool, table = free_rows(pool, table, np.ones(rows, bool))
    check_pool(pool, table)
    assert int(pool.num_free) == pool.num_pages


def test_a_pool_of_another_size_takes_effect_under_the_same_jitted_function():
    grow = jax.jit(extend)
    table = PageTable.empty(4, 4, 4)
    for num_pages in (2, 5, 2):
        pool, grown, granted, _ = grow(PagePool.create(num_pages), table, jnp.full(4, 4))
        assert int(granted.sum()) == min(4, num_pages)
        assert int(pool.num_free) == max(0, num_pages - 4)
        check_pool(pool, grown)


def test_an_old_table_with_the_cache_of_its_time_stays_readable():
    pool, table, _, _ = extend(PagePool.create(2), PageTable.empty(2, 2, 4), [8, 0])
    cache = jnp.arange(8.0).reshape(2, 4)
    later, after = free_rows(pool, table, [True, False])
    later, after, granted, _ = extend(later, after, [0, 8])  # takes the same two pages
    new_cache = cache.at[after.pages[1]].set(-1.0)
    assert granted.all()
    np.testing.assert_array_equal(cache[table.pages[0]].ravel(), np.arange(8.0))
    assert (new_cache == -1).all()
    check_pool(pool, table)
    check_pool(later, after)
