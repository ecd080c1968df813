import numpy as np
import pytest

from dots_jax.config import DotsConfig
from dots_jax.workload.content import latent_index
from dots_jax.workload.loop import LoopSpec
from dots_jax.workload.mirror import Mirror

SPEC = LoopSpec(DotsConfig.dots3_note_prev().swa, layers=2, draft_tokens=4, implementation=None)


@pytest.mark.parametrize(
    ("length", "pages"),
    [(0, 0), (1, 1), (64, 1), (65, 2), (575, 9), (576, 8), (577, 9), (639, 9), (640, 8), (100_001, 9)],
)
def test_pages_held_follow_the_release_rule(length, pages):
    assert Mirror(SPEC, 1).pages_held(np.array([length])).tolist() == [pages]


def test_pages_held_do_not_grow_with_the_context():
    held = Mirror(SPEC, 1).pages_held(np.arange(600, 600 + 64 * 50))
    assert set(held.tolist()) == {8, 9}


def test_rejected_drafts_are_overwritten_by_the_step_after():
    mirror = Mirror(SPEC, batch=2)
    mirror.admitted(1, context=1000, step=0)
    mirror.decoded(np.array([0, 1000]), np.array([False, True]), step=1)  # writes 1000..1003, keeps 1000 and 1001
    mirror.decoded(np.array([0, 1002]), np.array([False, True]), step=2)  # writes 1002..1005
    got = mirror.keys(1, request_id=7, first=998, end=1006, layer=1)
    written_by = [0, 0, 1, 1, 2, 2, 2, 2]
    sevens = np.full(8, 7, np.uint32)
    expected = latent_index(sevens, np.arange(998, 1006, dtype=np.uint32), np.array(written_by, np.uint32), 1)
    assert got.tolist() == expected.tolist()


def test_contents_differ_by_request_position_step_and_layer():
    one = np.ones(1, np.uint32)
    base = latent_index(one, one, one, 1)
    assert base != latent_index(one * 2, one, one, 1)
    assert base != latent_index(one, one * 2, one, 1)
    assert base != latent_index(one, one, one * 2, 1)
    assert base != latent_index(one, one, one, 2)
