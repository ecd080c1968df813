import jax.numpy as jnp
import pytest
from hosts import F1_GLOBAL, F1_SWA, T1

from dots_jax.host import KVSpec, LatentSpec


def test_t1_sizes():
    assert (T1.k_token_stride, T1.v_token_stride) == (16, 24)
    assert (T1.k_bytes_per_token, T1.v_bytes_per_token, T1.bytes_per_token) == (48, 72, 120)
    assert (T1.k_page_bytes, T1.v_page_bytes, T1.page_bytes) == (96, 144, 240)


def test_mimo_v2_sizes():
    assert (F1_GLOBAL.k_token_stride, F1_GLOBAL.v_token_stride) == (1536, 1024)
    assert (F1_GLOBAL.k_bytes_per_token, F1_GLOBAL.v_bytes_per_token) == (13824, 9216)
    assert F1_GLOBAL.bytes_per_token == 23040
    assert (F1_GLOBAL.k_page_bytes, F1_GLOBAL.v_page_bytes) == (884736, 589824)
    assert (F1_SWA.k_token_stride, F1_SWA.v_token_stride) == (3072, 2048)
    assert (F1_SWA.k_bytes_per_token, F1_SWA.v_bytes_per_token, F1_SWA.bytes_per_token) == (119808, 79872, 199680)


@pytest.mark.parametrize(("dtype", "total"), [(jnp.bfloat16, 5760), (jnp.float8_e4m3fn, 2880), (jnp.float8_e5m2, 2880)])
def test_one_head_of_four_ranks(dtype, total):
    spec = KVSpec(9, 1, 192, 128, dtype=dtype)
    itemsize = jnp.dtype(dtype).itemsize
    assert (spec.k_token_stride, spec.v_token_stride, spec.bytes_per_token) == (192 * itemsize, 128 * itemsize, total)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("widths", [(192, 128), (128, 192), (128, 128)])
def test_each_side_has_its_own_stride(widths, heads):
    spec = KVSpec(5, heads, *widths)
    assert spec.k_token_stride == heads * widths[0] * 2
    assert spec.v_token_stride == heads * widths[1] * 2
    assert spec.k_bytes_per_token == 5 * spec.k_token_stride
    if widths[0] == widths[1]:
        assert spec.token_stride == spec.k_token_stride
    else:
        with pytest.raises(AttributeError, match=rf"head_dim {widths[0]} and v_head_dim {widths[1]}"):
            _ = spec.token_stride


def test_v_width_defaults_to_k_width():
    assert KVSpec(1, 1, 128) == KVSpec(1, 1, 128, 128, 64, jnp.bfloat16)
    assert KVSpec(1, 1, 128).is_symmetric


def test_latent_sizes():
    spec = LatentSpec(5, 576)
    assert (spec.token_stride, spec.k_token_stride, spec.v_token_stride) == (1152, 1152, 0)
    assert spec.bytes_per_token == spec.k_bytes_per_token == 5760
    assert LatentSpec(5, 656, dtype=jnp.uint8).bytes_per_token == 3280


def test_specs_are_hashable_and_compare_by_value():
    assert hash(KVSpec(3, 2, 4, 6, dtype="float16")) == hash(KVSpec(3, 2, 4, 6, dtype=jnp.float16))
    assert KVSpec(3, 2, 4, 6, dtype="float16") == KVSpec(3, 2, 4, 6, dtype=jnp.float16)
    assert KVSpec(3, 2, 4, 6) != KVSpec(3, 2, 6, 4)


@pytest.mark.parametrize("name", ["num_layers", "num_heads", "head_dim", "v_head_dim", "page_size"])
def test_sizes_must_be_positive_integers(name):
    sizes = {"num_layers": 3, "num_heads": 2, "head_dim": 4, "v_head_dim": 6, "page_size": 2}
    with pytest.raises(ValueError, match=rf"KVSpec\.{name}: expected at least 1, got 0"):
        KVSpec(**(sizes | {name: 0}))
    with pytest.raises(TypeError, match=rf"KVSpec\.{name}: expected an integer, got 2\.0"):
        KVSpec(**(sizes | {name: 2.0}))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"LatentSpec\.latent_dim"):
        LatentSpec(3, -1)


@pytest.mark.parametrize("dtype", [None, object, "V3", "S3", "datetime64[s]", [("a", "f4")], "float99", 3])
def test_a_dtype_of_anything_but_numbers_is_refused(dtype):
    with pytest.raises(TypeError):
        KVSpec(1, 1, 4, dtype=dtype)
    with pytest.raises(TypeError):
        LatentSpec(1, 4, dtype=dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "uint8", "bool", jnp.float8_e4m3fn])
def test_every_dtype_of_numbers_is_taken(dtype):
    assert KVSpec(1, 1, 4, dtype=dtype).dtype == LatentSpec(1, 4, dtype=dtype).dtype == jnp.dtype(dtype)


@pytest.mark.parametrize("dtype", [jnp.int2, jnp.int4, jnp.uint4, jnp.float4_e2m1fn])
def test_numbers_narrower_than_a_byte_are_refused(dtype):
    """Devices pack them differently, so a page of them would have no defined bytes."""
    with pytest.raises(TypeError, match=f"expected numbers of whole bytes, got {jnp.dtype(dtype)}"):
        KVSpec(1, 1, 4, dtype=dtype)
    with pytest.raises(TypeError, match="store packed bytes as uint8"):
        LatentSpec(1, 4, dtype=dtype)
