"""Calls outside `jit`, as in a notebook: only the first of a shape compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dots_jax import PagePool, PageTable, gather_latent, merge_attention, swa_latent_decode, write_latent
from dots_jax.host import DeviceKV, KVSpec, allocate_host_kv
from dots_jax.pages import copy_pages, extend, fork, free_rows, release_outside_window, rollback, swa_table_from_slots

COMPILED = "/jax/core/compile/backend_compile_duration"
SPEC = KVSpec(2, 2, 4, 6, page_size=2, dtype=jnp.float16)


def decode(implementation, window, rows=5, columns=12, width=16):
    def call(seed):
        table = PageTable(jnp.full((rows, columns), seed), jnp.full(rows, 150 + seed))
        q, kv_pages = jnp.full((rows, 1, 2, width), seed, jnp.bfloat16), jnp.ones((4, 64, width), jnp.bfloat16)
        return swa_latent_decode(
            q, kv_pages, table, window=window, scale=0.1, v_dim=width // 2, implementation=implementation
        )

    return call


def on_pages(function):
    def call(seed):
        pool, table, _, _ = extend(PagePool.create(8), PageTable.empty(2, 4), jnp.array([65 + seed, 3]))
        return function(pool, table, seed)

    return call


def on_cache(function):
    def call(seed):
        table = PageTable(jnp.array([[seed, 1]]), jnp.array([70 + seed]))
        return function(jnp.ones((4, 64, 8)), table, seed)

    return call


def on_host(function):
    def call(seed):
        device = DeviceKV(*([jnp.full((8, 2, width), seed, jnp.float16)] * 2 for width in (4, 6)))
        host = allocate_host_kv(SPEC, 4, layout="page_first").backup(device, [4, 5], [2 * seed, 2 * seed + 1])
        return function(host, device, seed)

    return call


CALLS = {
    "decode xla, rows in groups": decode("xla", 513),
    "decode xla, block by block": decode("xla", None, columns=70),
    "decode by default": decode(None, 513),
    "decode interpret": decode("interpret", 65, rows=1, width=256),
    "write_latent": on_cache(lambda kv, table, seed: write_latent(kv, table, jnp.full((1, 2, 8), seed))),
    "gather_latent": on_cache(lambda kv, table, seed: gather_latent(kv, table, jnp.array([seed]), 5)),
    "merge_attention": lambda seed: merge_attention(jnp.full((2, 3, 4), seed), jnp.zeros((2, 3))),
    "extend": on_pages(lambda pool, table, seed: pool),
    "rollback": on_pages(lambda pool, table, seed: rollback(pool, table, jnp.array([seed, 0]))),
    "release_outside_window": on_pages(lambda pool, table, seed: release_outside_window(pool, table, 1 + seed, 60)),
    "fork": on_pages(lambda pool, table, seed: fork(pool, table, [seed])),
    "free_rows": on_pages(lambda pool, table, seed: free_rows(pool, table, [seed == 0, True])),
    "copy_pages": lambda seed: copy_pages(jnp.ones((4, 64, 8)), jnp.array([[seed, 2]])),
    "swa_table_from_slots": lambda seed: swa_table_from_slots(jnp.full((1, 128), seed), jnp.arange(9) * 64, 100),
    "backup": on_host(lambda host, device, seed: host),
    "load": on_host(lambda host, device, seed: host.load(device, seed, [4, 5], [0, 1])),
    "set_page": on_host(lambda host, device, seed: host.set_page(seed, np.full(SPEC.page_bytes, seed, np.uint8))),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_second_call_compiles_nothing(name):
    compiled = []

    def note(event, duration, **_):
        if event == COMPILED:
            compiled.append(duration)

    jax.block_until_ready(CALLS[name](0))
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        jax.block_until_ready(CALLS[name](1))
        assert compiled == []
        jax.jit(lambda x: x + len(name))(1.0)  # the listener does hear of a compilation
        assert len(compiled) == 1
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
