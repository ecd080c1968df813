"""What a compiled step of the XLA implementation needs beside its arguments."""

import jax
import jax.numpy as jnp
import pytest

from dots_jax import DotsConfig, PageTable, swa_latent_decode

GEOMETRY = DotsConfig.dots3_note_prev().swa


def temporary_bytes(batch, steps, dtype, *, window=GEOMETRY.window, table_width=16, num_pages=256):
    def step(q, kv_pages, table):
        return swa_latent_decode(
            q, kv_pages, table, window=window, scale=0.0625, v_dim=GEOMETRY.kv_lora_rank, implementation="xla"
        )

    table = jax.eval_shape(lambda: PageTable(jnp.zeros((batch, table_width), jnp.int32), jnp.zeros(batch, jnp.int32)))
    q = jax.ShapeDtypeStruct((batch, steps, GEOMETRY.num_heads, GEOMETRY.latent_dim), dtype)
    kv_pages = jax.ShapeDtypeStruct((num_pages, 64, GEOMETRY.latent_dim), dtype)
    memory = jax.jit(step).lower(q, kv_pages, table).compile().memory_analysis()
    return memory.temp_size_in_bytes


@pytest.mark.parametrize(("batch", "steps"), [(1, 1), (8, 4), (32, 1)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_no_temporary_beyond_the_window_and_its_scores(batch, steps, dtype):
    tokens = GEOMETRY.window + steps - 1
    window_bytes = batch * tokens * GEOMETRY.latent_dim * jnp.dtype(dtype).itemsize
    score_bytes = batch * steps * GEOMETRY.num_heads * tokens * 4
    assert temporary_bytes(batch, steps, dtype) <= 1.5 * (window_bytes + score_bytes)


def test_memory_depends_neither_on_the_context_nor_on_the_pool():
    small = temporary_bytes(2, 1, jnp.bfloat16)
    assert temporary_bytes(2, 1, jnp.bfloat16, num_pages=16_384) == small
    assert temporary_bytes(2, 1, jnp.bfloat16, table_width=8192) <= small + 2 * 8192 * 4  # a row of the table
    full = temporary_bytes(2, 1, jnp.bfloat16, window=None, table_width=1024)
    assert temporary_bytes(2, 1, jnp.bfloat16, window=None, table_width=8192) <= full + 2 * 8192 * 4
