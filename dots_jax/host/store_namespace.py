"""Which pages may ever meet: a digest over everything that gives a page's bytes their meaning."""

import hashlib
import json
from typing import Any

from dots_jax.host.specs import KVSpec, LatentSpec, Spec

FORMAT = 1  # of objects and of this description; a change of either starts a new namespace


def describe_geometry(spec: Spec, *, model_name: str = "", rank: int = 0, num_ranks: int = 1) -> dict[str, Any]:
    """What a namespace stands for, as plain JSON values.

    Args:
      spec: geometry of the pool. Layout is not part of it: the bytes of a stored page are in one order whatever the
        buffer's layout.
      model_name: name and revision of the weights; two models never share pages.
      rank: this process's tensor-parallel rank, which decides whose heads a page holds. A latent page is the same on
        every rank, so there it is left out and all ranks share one namespace.
      num_ranks: tensor-parallel ranks.

    Raises:
      TypeError: not a spec, or a model name that is no string.
      ValueError: a rank that does not exist.
    """
    if not isinstance(spec, KVSpec | LatentSpec):
        raise TypeError(f"spec: expected a KVSpec or a LatentSpec, got {type(spec).__name__}.")
    if not isinstance(model_name, str):
        raise TypeError(f"model_name: expected a string, got {type(model_name).__name__}.")
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank: expected 0 <= rank < num_ranks = {num_ranks}, got {rank}.")
    geometry: dict[str, Any] = {
        "format": FORMAT,
        "model_name": model_name,
        "num_layers": spec.num_layers,
        "page_size": spec.page_size,
        "dtype": spec.dtype.name,
    }
    if isinstance(spec, LatentSpec):
        return geometry | {"kind": "latent", "latent_dim": spec.latent_dim}
    return geometry | {
        "kind": "kv",
        "num_heads": spec.num_heads,
        "head_dim": spec.head_dim,
        "v_head_dim": spec.v_width,
        "rank": rank,
        "num_ranks": num_ranks,
    }


def namespace_digest(spec: Spec, *, model_name: str = "", rank: int = 0, num_ranks: int = 1) -> str:
    """SHA-256 over `describe_geometry` as JSON with sorted names: 64 hexadecimal digits."""
    geometry = describe_geometry(spec, model_name=model_name, rank=rank, num_ranks=num_ranks)
    return hashlib.sha256(json.dumps(geometry, sort_keys=True).encode()).hexdigest()
