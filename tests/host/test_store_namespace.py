"""Namespaces: equal for equal geometry, different for everything that changes what a page's bytes mean."""

import dataclasses

import jax.numpy as jnp
import pytest
from hosts import LATENT, T1

from dots_jax.host import KVSpec, LatentSpec
from dots_jax.host.store_namespace import describe_geometry, namespace_digest

CHANGES = {
    "dtype": dataclasses.replace(T1, dtype=jnp.bfloat16),
    "fp8 kind": dataclasses.replace(T1, dtype=jnp.float8_e4m3fn),
    "other fp8 kind": dataclasses.replace(T1, dtype=jnp.float8_e5m2),
    "k width": dataclasses.replace(T1, head_dim=5),
    "v width": dataclasses.replace(T1, v_head_dim=5),
    "widths swapped": dataclasses.replace(T1, head_dim=6, v_head_dim=4),
    "symmetric": dataclasses.replace(T1, v_head_dim=4),
    "heads": dataclasses.replace(T1, num_heads=1),
    "layers": dataclasses.replace(T1, num_layers=2),
    "page size": dataclasses.replace(T1, page_size=4),
    "latent": LATENT,
    "latent width": dataclasses.replace(LATENT, latent_dim=6),
    "latent layers": dataclasses.replace(LATENT, num_layers=2),
    "latent dtype": dataclasses.replace(LATENT, dtype=jnp.bfloat16),
}


def test_every_change_of_geometry_is_another_namespace():
    digests = {name: namespace_digest(spec) for name, spec in CHANGES.items()}
    digests["T1"] = namespace_digest(T1)
    assert len(set(digests.values())) == len(digests), digests


def test_equal_geometry_is_the_same_namespace():
    assert namespace_digest(KVSpec(3, 2, 4, 6, 2, "float16")) == namespace_digest(T1)
    assert namespace_digest(KVSpec(3, 2, 4, 4, 2, "float16")) == namespace_digest(KVSpec(3, 2, 4, None, 2, "float16"))


def test_model_and_rank_are_part_of_it_but_a_latent_page_belongs_to_all_ranks():
    options = [{}, {"model_name": "a"}, {"model_name": "b"}, {"rank": 0, "num_ranks": 2}, {"rank": 1, "num_ranks": 2}]
    assert len({namespace_digest(T1, **o) for o in options}) == 5
    assert len({namespace_digest(LATENT, **o) for o in options}) == 3


def test_a_digest_is_pinned():
    """What is stored today must be found by tomorrow's version."""
    spec = LatentSpec(2, 576)
    assert describe_geometry(spec, model_name="m") == {
        "format": 1,
        "model_name": "m",
        "num_layers": 2,
        "page_size": 64,
        "dtype": "bfloat16",
        "kind": "latent",
        "latent_dim": 576,
    }
    assert namespace_digest(spec, model_name="m") == "f17139624cf56ac18d6c854b8b5fec3521f26da5b5e70ed866a783068f5c279b"


def test_what_is_no_geometry_is_refused():
    with pytest.raises(TypeError, match="spec: expected a KVSpec or a LatentSpec, got dict"):
        namespace_digest({})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="model_name: expected a string, got int"):
        namespace_digest(T1, model_name=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="rank: expected 0 <= rank < num_ranks = 2, got 2"):
        namespace_digest(T1, rank=2, num_ranks=2)
