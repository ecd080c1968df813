"""Sliding-window latent (MLA) decode of the Dots hybrid models, in JAX.

The names most users need are here; each lives in the module that its first letters suggest: page tables in
`dots_jax.pages`, decode in `dots_jax.decode`, host buffers in `dots_jax.host`, geometry in `dots_jax.config`.
"""

from dots_jax.config import DotsConfig, LatentGeometry

__version__ = "0.1.0"

__all__ = [
    "DotsConfig",
    "LatentGeometry",
    "__version__",
]
