import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dots_jax.pages import PageTable


@pytest.mark.parametrize(
    ("pages", "lengths", "page_size", "error", "says"),
    [
        (
            np.zeros((2, 3), np.float32),
            np.zeros(2, np.int32),
            64,
            TypeError,
            "pages must have an integer dtype, got float32",
        ),
        (np.zeros((2, 3), np.int32), np.zeros(2, bool), 64, TypeError, "lengths must have an integer dtype, got bool"),
        (np.zeros(3, np.int32), np.zeros(3, np.int32), 64, ValueError, r"\[rows, columns\], got \(3,\)"),
        (np.zeros((2, 3), np.int32), np.zeros((2, 1), np.int32), 64, ValueError, r"\[rows\], got \(2, 1\)"),
        (np.zeros((2, 3), np.int32), np.zeros(4, np.int32), 64, ValueError, "pages has 2 rows, but lengths has 4"),
        (np.zeros((2, 3), np.int32), np.zeros(2, np.int32), 0, ValueError, "power of two, got 0"),
        (np.zeros((2, 3), np.int32), np.zeros(2, np.int32), -64, ValueError, "power of two, got -64"),
        (np.zeros((2, 3), np.int32), np.zeros(2, np.int32), 48, ValueError, "power of two, got 48"),
        (np.zeros((2, 3), np.int32), np.zeros(2, np.int32), 64.0, TypeError, "page_size must be an integer, got 64.0"),
        (np.full((1, 1), 2**40), np.zeros(1, np.int32), 64, ValueError, "pages must fit int32"),
    ],
)
def test_construction_refuses(pages, lengths, page_size, error, says):
    with pytest.raises(error, match=says):
        PageTable(pages, lengths, page_size)


def test_leaves_are_int32_arrays_whatever_integers_came_in():
    table = PageTable([[3, -1]], np.array([70], np.int64))  # pyright: ignore[reportArgumentType]
    assert table.page_size == 64
    assert (table.pages.dtype, table.lengths.dtype) == (jnp.int32, jnp.int32)
    assert isinstance(table.pages, jax.Array)


def test_page_size_is_static_and_unflattening_never_checks():
    table = PageTable.empty(2, 3, 16)
    leaves, tree = jax.tree.flatten(table)
    assert len(leaves) == 2
    assert jax.tree.unflatten(tree, ["a", "b"]).page_size == 16
    assert "str" in repr(jax.tree.unflatten(tree, ["a", "b"]))
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), table)
    assert jax.vmap(lambda one: one.lengths + 1)(stacked).shape == (2, 2)


def test_pad_rows_appends_empty_rows_and_keeps_planned_lengths():
    table = PageTable(jnp.array([[5, 6], [7, -1]]), jnp.array([100, 3]))
    wider = table.pad_rows(4)
    np.testing.assert_array_equal(wider.pages, [[5, 6], [7, -1], [-1, -1], [-1, -1]])
    np.testing.assert_array_equal(wider.lengths, [100, 3, 0, 0])
    np.testing.assert_array_equal(wider.pad_rows(2).pages, table.pages)
    np.testing.assert_array_equal(table.pad_rows(1).lengths, [100])
    assert jax.jit(lambda value: value.pad_rows(4))(table).pages.shape == (4, 2)
    with pytest.raises(ValueError, match="-1 rows"):
        table.pad_rows(-1)


def test_repr_shows_rows_as_people_read_them():
    table = PageTable(jnp.array([[-1, -1, 17, 4], [9, -1, -1, -1], [-1, -1, -1, -1]]), jnp.array([216, 64, 0]))
    text = repr(table)
    assert "row 0: 216 tokens  [-- x2, 17, 4 (24/64)]" in text
    assert "row 1: 64 tokens  [9]" in text
    assert "row 2: 0 tokens  []" in text
    assert "84 more rows" in repr(PageTable.empty(100, 2))


def test_repr_of_traced_and_donated_tables_does_not_fail():
    seen = []
    table = PageTable.empty(2, 3)
    jax.jit(lambda value: seen.append(repr(value)))(table)
    assert "int32[2, 3]" in seen[0]
    taken = jax.jit(lambda value: jax.tree.map(lambda leaf: leaf + 1, value), donate_argnums=0)
    gone = PageTable.empty(2, 3)
    taken(gone)
    assert "PageTable(" in repr(gone)
