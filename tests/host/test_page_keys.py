"""Keys of pages: golden digests, the chain, and what is refused."""

import hashlib
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dots_jax.host.page_keys import page_keys

FIRST = "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72"
SECOND = "4ebfa8a1f3c341517621838c6e1b9aa350307e3f00b3cbd1a07ef740f54396d6"


@pytest.mark.parametrize("make", [list, np.array, jnp.array, lambda ids: np.array(ids, np.uint64)[:]])
def test_golden_digests(make):
    assert page_keys(make([1, 2, 3, 4, 5, 6, 7, 8]), 4) == [FIRST, SECOND]


def test_a_partial_page_has_no_key():
    assert page_keys([1, 2, 3, 4, 5, 6, 7], 4) == [FIRST]
    assert page_keys([1, 2, 3], 4) == []
    assert page_keys([], 4) == []


def test_a_chain_can_be_continued():
    assert page_keys([5, 6, 7, 8], 4, prior=FIRST) == [SECOND]


def test_two_ids_a_token_are_both_hashed():
    digest = hashlib.sha256(struct.pack("<4I", 1, 2, 3, 2**32 - 1)).hexdigest()
    assert page_keys([[1, 2], [3, 2**32 - 1]], 2) == [digest]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 8), st.integers(0, 39))
def test_keys_follow_the_prefix(ids, size, place):
    keys = page_keys(ids, size)
    digest = b""
    for c, key in enumerate(keys):
        page = ids[c * size : (c + 1) * size]
        digest = hashlib.sha256(digest + struct.pack(f"<{size}I", *page)).digest()
        assert key == digest.hex()
    if place < len(ids):
        changed = [*ids]
        changed[place] ^= 1
        same = [a == b for a, b in zip(keys, page_keys(changed, size), strict=True)]
        assert same == [c < place // size for c in range(len(keys))]


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([1, -1], {}, r"token_ids\[1\] must fit four unsigned bytes; got -1"),
        ([1, 2**32], {}, r"token_ids\[1\] must fit four unsigned bytes; got 4294967296"),
        ([1.0, 2.0], {}, "token_ids must be integers; got float64"),
        (7, {}, r"shape \[tokens\] or \[tokens, k\]; got \(\)"),
        ([1, 2], {"page_size": 0}, "page_size must be a positive integer; got 0"),
        ([1, 2], {"page_size": 2.0}, "page_size must be a positive integer; got 2.0"),
        ([1, 2], {"prior": "abc"}, "prior must be a key of 64 hexadecimal digits; got 'abc'"),
        ([1, 2], {"prior": "ab"}, "prior must be a key"),
    ],
)
def test_bad_tokens_are_refused(ids, options, message):
    with pytest.raises(ValueError, match=message):
        page_keys(ids, **{"page_size": 2, **options})
