"""Merging the partial results of split-KV."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def merge_splits(
    outs: Float[Array, "splits B S H V"], lses: Float[Array, "splits B S H"], dtype: jax.typing.DTypeLike
) -> tuple[Float[Array, "B S H V"], Float[Array, "B S H"]]:
    """Combines normalised partial outputs over disjoint keys, weighting each by exp(LSE).

    Plain XLA on purpose: it is one fused pass over the partials (elementwise and a sum over the leading axis), which
    are small and still in L2 when it runs, and it only exists when the grid is too small to fill the card.

    Args:
      outs: Partial outputs; 0 where a split saw no key.
      lses: Natural-log sums of exponentials; -inf where a split saw no key.
      dtype: Of the result.

    Returns:
      Output and LSE over all splits; 0 and -inf where no split saw a key.
    """
    if outs.shape[0] == 1:
        return outs[0].astype(dtype), lses[0]
    top = jnp.max(lses, axis=0)
    weights = jnp.exp(lses - jnp.where(jnp.isneginf(top), 0.0, top)[None])
    total = jnp.sum(weights, axis=0)
    out = jnp.sum(weights[..., None] * outs.astype(jnp.float32), axis=0) / jnp.where(total == 0, 1.0, total)[..., None]
    return out.astype(dtype), top + jnp.log(jnp.where(total == 0, 1.0, total))
