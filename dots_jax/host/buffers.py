"""Host K/V buffers as frozen pytrees.

The arrays are the leaves; spec, layout and transfer path are static, so that a jitted function is compiled once for
each. Constructing a buffer checks it. Rebuilding one from leaves, as JAX does inside its transformations, does not.
"""

from typing import Any, ClassVar

import jax
import numpy as np
from jax import Array
from jaxtyping import Shaped

from dots_jax.host import layouts, pages, transfer
from dots_jax.host.device import DeviceKV, LayerKV, is_array
from dots_jax.host.layerwise import LayerLoads
from dots_jax.host.layouts import Side
from dots_jax.host.pages import PageBuffer
from dots_jax.host.specs import KVSpec, LatentSpec, Spec
from dots_jax.pytree import frozen_pytree


class HostKV:
    """What the three kinds of buffer have in common."""

    KIND: ClassVar[str]
    spec: Any
    layout: str
    io_backend: str | None

    def __post_init__(self):
        check_kind(self.spec, self.KIND)
        layouts.check_layout(self.spec, self.KIND, self.layout)
        if self.KIND == "symmetric" and not self.spec.is_symmetric:
            raise ValueError(
                f"SymmetricHostKV: expected equal K and V widths, got head_dim {self.spec.head_dim} and v_head_dim "
                f"{self.spec.v_head_dim}; use AsymmetricHostKV."
            )
        layouts.check_io_backend(self.KIND, self.layout, self.io_backend)
        self._check_leaves()

    def _check_leaves(self) -> None:
        for name, leaf in self.leaves.items():
            if not is_array(leaf):
                raise ValueError(
                    f"{type(self).__name__}.{name}: expected an array of {self.spec.dtype}, got {type(leaf).__name__}."
                )
        axis, by_slot = layouts.page_axis(self.KIND, self.layout)
        name, first = next(iter(self.leaves.items()))
        shape = tuple(first.shape)
        tokens = shape[axis] if axis < len(shape) else 0
        num_pages = max(tokens // self.spec.page_size if by_slot else tokens, 1)
        for name, shape in layouts.leaf_shapes(self.spec, self.KIND, self.layout, num_pages).items():
            leaf = self.leaves[name]
            if tuple(leaf.shape) != shape or leaf.dtype != self.spec.dtype:
                raise ValueError(
                    f"{type(self).__name__}.{name}: expected {self.spec.dtype} of shape {shape} for layout "
                    f"'{self.layout}' and {num_pages} pages of {self.spec}, got {leaf.dtype} of shape "
                    f"{tuple(leaf.shape)}."
                )

    @property
    def leaves(self) -> dict[str, Shaped[Array, "..."]]:
        """The arrays by name, K before V."""
        names = dict.fromkeys(side.leaf for side in self.sides)
        return {name: getattr(self, name) for name in names}

    def with_leaves(self, leaves: dict[str, Any]) -> Any:
        """The same buffer with other arrays, K before V, which are not checked."""
        return jax.tree.unflatten(jax.tree.structure(self), leaves.values())

    @property
    def sides(self) -> tuple[Side, ...]:
        """The sides held, K before V."""
        return layouts.sides_of(self.spec, self.KIND)

    @property
    def num_pages(self) -> int:
        """Pages held."""
        axis, by_slot = layouts.page_axis(self.KIND, self.layout)
        length = next(iter(self.leaves.values())).shape[axis]
        return length // self.spec.page_size if by_slot else length

    @property
    def num_slots(self) -> int:
        """Tokens held."""
        return self.num_pages * self.spec.page_size

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return self.num_slots * self.spec.bytes_per_token

    def backup(
        self,
        device: DeviceKV,
        host_slots: Any,
        device_slots: Any,
        *,
        chunk_pages: int | None = None,
        donate: bool = False,
    ) -> Any:
        """Copies slots of all layers from the device arrays into this buffer.

        Args:
          device: arrays of every layer, draft layers last.
          host_slots: integer slots of this buffer, a list, a NumPy array or a device array.
          device_slots: slots of the device arrays, one for each host slot.
          chunk_pages: gather at most so many pages at a time into a block, and write that. The result is the same for
            every size; where not given, pages are copied straight from array to array if one function can see both.
          donate: give up this buffer's memory to the result. The cost then follows the slots moved; without it the
            whole buffer is copied. This buffer is deleted.

        Returns:
          The buffer with those slots replaced and everything else as it was.

        Raises:
          TypeError: `device` is not a `DeviceKV`, or slots are not integers.
          ValueError: device arrays do not match the spec (both widths named), or slots are misaligned, fragmented,
            repeated, negative, out of range or of different lengths; naming the first offender, with nothing moved.
            Slots that are traced cannot be checked: those that are out of range, or (where whole pages are moved) not
            part of a whole page, then move nothing.
        """
        return transfer.backup(self, device, host_slots, device_slots, chunk_pages=chunk_pages, donate=donate)

    def load(
        self,
        device: DeviceKV,
        layer: Any,
        host_slots: Any,
        device_slots: Any,
        *,
        device_layer: Any = None,
        donate: bool = False,
    ) -> LayerKV:
        """Copies slots of one layer from this buffer into that layer's device arrays.

        Args:
          device: arrays of every layer.
          layer: layer of this buffer.
          host_slots: integer slots of this buffer.
          device_slots: slots of the device arrays, one for each host slot.
          device_layer: layer of `device`, where it is not `layer`: 0 for a draft model's own pool of one layer.
          donate: give up the memory of that layer's device arrays to the result.

        Returns:
          The new arrays `(k, v)` of that layer; `v` is None for a latent buffer.

        Raises:
          TypeError: as for `backup`.
          ValueError: as for `backup`; also a layer that does not exist.
        """
        return transfer.load(self, device, layer, host_slots, device_slots, device_layer=device_layer, donate=donate)

    def load_layers(
        self, device: DeviceKV, host_slots: Any, device_slots: Any, *, prefetch: int = 1, donate: bool = False
    ) -> LayerLoads:
        """Loads every layer in turn; see `LayerLoads`.

        Args:
          device: arrays of every layer.
          host_slots: slots of this buffer.
          device_slots: slots of the device arrays, one for each host slot.
          prefetch: layers whose load runs ahead of the one handed out.
          donate: give up the device arrays of each layer as its load starts.

        Returns:
          An iterator of `(layer, (k, v))`, one for each layer in order.

        Raises:
          TypeError: as for `backup`.
          ValueError: as for `backup`, before anything is loaded.
        """
        return LayerLoads(self, device, host_slots, device_slots, prefetch=prefetch, donate=donate)

    def page_buffers(self, host_slots: Any) -> list[PageBuffer]:
        """Where the bytes of whole pages are, for I/O that needs no copy.

        Args:
          host_slots: slots of whole pages.

        Returns:
          For each page in the order given, K before V: `(leaf, offset, nbytes)`, bytes from the start of that leaf.
          A layer-first buffer has an entry for each layer of a page.

        Raises:
          ValueError: the slots are not whole pages of this buffer; naming the first offender.
        """
        return pages.page_buffers(self, host_slots)

    def is_page_aligned(self, nbytes: int = 4096) -> bool:
        """Whether every page of every side starts at a multiple of `nbytes` within its leaf.

        That is what unbuffered I/O needs, beside a leaf that itself starts at such an address. False for a layer-first
        buffer, whose pages are in pieces.

        Raises:
          ValueError: `nbytes` is below 1.
        """
        if nbytes < 1:
            raise ValueError(f"nbytes: expected at least 1, got {nbytes}.")
        if self.layout not in layouts.PAGE_MAJOR:
            return False
        spec = self.spec
        return all(size % nbytes == 0 for size in (spec.k_page_bytes, spec.v_page_bytes))

    def get_page(self, page: int) -> np.ndarray:
        """One page as flat bytes: `uint8[page_bytes]`, all K bytes, then all V bytes.

        Either side is in the order layer, token, head, width, whatever the layout.

        Raises:
          TypeError: the page is not an integer.
          ValueError: there is no such page.
        """
        return pages.get_page(self, page)

    def set_page(self, page: int, data: Any, *, donate: bool = False) -> Any:
        """The buffer with one page replaced by flat bytes, as `get_page` gives them.

        Args:
          page: the page.
          data: `page_bytes` bytes: a bytes-like object or a uint8 array.
          donate: give up this buffer's memory to the result, so that only a page is written.

        Raises:
          TypeError: the page is not an integer.
          ValueError: there is no such page, or not that many bytes.
        """
        return pages.set_page(self, page, data, donate=donate)


def check_kind(spec: Spec, kind: str) -> None:
    """Refuses a spec that another kind of buffer is for.

    Raises:
      TypeError: not a spec, or one of the other type.
    """
    wanted = LatentSpec if kind == "latent" else KVSpec
    if not isinstance(spec, wanted):
        raise TypeError(f"spec: expected a {wanted.__name__} for a {kind} buffer, got {spec!r}.")


@frozen_pytree(static=("spec", "layout", "io_backend"))
class AsymmetricHostKV(HostKV):
    """K and V in an array each, with heads of different widths.

    Args:
      k: `[S, L, H, D]` (page_first) or `[P, L, p, H, D]` (page_first_direct).
      v: the same with the V width.
      spec: the geometry.
      layout: "page_first" or "page_first_direct".
      io_backend: "kernel", "direct" or None: the transfer path it has to serve.

    Raises:
      ValueError: the layout, the path or an array does not fit.
    """

    KIND: ClassVar[str] = "asymmetric"

    k: Shaped[Array, "..."]
    v: Shaped[Array, "..."]
    spec: KVSpec
    layout: str = "page_first"
    io_backend: str | None = None


@frozen_pytree(static=("spec", "layout", "io_backend"))
class SymmetricHostKV(HostKV):
    """K and V, equally wide, in one array.

    Args:
      kv: `[2, ...]`, K at 0 and V at 1; see `docs/host-buffers.md` for each layout's shape.
      spec: the geometry.
      layout: any of the four.
      io_backend: "kernel", "direct" or None: the transfer path it has to serve.

    Raises:
      ValueError: the layout, the path or the array does not fit, or the widths differ.
    """

    KIND: ClassVar[str] = "symmetric"

    kv: Shaped[Array, "2 ..."]
    spec: KVSpec
    layout: str = "page_first"
    io_backend: str | None = None


@frozen_pytree(static=("spec", "layout", "io_backend"))
class LatentHostKV(HostKV):
    """Latent (MLA) rows in one array.

    Args:
      kv: `[L, S, 1, C]`, `[S, L, 1, C]` or `[P, L, p, 1, C]`.
      spec: the geometry.
      layout: "layer_first", "page_first" or "page_first_direct".
      io_backend: "kernel", "direct" or None: the transfer path it has to serve.

    Raises:
      ValueError: the layout, the path or the array does not fit.
    """

    KIND: ClassVar[str] = "latent"

    kv: Shaped[Array, "..."]
    spec: LatentSpec
    layout: str = "page_first"
    io_backend: str | None = None


CLASSES: dict[str, Any] = {cls.KIND: cls for cls in (AsymmetricHostKV, SymmetricHostKV, LatentHostKV)}
