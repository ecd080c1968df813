"""Decode: attention over the paged latent window, and reading and writing the latent cache.

`api.py` holds the entry point, `reference.py` the definition, `xla.py` and `mosaic_gpu.py` one implementation each.
"""

from dots_jax.decode.api import swa_latent_decode
from dots_jax.decode.cache import gather_latent, write_latent
from dots_jax.decode.merge import merge_attention
from dots_jax.decode.reference import swa_latent_decode_reference

__all__ = [
    "gather_latent",
    "merge_attention",
    "swa_latent_decode",
    "swa_latent_decode_reference",
    "write_latent",
]
