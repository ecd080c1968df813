"""What the kernel's entry refuses, picks and promises before anything runs on a device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.swa_latent_decode import Config, api, combine, decode, default_config, unsupported_reason
from pallas_kernels.swa_latent_decode.config import SMEM_BYTES_PER_BLOCK, choose_splits, window_pages
from pallas_kernels.swa_latent_decode.variants import variants

SERVED = {
    "batch": 128, "seq": 1, "heads": 64, "width": 1088, "v_dim": 1024, "page_size": 64, "window": 513, "num_pages": 9,
    "table_width": 12, "dtype": jnp.bfloat16,
}  # fmt: skip

EXPORTED_EVERY_TIME = (
    "column_split-d1088-h64-s1-w513",
    "column_split-d576-h128-s1-full-split8",
    "swapped-d1088-h8-s4-w513",
)


def test_served_shapes_are_supported():
    assert unsupported_reason(**SERVED) is None
    assert unsupported_reason(**{**SERVED, "width": 576, "v_dim": 512, "window": None, "heads": 128}) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": jnp.float32}, "float32 is not bfloat16 or float16"),
        ({"page_size": 32}, "page size 32 is not 64"),
        ({"heads": 129}, "129 heads are not in 1..128"),
        ({"seq": 9}, "9 query tokens per row are not in 1..8"),
        ({"width": 1152}, "row width 1152 is more than 1088"),
        ({"v_dim": 1000}, "v_dim 1000 is not a positive multiple of 128"),
        ({"width": 1056}, "the 32 columns after v_dim are not a multiple of 64"),
        ({"num_pages": 0}, "the cache has no pages"),
        ({"batch": 0}, "a batch of 0 rows is not in 1..65535"),
    ],
)
def test_unsupported_shapes_have_a_reason(change, words):
    reason = unsupported_reason(**{**SERVED, **change})
    assert reason is not None
    assert words in reason


def test_decode_raises_the_reason():
    q, kv_pages = jnp.zeros((1, 1, 8, 192)), jnp.zeros((1, 64, 192))
    with pytest.raises(ValueError, match="float32 is not bfloat16"):
        decode(q, kv_pages, jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32),
               window=1, scale=1.0, v_dim=128)  # fmt: skip


def test_decode_refuses_a_config_that_does_not_fit():
    shapes = ((1, 1, 64, 1088), (1, 64, 1088))
    q, kv_pages = (jnp.zeros(shape, jnp.bfloat16) for shape in shapes)
    table = jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32)
    config = Config("column_split", block_tokens=64)
    with pytest.raises(ValueError, match="bytes of shared memory, a block has 232448"):
        decode(q, kv_pages, *table, window=1, scale=1.0, v_dim=1024, config=config)


@pytest.mark.parametrize("value", [None, "", "4", "many"])
def test_too_few_simulation_threads_is_an_error_not_a_hang(monkeypatch, value):
    if value is None:
        monkeypatch.delenv("NPROC", raising=False)
    else:
        monkeypatch.setenv("NPROC", value)
    with pytest.raises(RuntimeError, match="NPROC=16 or more in the environment before jax is imported"):
        api.interpret_params(True)


def test_a_64_bit_mode_of_this_thread_alone_is_an_error_not_a_failure_in_a_callback(monkeypatch):
    monkeypatch.setenv("NPROC", "64")
    with jax.enable_x64(not jax.config.jax_enable_x64), pytest.raises(RuntimeError, match="one 64-bit mode on all"):
        api.interpret_params(True)
    api.interpret_params(True)


@pytest.mark.parametrize("devices", [1, 2])
def test_simulating_in_a_shard_map_needs_a_mesh_of_one_device(monkeypatch, devices):
    monkeypatch.setenv("NPROC", "64")
    reasons = []

    def one(x):
        reasons.append(api.cannot_simulate())
        return x

    spec = jax.sharding.PartitionSpec("x")
    mesh = jax.sharding.AbstractMesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    jax.eval_shape(jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec), jax.ShapeDtypeStruct((2,), "float32"))
    assert reasons == [
        None if devices == 1 else "simulating the kernel needs a mesh of one device, this shard_map has 2"
    ]


@pytest.mark.parametrize("value", [1.0, "2", None, True])
@pytest.mark.parametrize("field", ["splits", "stages", "tile_rows", "block_tokens"])
def test_config_takes_integers_alone(field, value):
    with pytest.raises(TypeError, match=f"{field} must be an integer, got {value!r}"):
        Config("swapped", **{field: value})


def test_config_takes_numpy_integers_and_decode_nothing_but_a_config():
    assert type(Config("swapped", splits=np.int64(2), tile_rows=8).splits) is int
    q, kv_pages = jnp.zeros((1, 1, 8, 192), jnp.bfloat16), jnp.zeros((1, 64, 192), jnp.bfloat16)
    table = jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32)
    with pytest.raises(TypeError, match="config must be a Config, got dict"):
        decode(q, kv_pages, *table, window=1, scale=1.0, v_dim=128, config={"plan": "swapped"})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"plan": "other"}, "plan must be one of"),
        ({"plan": "column_split", "splits": 0}, "splits must be in 1..65535, got 0"),
        ({"plan": "column_split", "stages": 3}, "an even number of stages"),
        ({"plan": "column_split", "tile_rows": 32}, "tiles of 64 rows"),
        ({"plan": "column_split", "block_tokens": 16}, "block_tokens must be 32 or 64"),
        ({"plan": "swapped", "tile_rows": 40}, "swapped needs tile_rows"),
    ],
)
def test_config_refuses(fields, words):
    with pytest.raises(ValueError, match=words):
        Config(**fields)


def test_default_configs_fit_shared_memory():
    for width, v_dim in ((1088, 1024), (576, 512), (192, 128), (1024, 1024), (832, 768)):
        for heads in (1, 8, 64, 128):
            config = default_config(4, 1, heads, width, v_dim, 513, 12, jnp.bfloat16)
            assert config.smem_bytes(width, v_dim) <= SMEM_BYTES_PER_BLOCK


def test_config_is_static():
    assert hash(Config("column_split")) == hash(dataclasses.replace(Config("column_split", splits=2), splits=1))


def test_window_pages():
    assert [window_pages(seq, 513, 100) for seq in (1, 2, 4)] == [9, 10, 10]
    assert window_pages(1, 1, 100) == 1
    assert window_pages(1, None, 7) == 7
    assert window_pages(4, 513, 3) == 3


def test_splits_fill_a_small_grid_and_leave_a_full_one_alone():
    assert choose_splits(units=1, blocks_per_tile=2, pages=9) > 1
    assert choose_splits(units=256, blocks_per_tile=2, pages=9) == 1
    assert choose_splits(units=1, blocks_per_tile=2, pages=1) == 1


def test_merging_splits_ignores_parts_without_keys():
    rng = np.random.default_rng(0)
    scores, values = rng.normal(size=(2, 5)), rng.normal(size=(2, 5, 3))
    outs = np.zeros((3, 1, 1, 1, 3), np.float32)
    lses = np.full((3, 1, 1, 1), -np.inf, np.float32)
    for part in range(2):
        weights = np.exp(scores[part])
        outs[part, 0, 0, 0] = weights / weights.sum() @ values[part]
        lses[part, 0, 0, 0] = np.log(weights.sum())
    out, lse = combine.merge_splits(jnp.asarray(outs), jnp.asarray(lses), jnp.float32)
    weights = np.exp(scores).ravel()
    np.testing.assert_allclose(out[0, 0, 0], weights / weights.sum() @ values.reshape(-1, 3), rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0, 0], np.log(weights.sum()), rtol=1e-6)
    out, lse = combine.merge_splits(jnp.zeros((2, 1, 1, 1, 3)), jnp.full((2, 1, 1, 1), -jnp.inf), jnp.float32)
    assert not np.asarray(out).any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, id=variant.name, marks=() if variant.name in EXPORTED_EVERY_TIME else pytest.mark.long)
        for variant in variants()
    ],
)
def test_exports_for_cuda_without_a_gpu(variant):
    exported = jax.export.export(jax.jit(variant.function), platforms=["cuda"])(*variant.arguments)
    out, lse = exported.out_avals
    batch, seq, heads, _ = variant.arguments[0].shape
    assert (out.shape[:3], lse.shape) == ((batch, seq, heads), (batch, seq, heads))
    assert (out.dtype, lse.dtype) == (variant.arguments[0].dtype, jnp.float32)
