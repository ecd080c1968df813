"""`python -m dots_jax`."""

from dots_jax.cli import entry_point

entry_point()
