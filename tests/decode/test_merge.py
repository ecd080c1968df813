"""Combining partial attention results."""

import jax.numpy as jnp
import numpy as np
import pytest
from decode_kit import assert_close, make_problem

from dots_jax.decode import merge_attention


def test_parts_over_disjoint_pages_make_the_whole():
    whole = make_problem([300, 130, 0], steps=2, heads=3, dtype=jnp.float32, window=None)
    parts = []
    for columns in (slice(0, 1), slice(1, 3), slice(3, 5)):
        pages = np.full_like(whole.pages, -1)
        pages[:, columns] = whole.pages[:, columns]
        parts.append(whole.but(pages=pages).decode())
    out, lse = merge_attention(jnp.stack([o for o, _ in parts]), jnp.stack([x for _, x in parts]))
    assert_close((np.asarray(out), np.asarray(lse)), whole.reference())


def test_parts_that_saw_nothing_count_for_nothing():
    outs = jnp.array([[[1.0, 2.0]], [[jnp.nan, jnp.inf]]])
    out, lse = merge_attention(outs, jnp.array([[0.5], [-jnp.inf]]))
    np.testing.assert_array_equal(out, [[1.0, 2.0]])
    np.testing.assert_array_equal(lse, [0.5])
    out, lse = merge_attention(outs, jnp.full((2, 1), -jnp.inf))
    np.testing.assert_array_equal(out, [[0.0, 0.0]])
    assert np.isneginf(lse).all()


def test_dtype_and_large_values():
    out, lse = merge_attention(jnp.ones((2, 1, 4), jnp.bfloat16), jnp.array([[1e4], [-1e4]]))
    assert out.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    np.testing.assert_array_equal(lse, [1e4])


@pytest.mark.parametrize(("outs", "lses"), [((2, 3, 4), (3, 3)), ((0, 3, 4), (0, 3)), ((4,), ())])
def test_refusals(outs, lses):
    with pytest.raises(ValueError, match="outs must be"):
        merge_attention(jnp.zeros(outs), jnp.zeros(lses))
