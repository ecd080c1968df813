"""Sliding-window latent (MLA) decode of the Dots hybrid models, in JAX.

The names most users need are here; each lives in the subpackage its purpose suggests: page tables in `dots_jax.pages`,
decode in `dots_jax.decode`, host buffers in `dots_jax.host`, geometry in `dots_jax.config`.
"""

from dots_jax.config import DotsConfig, LatentGeometry
from dots_jax.decode import gather_latent, merge_attention, swa_latent_decode, write_latent
from dots_jax.pages import PagePool, PageTable

__version__ = "0.1.0"

__all__ = [
    "DotsConfig",
    "LatentGeometry",
    "PagePool",
    "PageTable",
    "gather_latent",
    "merge_attention",
    "swa_latent_decode",
    "write_latent",
]
