"""Single pages of a host buffer: where their bytes are, and the bytes themselves."""

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from dots_jax.host import layouts
from dots_jax.host.placement import Place, as_bytes, call, for_moving, restore, update
from dots_jax.host.regions import read_block, write_block
from dots_jax.host.slots import check_pages

if TYPE_CHECKING:
    from dots_jax.host.buffers import HostKV


class PageBuffer(NamedTuple):
    """A run of bytes inside one leaf.

    Attributes:
      leaf: name of the buffer's field: "k", "v" or "kv".
      offset: bytes from the start of that leaf.
      nbytes: length in bytes.
    """

    leaf: str
    offset: int
    nbytes: int


def page_buffers(host: "HostKV", host_slots: Any) -> list[PageBuffer]:
    """See `HostKV.page_buffers`."""
    spec, layout, num_pages = host.spec, host.layout, host.num_pages
    pages = check_pages("host_slots", host_slots, num_pages, spec.page_size)
    in_pieces = layout not in layouts.PAGE_MAJOR
    num_layers = spec.num_layers if in_pieces else 1
    buffers = []
    for page in pages:
        for layer in range(num_layers):
            for side in host.sides:
                base = (side.index or 0) * layouts.side_nbytes(spec, side, num_pages)
                offset = layouts.byte_offset(
                    spec, side, layout, num_pages, slot=int(page) * spec.page_size, layer=layer
                )
                nbytes = layouts.side_nbytes(spec, side, 1) // num_layers
                buffers.append(PageBuffer(side.leaf, base + offset, nbytes))
    return buffers


def _check_page(host: "HostKV", page: int) -> int:
    if isinstance(page, bool | np.bool_) or not hasattr(page, "__index__"):
        raise TypeError(f"page: expected an integer, got {page!r}.")
    number = operator.index(page)
    if not 0 <= number < host.num_pages:
        raise ValueError(f"page: expected 0 to {host.num_pages - 1}, got {number}.")
    return number


def _read_page(host: "HostKV", page: Any, *, place: Place) -> tuple[jax.Array, ...]:
    """One block per side."""
    spec = host.spec
    leaves = {side.leaf: for_moving(host.leaves[side.leaf], side, place) for side in host.sides}
    return tuple(
        read_block(
            leaves[side.leaf],
            side,
            host.layout,
            spec.page_size,
            layer=0,
            num_layers=spec.num_layers,
            slot=page * spec.page_size,
            num_tokens=spec.page_size,
        )
        for side in host.sides
    )


def get_page(host: "HostKV", page: int) -> np.ndarray:
    """See `HostKV.get_page`."""
    blocks = call(_read_page, host.spec.dtype, host, np.int32(_check_page(host, page)))
    flat = [np.asarray(block).reshape(-1).view(np.uint8) for block in blocks]
    return flat[0] if len(flat) == 1 else np.concatenate(flat)


def _write_page(host: "HostKV", page: Any, blocks: tuple[jax.Array, ...], *, place: Place) -> "HostKV":
    spec = host.spec
    leaves = {side.leaf: for_moving(host.leaves[side.leaf], side, place) for side in host.sides}
    for side, block in zip(host.sides, blocks, strict=True):
        block = as_bytes(block, place)
        leaves[side.leaf] = write_block(
            leaves[side.leaf], block, side, host.layout, spec.page_size, layer=0, slot=page * spec.page_size
        )
    return host.with_leaves({name: restore(host.leaves[name], leaf) for name, leaf in leaves.items()})


def set_page(host: "HostKV", page: int, data: Any, *, donate: bool = False) -> "HostKV":
    """See `HostKV.set_page`."""
    number, spec = _check_page(host, page), host.spec
    flat = np.asarray(data) if hasattr(data, "__array__") else np.frombuffer(data, np.uint8)
    if flat.dtype != np.uint8 or flat.ndim != 1 or flat.size != spec.page_bytes:
        raise ValueError(
            f"data: expected {spec.page_bytes} bytes for one page of {spec}, got {flat.dtype} of shape {flat.shape}."
        )
    blocks, start = [], 0
    for side in host.sides:
        shape = (spec.num_layers, spec.page_size, side.heads, side.width)
        stop = start + layouts.side_nbytes(spec, side, 1)
        blocks.append(np.ascontiguousarray(flat[start:stop]).view(spec.dtype).reshape(shape))
        start = stop
    return update(_write_page, spec.dtype, host, np.int32(number), tuple(blocks), donate=donate)
