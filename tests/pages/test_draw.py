import re

import jax
import jax.numpy as jnp

from dots_jax.pages import PageTable


def drawn(pages, lengths, page_size=64):
    shown = PageTable(jnp.array(pages), jnp.array(lengths), page_size)._repr_html_()
    assert shown is not None
    return shown


def test_the_drawing_says_what_each_page_holds():
    shown = drawn([[-1, 17, 4, -1], [9, 4, -1, -1]], [152, 70])
    assert "tokens 0 to 63: absent" in shown
    assert "page 17: tokens 64 to 127, 64 of 64'" in shown
    assert "page 4: tokens 128 to 151, 24 of 64, shared" in shown
    assert "#93c5fd 37%" in shown  # 24 of 64
    assert shown.count("3px double") == 2
    assert "1 shared pages" in shown
    assert "columns 0 to 2" in shown


def test_a_long_table_shows_its_first_rows_and_last_columns():
    shown = drawn([list(range(100))] * 40, [6400] * 40)
    assert shown.count("<tr>") == 17
    assert "columns 68 to 99" in shown
    assert re.search(r"<th[^>]*>68</th>", shown)
    assert not re.search(r"<th[^>]*>67</th>", shown)


def test_empty_tables_are_drawn_and_traced_ones_are_left_to_repr():
    assert "0 rows x 0 columns" in PageTable.empty(0, 0)._repr_html_()  # pyright: ignore[reportOperatorIssue]
    assert "0 tokens" in drawn([[-1, -1]], [0])
    seen = []
    jax.jit(lambda table: seen.append(table._repr_html_()))(PageTable.empty(1, 1))
    assert seen == [None]
