import jax.numpy as jnp
import pytest

from dots_jax.config import DotsConfig
from dots_jax.sizes import bytes_per_token, cache_bytes, window_pages

RELEASED = DotsConfig.dots3_note_prev()


def test_bytes_per_token():
    assert bytes_per_token(RELEASED.swa) == 2176
    assert bytes_per_token(RELEASED.full) == 1152
    assert bytes_per_token(RELEASED.swa, jnp.float32) == 4352


def test_public_calculator_known_answer():
    sizes = cache_bytes(RELEASED, 1024, swa_tokens=512)
    assert sizes.full + sizes.swa == 52_101_120
    assert sizes.index == 1_757_184
    assert sizes.total == 53_858_304


def test_steady_state_of_a_request():
    assert cache_bytes(RELEASED, 2000).swa == cache_bytes(RELEASED, 500_000).swa == 33 * 576 * 2176
    assert cache_bytes(RELEASED, 2000).swa / 2**20 == pytest.approx(39.4, abs=0.05)
    with_draft_layer = cache_bytes(RELEASED, 2000).swa * 34 / 33
    assert with_draft_layer / 2**20 == pytest.approx(40.6, abs=0.05)
    assert cache_bytes(RELEASED, 10).swa == 33 * 10 * 2176


@pytest.mark.parametrize(("window", "queries", "pages"), [(513, 1, 9), (513, 4, 10), (1, 1, 1), (64, 1, 2), (65, 1, 2)])
def test_window_pages_equals_the_worst_alignment(window, queries, pages):
    span = window + queries - 1
    worst = max((start + span - 1) // 64 - start // 64 + 1 for start in range(64))
    assert window_pages(window, queries) == worst == pages


def test_bad_sizes():
    with pytest.raises(ValueError, match="context: expected at least 0 tokens, got -1"):
        cache_bytes(RELEASED, -1)
    with pytest.raises(ValueError, match="window: expected at least 1, got 0"):
        window_pages(0)
