"""The four orders in which a host buffer can keep its axes, and what follows from each.

A layout is a tuple of axis names. `slot` is a token of the whole buffer; `page` and `offset` are the same thing split
at page boundaries. Shapes, byte offsets and the region a page takes are all read off that tuple, separately for each
side, so that nothing here couples K's width to V's.
"""

import dataclasses
import math
from typing import Literal, get_args

import jax

from dots_jax.host.specs import LatentSpec, Spec

Layout = Literal["layer_first", "page_first", "page_first_direct", "page_head"]
IoBackend = Literal["kernel", "direct"]

LAYOUTS: tuple[str, ...] = get_args(Layout)
IO_BACKENDS: tuple[str, ...] = get_args(IoBackend)

AXES: dict[str, tuple[str, ...]] = {
    "layer_first": ("layer", "slot", "head", "width"),
    "page_first": ("slot", "layer", "head", "width"),
    "page_first_direct": ("page", "layer", "offset", "head", "width"),
    "page_head": ("page", "head", "offset", "layer", "width"),
}

PAGE_MAJOR = ("page_first", "page_first_direct", "page_head")

# Which layouts each kind of buffer has, and which transfer goes with which of them.
_BY_KIND: dict[str, dict[str, tuple[str, ...]]] = {
    "symmetric": {
        "layer_first": ("kernel", "direct"),
        "page_first": ("kernel",),
        "page_first_direct": ("direct",),
        "page_head": ("kernel",),
    },
    "asymmetric": {"page_first": ("kernel",), "page_first_direct": ("direct",)},
    "latent": {"layer_first": ("kernel", "direct"), "page_first": ("kernel",), "page_first_direct": ("direct",)},
}


@dataclasses.dataclass(frozen=True)
class Side:
    """One side of a buffer: the leaf it lives in, its place in that leaf and its width.

    Attributes:
      name: "k" or "v" (the only side of a latent buffer is "k").
      leaf: name of the buffer's field.
      index: place on the leading axis of a leaf that holds both sides, None where the leaf is this side alone.
      heads: heads per token.
      width: elements per head.
    """

    name: str
    leaf: str
    index: int | None
    heads: int
    width: int


def kind_of(spec: Spec) -> str:
    """The kind of buffer a spec asks for: "symmetric", "asymmetric" or "latent"."""
    if isinstance(spec, LatentSpec):
        return "latent"
    return "symmetric" if spec.is_symmetric else "asymmetric"


def sides_of(spec: Spec, kind: str) -> tuple[Side, ...]:
    """The sides of a buffer of this kind, K before V."""
    if isinstance(spec, LatentSpec):
        return (Side("k", "kv", None, 1, spec.latent_dim),)
    shared = kind == "symmetric"
    k = Side("k", "kv" if shared else "k", 0 if shared else None, spec.num_heads, spec.head_dim)
    v = Side("v", "kv" if shared else "v", 1 if shared else None, spec.num_heads, spec.v_width)
    return (k, v)


def with_one_head(side: Side, layout: str) -> Side:
    """The side as one head as wide as all of them, where the layout keeps a token's heads together.

    The memory is the same, and longer rows are copied faster. XLA before JAX 0.12, though, copies a whole buffer that
    is reshaped and then updated in a loop, so there the heads stay apart.
    """
    if layout == "page_head" or jax.__version_info__ < (0, 12):
        return side
    return dataclasses.replace(side, heads=1, width=side.heads * side.width)


def supported_layouts(kind: str) -> tuple[str, ...]:
    """Layouts a buffer of this kind has."""
    return tuple(_BY_KIND[kind])


def check_layout(spec: Spec, kind: str, layout: str) -> None:
    """Refuses a layout this kind of buffer does not have.

    Raises:
      ValueError: naming the layout and the ones there are.
    """
    supported = supported_layouts("asymmetric" if kind_of(spec) == "asymmetric" else kind)
    if layout in supported:
        return
    if kind_of(spec) == "asymmetric":
        raise ValueError(
            f"Unsupported layout for models with head_dim != v_head_dim: {layout}; "
            "expected 'page_first' or 'page_first_direct'."
        )
    names = ", ".join(repr(name) for name in supported)
    raise ValueError(
        f"Unsupported layout: {layout}; {'an' if kind == 'asymmetric' else 'a'} {kind} buffer has {names}."
    )


def check_io_backend(kind: str, layout: str, io_backend: str | None) -> None:
    """Refuses a transfer path that cannot serve a layout; None leaves the choice open.

    Raises:
      ValueError: naming both and what would fit.
    """
    if io_backend is None:
        return
    if io_backend not in IO_BACKENDS:
        raise ValueError(f"Unsupported IO backend: {io_backend}; expected 'kernel' or 'direct'.")
    fitting = _BY_KIND[kind][layout]
    if io_backend in fitting:
        return
    layouts = " or ".join(repr(name) for name, backends in _BY_KIND[kind].items() if io_backend in backends)
    backends = " or ".join(repr(name) for name in fitting)
    raise ValueError(
        f"Unsupported layout '{layout}' for io_backend '{io_backend}': {layout} goes with io_backend {backends}, "
        f"and io_backend '{io_backend}' with layout {layouts} (a buffer of kind {kind!r})."
    )


def axis_sizes(spec: Spec, side: Side, num_pages: int) -> dict[str, int]:
    """Length of each named axis of one side."""
    return {
        "layer": spec.num_layers,
        "slot": num_pages * spec.page_size,
        "page": num_pages,
        "offset": spec.page_size,
        "head": side.heads,
        "width": side.width,
    }


def side_shape(spec: Spec, side: Side, layout: str, num_pages: int) -> tuple[int, ...]:
    """Shape of one side in a layout."""
    sizes = axis_sizes(spec, side, num_pages)
    return tuple(sizes[axis] for axis in AXES[layout])


def leaf_shapes(spec: Spec, kind: str, layout: str, num_pages: int) -> dict[str, tuple[int, ...]]:
    """Shape of each leaf of a buffer, in field order."""
    shapes = {}
    for side in sides_of(spec, kind):
        shape = side_shape(spec, side, layout, num_pages)
        shapes[side.leaf] = shape if side.index is None else (2, *shape)
    return shapes


def page_axis(kind: str, layout: str) -> tuple[int, bool]:
    """Where a leaf's pages are: the axis, and whether it counts slots rather than pages."""
    axes = AXES[layout]
    by_slot = "slot" in axes
    return axes.index("slot" if by_slot else "page") + (kind == "symmetric"), by_slot


def byte_offset(
    spec: Spec, side: Side, layout: str, num_pages: int, *, slot: int, layer: int = 0, head: int = 0
) -> int:
    """Bytes from the start of one side to one head of one token."""
    sizes = axis_sizes(spec, side, num_pages)
    page, offset = divmod(slot, spec.page_size)
    place = {"layer": layer, "slot": slot, "page": page, "offset": offset, "head": head, "width": 0}
    flat = 0
    for axis in AXES[layout]:
        flat = flat * sizes[axis] + place[axis]
    return flat * spec.itemsize


def side_nbytes(spec: Spec, side: Side, num_pages: int) -> int:
    """Bytes of one side."""
    return num_pages * spec.page_size * spec.num_layers * side.heads * side.width * spec.itemsize


def total_nbytes(spec: Spec, kind: str, layout: str, num_pages: int) -> int:
    """Bytes of all leaves together."""
    return sum(math.prod(shape) for shape in leaf_shapes(spec, kind, layout, num_pages).values()) * spec.itemsize
