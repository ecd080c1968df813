"""What the synthetic tokens hold: rows of two fixed banks, picked by a hash of who, where and when.

A row of the cache depends on its request, position, layer and the step that wrote it, so a stale, misplaced or mixed-up
row differs from the right one. The same hash runs on the device (in the jitted step) and on the host (in the checks):
the arithmetic is uint32, which wraps in the same way in both.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dots_jax.config import LatentGeometry

# Primes, so that no stride of the hash below divides them.
LATENT_ROWS = 4093
QUERY_ROWS = 31

# Queries of scale 1 over keys of this scale give scores of standard deviation 0.6 in the released geometry: every key
# of a window matters, so one dropped or doubled is seen, and the scores matter too.
LATENT_SCALE = 0.3


class Banks(NamedTuple):
    """Random numbers of one dtype.

    Attributes:
      latent: cache rows.
      query: all heads of one absorbed query each.
    """

    latent: Float[Array, "rows D"]
    query: Float[Array, "rows H D"]


def make_banks(geometry: LatentGeometry, dtype: DTypeLike, seed: int) -> Banks:
    """Draws the banks on the host."""
    random = np.random.default_rng([seed, 1])
    latent = random.standard_normal((LATENT_ROWS, geometry.latent_dim), np.float32) * LATENT_SCALE
    query = random.standard_normal((QUERY_ROWS, geometry.num_heads, geometry.latent_dim), np.float32)
    return Banks(jnp.asarray(latent, dtype), jnp.asarray(query, dtype))


def latent_index[T: (jax.Array, np.ndarray)](request_id: T, position: T, step: T, layer: int) -> T:
    """Index into `Banks.latent` of the row written for a position by a step; arguments are uint32 and broadcast."""
    return (request_id * 7919 + position * 31 + step * 613 + layer * 1019) % LATENT_ROWS


def query_index[T: (jax.Array, np.ndarray)](request_id: T, position: T, step: T, layer: int) -> T:
    """Index into `Banks.query` of the query at a position; arguments are uint32 and broadcast."""
    return (request_id * 7 + position * 5 + step * 3 + layer * 11) % QUERY_ROWS
