"""What one token costs in a host buffer: heads, widths, layers, page size and stored dtype.

Every size is in bytes unless its name says otherwise. A *token stride* is what one token takes in one layer of one
side; a *side* is K or V, and the two sides of an asymmetric spec never share a stride.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np


def _check_positive(owner: str, **values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{owner}.{name}: expected an integer, got {value!r}.")
        if value < 1:
            raise ValueError(f"{owner}.{name}: expected at least 1, got {value}.")


def _checked_dtype(owner: str, dtype: Any) -> np.dtype:
    # NumPy takes None for float64, which nobody means.
    checked = None if dtype is None else jnp.dtype(dtype)
    if checked is None or not (jnp.issubdtype(checked, np.number) or checked == np.bool_):
        raise TypeError(f"{owner}.dtype: expected a dtype of numbers, got {dtype!r}.")
    if _bits(checked) < 8:
        # How such numbers are packed differs from device to device, so a page would have no defined bytes.
        raise TypeError(f"{owner}.dtype: expected numbers of whole bytes, got {checked}; store packed bytes as uint8.")
    return checked


def _bits(dtype: np.dtype) -> int:
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else 8 * dtype.itemsize


class _Sizes:
    """Sizes that follow from the two token strides and the number of layers."""

    num_layers: int
    page_size: int
    dtype: Any
    k_token_stride: int
    v_token_stride: int

    @property
    def itemsize(self) -> int:
        """Bytes of one stored element (fp8: 1, bfloat16: 2)."""
        return self.dtype.itemsize

    @property
    def k_bytes_per_token(self) -> int:
        """Bytes of one token's K over all layers."""
        return self.k_token_stride * self.num_layers

    @property
    def v_bytes_per_token(self) -> int:
        """Bytes of one token's V over all layers; 0 where there is no V."""
        return self.v_token_stride * self.num_layers

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token, K and V, over all layers."""
        return self.k_bytes_per_token + self.v_bytes_per_token

    @property
    def k_page_bytes(self) -> int:
        """Bytes of one page's K over all layers."""
        return self.k_bytes_per_token * self.page_size

    @property
    def v_page_bytes(self) -> int:
        """Bytes of one page's V over all layers; 0 where there is no V."""
        return self.v_bytes_per_token * self.page_size

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, K and V, over all layers."""
        return self.bytes_per_token * self.page_size


@dataclasses.dataclass(frozen=True)
class KVSpec(_Sizes):
    """Geometry of a cache with K and V heads.

    Args:
      num_layers: layers of this rank, draft layers included.
      num_heads: KV heads of this rank.
      head_dim: elements of one K head.
      v_head_dim: elements of one V head; `head_dim` where not given. Either may be the wider.
      page_size: tokens of one page.
      dtype: the stored dtype. Bytes are moved as they are, so fp8 is itself here.

    Raises:
      TypeError: a size is not an integer, or the dtype is none of numbers, or its numbers are narrower than a byte.
      ValueError: a size is below 1.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    v_head_dim: int | None = None  # pyright: ignore[reportAssignmentType]
    page_size: int = 64
    dtype: Any = jnp.bfloat16

    def __post_init__(self):
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        sizes = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "dtype"}
        _check_positive("KVSpec", **sizes)
        for name, value in sizes.items():
            object.__setattr__(self, name, int(value))
        object.__setattr__(self, "dtype", _checked_dtype("KVSpec", self.dtype))

    @property
    def v_width(self) -> int:
        """Elements of one V head, as an integer for certain."""
        assert self.v_head_dim is not None
        return self.v_head_dim

    @property
    def is_symmetric(self) -> bool:
        """Whether K and V heads are equally wide."""
        return self.head_dim == self.v_head_dim

    @property
    def k_token_stride(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Bytes of one token's K in one layer."""
        return self.num_heads * self.head_dim * self.itemsize

    @property
    def v_token_stride(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Bytes of one token's V in one layer."""
        return self.num_heads * self.v_width * self.itemsize

    @property
    def token_stride(self) -> int:
        """Bytes of one token in one layer of either side.

        Raises:
          AttributeError: the sides differ, so that there is no such number; a caller that would have used K's stride
            for V stops here.
        """
        if not self.is_symmetric:
            raise AttributeError(
                f"a spec with head_dim {self.head_dim} and v_head_dim {self.v_head_dim} has no single token stride; "
                "use k_token_stride and v_token_stride"
            )
        return self.k_token_stride


@dataclasses.dataclass(frozen=True)
class LatentSpec(_Sizes):
    """Geometry of a latent (MLA) cache: one row per token and layer, and no V.

    Args:
      num_layers: layers of this rank, draft layers included.
      latent_dim: elements of one row: rank plus rope width, or the packed row of an fp8 format.
      page_size: tokens of one page.
      dtype: the stored dtype.

    Raises:
      TypeError: a size is not an integer, or the dtype is none of numbers, or its numbers are narrower than a byte.
      ValueError: a size is below 1.
    """

    num_layers: int
    latent_dim: int
    page_size: int = 64
    dtype: Any = jnp.bfloat16

    def __post_init__(self):
        sizes = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "dtype"}
        _check_positive("LatentSpec", **sizes)
        for name, value in sizes.items():
            object.__setattr__(self, name, int(value))
        object.__setattr__(self, "dtype", _checked_dtype("LatentSpec", self.dtype))

    @property
    def num_heads(self) -> int:
        """A latent row is one head: 1."""
        return 1

    @property
    def token_stride(self) -> int:
        """Bytes of one token's row in one layer."""
        return self.latent_dim * self.itemsize

    @property
    def k_token_stride(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The same as `token_stride`: the row is counted as K."""
        return self.token_stride

    @property
    def v_token_stride(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """0: there is no V."""
        return 0


Spec = KVSpec | LatentSpec
