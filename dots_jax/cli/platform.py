"""Whether JAX can start at all on the platform that the user's environment names."""

import os

from dots_jax.cli.errors import ArgumentError


def check_platform() -> None:
    """Starts JAX's backends.

    Raises:
      ArgumentError: if JAX_PLATFORMS names a platform that is unknown or not installed here.
    """
    import jax

    try:
        jax.devices()
    except Exception as error:  # a RuntimeError for an unknown name, an AssertionError for a missing plugin
        reason = (str(error).splitlines() or ["that platform is not installed here"])[0]
        raise ArgumentError(f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')!r}: {reason}") from error
