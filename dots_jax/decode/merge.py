"""Combining partial attention results over disjoint keys."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def merge_attention(
    outs: Float[Array, "parts ... v_dim"], lses: Float[Array, "parts ..."]
) -> tuple[Float[Array, "... v_dim"], Float[Array, "..."]]:
    """Combines attention computed separately over disjoint sets of keys.

    Args:
      outs: the normalised partial outputs, stacked on a leading axis (a sequence of arrays works too).
      lses: their natural-log sums of exponentials; -inf marks a part that saw no key, whose output counts for nothing
        whatever it holds.

    Returns:
      `(out, lse)`: the output over all the keys in the dtype of `outs`, and its float32 LSE. Where every part is -inf
      the output is 0 and the LSE -inf.

    Raises:
      ValueError: if the shapes do not belong together.

    Formula: with m = max_i lse_i and w_i = exp(lse_i - m),
    out = sum_i w_i out_i / sum_i w_i and lse = m + log sum_i w_i.
    """
    outs, lses = jnp.asarray(outs), jnp.asarray(lses)
    if outs.ndim < 2 or outs.shape[:-1] != lses.shape or outs.shape[0] < 1:
        raise ValueError(f"outs must be [parts, ..., v_dim] and lses [parts, ...], got {outs.shape} and {lses.shape}")
    lses = lses.astype(jnp.float32)
    top = jnp.max(lses, axis=0)
    # -inf - -inf is NaN: shift by 0 where no part saw a key.
    weights = jnp.exp(lses - jnp.where(top == -jnp.inf, 0.0, top)[None])
    total = jnp.sum(weights, axis=0)
    # A part of weight 0 may hold anything, NaN included, so it is left out instead of multiplied.
    parts = jnp.where(lses[..., None] == -jnp.inf, 0.0, outs.astype(jnp.float32))
    merged = jnp.sum(weights[..., None] * parts, axis=0) / jnp.where(total == 0.0, 1.0, total)[..., None]
    return merged.astype(outs.dtype), jnp.where(
        total == 0.0, -jnp.inf, top + jnp.log(jnp.where(total == 0.0, 1.0, total))
    )
