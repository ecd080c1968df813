import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hosts import LATENT, T1, bits, canonical, random_device, stacked, zeros_like

from dots_jax.host import KVSpec, LatentSpec, allocate_host_kv, with_drafts


@pytest.mark.parametrize("target", [T1, LATENT], ids=["asymmetric", "latent"])
def test_drafts_are_tail_layers_in_depth_order(target):
    draft = dataclasses.replace(target, num_layers=1)
    spec = with_drafts(target, draft, draft)
    assert spec.num_layers == 5
    assert spec.bytes_per_token == target.bytes_per_token + 2 * draft.bytes_per_token
    pools = [random_device(s, 8, seed=i) for i, s in enumerate((target, draft, draft))]
    packed = pools[0].append(*pools[1:])
    host = allocate_host_kv(spec, 4, layout="page_first").backup(packed, [0, 1, 6, 7], [4, 5, 2, 3])
    for side, source in zip(canonical(host), stacked(packed), strict=True):
        np.testing.assert_array_equal(side[[0, 1, 6, 7]], source[[4, 5, 2, 3]])
    # Each draft loads from its tail layer into its own pool of one layer.
    for depth in range(2):
        layer = target.num_layers + depth
        got = host.load(zeros_like(pools[1 + depth]), layer, [0, 1, 6, 7], [4, 5, 2, 3], device_layer=0)
        want = pools[1 + depth].layer(0)
        for a, b in zip(got, want, strict=True):
            if a is not None and b is not None:
                np.testing.assert_array_equal(bits(a)[2:6], bits(b)[2:6])
                assert not bits(a)[:2].any()
    with pytest.raises(ValueError, match="device_layer: expected 0 to 0, got 1"):
        host.load(pools[1], target.num_layers, [0, 1], [0, 1], device_layer=1)
    with pytest.raises(ValueError, match=r"device\.k: expected 5 layers, got 3"):
        host.backup(pools[0], [0, 1], [0, 1])


def test_packed_fp8_target_and_plain_draft_are_refused():
    target = LatentSpec(4, 656, dtype=jnp.uint8)
    with pytest.raises(ValueError, match="draft 0: expected latent_dim 656 like the target, got 576"):
        with_drafts(target, LatentSpec(1, 576, dtype=jnp.uint8))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 8}, "draft 1: expected head_dim 4 like the target, got 8"),
        ({"v_head_dim": 4}, "draft 1: expected v_head_dim 6 like the target, got 4"),
        ({"num_heads": 1}, "draft 1: expected num_heads 2"),
        ({"page_size": 4}, "draft 1: expected page_size 2"),
        ({"dtype": "bfloat16"}, "draft 1: expected dtype float16 like the target, got bfloat16"),
        ({"num_layers": 2}, "draft 1: expected num_layers 1, got 2"),
    ],
)
def test_any_difference_is_named(change, words):
    draft = dataclasses.replace(T1, num_layers=1)
    with pytest.raises(ValueError, match=words):
        with_drafts(T1, draft, dataclasses.replace(draft, **change))
    with pytest.raises(TypeError, match="draft 0: expected a LatentSpec like the target, got a KVSpec"):
        with_drafts(LATENT, draft)
    assert with_drafts(KVSpec(3, 2, 4, 6, 2, jnp.float16)) == T1
