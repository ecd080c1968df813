"""Keys of full pages: a chain of SHA-256 digests over token ids.

A page's key stands for its own tokens and all tokens before it, so two requests share exactly the keys of their common
prefix. Digest of page c: SHA-256 over the 32 raw bytes of page c-1's digest (none for the first page), then each token
id as four little-endian bytes. A partly filled last page has no key.
"""

import hashlib
import operator
from typing import Any

import numpy as np


def page_keys(token_ids: Any, page_size: int, *, prior: str | None = None) -> list[str]:
    """Keys of the full pages of a token sequence.

    Args:
      token_ids: integers in 0 .. 2**32 - 1, shape `[tokens]`; or `[tokens, k]` when k ids identify one token (bigram
        keys), hashed in row order.
      page_size: tokens a page.
      prior: the key of the page just before `token_ids`, to continue a chain.

    Returns:
      `tokens // page_size` keys of 64 hexadecimal digits.

    Raises:
      ValueError: not integers, an id out of range (named with its place), a page size below 1, or a `prior` that is no
        key.
    """
    ids = _checked_ids(token_ids)
    try:
        size = operator.index(page_size)
    except TypeError:
        size = 0
    if size < 1:
        raise ValueError(f"page_size must be a positive integer; got {page_size!r}.")
    digest = b"" if prior is None else _raw(prior)
    keys = []
    for start in range(0, len(ids) - size + 1, size):
        digest = hashlib.sha256(digest + ids[start : start + size].tobytes()).digest()
        keys.append(digest.hex())
    return keys


def _checked_ids(token_ids: Any) -> np.ndarray:
    ids = np.asarray(token_ids)
    if ids.ndim not in (1, 2):
        raise ValueError(f"token_ids must have shape [tokens] or [tokens, k]; got {ids.shape}.")
    if not ids.size:
        return np.zeros(0, "<u4")
    if ids.dtype.kind not in "iu":
        raise ValueError(f"token_ids must be integers; got {ids.dtype}.")
    wrong = (ids < 0) | (ids > 0xFFFFFFFF)
    if wrong.any():
        place = np.unravel_index(np.argmax(wrong), ids.shape)
        raise ValueError(f"token_ids[{place[0]}] must fit four unsigned bytes; got {ids[place]}.")
    return np.ascontiguousarray(ids.astype("<u4"))


def _raw(prior: str) -> bytes:
    try:
        raw = bytes.fromhex(prior)
    except (TypeError, ValueError):
        raw = b""
    if len(raw) != 32:
        raise ValueError(f"prior must be a key of 64 hexadecimal digits; got {prior!r}.")
    return raw
