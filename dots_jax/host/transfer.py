"""Copying slots between a host buffer and per-layer device arrays.

Both directions are a loop over runs of tokens in which each copy is one slice written in place, so that under donation
the cost follows what is moved and no buffer is ever copied whole.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from dots_jax.host import staged
from dots_jax.host.device import DeviceKV, LayerKV, check_device
from dots_jax.host.layouts import AXES, Side, with_one_head
from dots_jax.host.moves import Moves, plan
from dots_jax.host.placement import Place, for_moving, from_bytes, is_traced, platform_of, restore, rows_of, update
from dots_jax.host.regions import read_block, write_block
from dots_jax.host.slots import check_pair
from dots_jax.host.workers import blocking_bytes, run_together

if TYPE_CHECKING:
    from dots_jax.host.buffers import HostKV


def moves_whole_pages(host: "HostKV") -> bool:
    """Whether transfers of this buffer take whole pages only.

    A layer-first buffer moves single tokens; so do the other layouts when they were asked to serve the "kernel" path.
    Everything else moves pages.
    """
    return host.layout != "layer_first" and host.io_backend != "kernel"


def _plan(host: "HostKV", num_device: int, host_slots: Any, device_slots: Any) -> tuple[Moves, int]:
    sizes: dict[str, Any] = {
        "num_host": host.num_slots,
        "num_device": num_device,
        "page_size": host.spec.page_size,
        "need_pages": moves_whole_pages(host),
    }
    return plan(check_pair(host_slots, device_slots, **sizes), **sizes)


def needs_staging(host: "HostKV", *others: Any) -> bool:
    """Whether the buffer is somewhere that one compiled function cannot mix with the device arrays."""
    if is_traced((host, others)):
        return False
    leaf = next(iter(host.leaves.values()))
    array = jax.tree.leaves(others)[0]
    if not isinstance(leaf, Array) or not isinstance(array, Array):
        return False
    if leaf.sharding.device_set != array.sharding.device_set:
        return True
    return platform_of(leaf) != "cpu" and leaf.sharding.memory_kind != array.sharding.memory_kind


def backup(
    host: "HostKV",
    device: DeviceKV,
    host_slots: Any,
    device_slots: Any,
    *,
    chunk_pages: int | None = None,
    donate: bool,
) -> "HostKV":
    """See `HostKV.backup`."""
    if chunk_pages is not None and chunk_pages < 1:
        raise ValueError(f"chunk_pages: expected at least 1, got {chunk_pages}.")
    num_device = check_device(device, host.spec, num_layers=host.spec.num_layers)
    moves, run = _plan(host, num_device, host_slots, device_slots)
    known = not is_traced((host, device, moves)) and all(isinstance(a, Array) for a in jax.tree.leaves((host, device)))
    if needs_staging(host, device, moves) or (chunk_pages and known):
        size = chunk_pages or staged.CHUNK_PAGES
        return staged.backup_in_chunks(host, device, moves, run, chunk_pages=size, donate=donate)
    layers = {"k": device.k, "v": device.v}
    static = {"layout": host.layout, "page_size": host.spec.page_size, "run": run}
    calls = []
    # A call for each leaf, so that K and V are copied at the same time.
    for name, leaf in host.leaves.items():
        sides = tuple(side for side in host.sides if side.leaf == name)
        sources = tuple(layers[side.name] for side in sides)
        call = functools.partial(update, _backup, host.spec.dtype, leaf, sources, moves, sides=sides, **static)
        calls.append(functools.partial(call, donate=donate))
    nbytes = blocking_bytes((host, device, moves), len(moves.host) * run * host.spec.bytes_per_token)
    return host.with_leaves(dict(zip(host.leaves, run_together(calls, nbytes), strict=True)))


def _backup(
    leaf: Array,
    sources: tuple[tuple[Array, ...], ...],
    moves: Moves,
    *,
    sides: tuple[Side, ...],
    layout: str,
    page_size: int,
    run: int,
    place: Place,
) -> Array:
    """Copies every run of every layer into one leaf; `sources` has the layers of each of its sides."""
    sides = tuple(with_one_head(side, layout) for side in sides)
    pairs = tuple(zip(sides, sources, strict=True))
    rows = [[rows_of(array, side, place) for array in layers] for side, layers in pairs]

    def move(i: Array, leaf: Array) -> Array:
        source, target = jnp.asarray(moves.device)[i], jnp.asarray(moves.host)[i]
        for side, layers in zip(sides, rows, strict=True):
            for layer, array in enumerate(layers):
                block = lax.dynamic_slice_in_dim(array, source, run)[None]
                leaf = write_block(leaf, block, side, layout, page_size, layer=layer, slot=target)
        return leaf

    moving = for_moving(leaf, sides[0], place)
    return restore(leaf, lax.fori_loop(0, moves.total, move, moving))


def layer_bytes(host: "HostKV", moves: Moves, run: int) -> int:
    """Bytes of the slots of known moves in one layer, the padding included."""
    return len(moves.host) * run * (host.spec.k_token_stride + host.spec.v_token_stride)


def check_layer(name: str, layer: Any, num_layers: int) -> Any:
    """Refuses a layer that does not exist; a traced one cannot be checked.

    Raises:
      TypeError: not an integer.
      ValueError: out of range.
    """
    if isinstance(layer, Tracer):
        return layer
    number = int(np.asarray(layer).item()) if np.asarray(layer).dtype.kind in "iu" else None
    if number is None:
        raise TypeError(f"{name}: expected an integer, got {layer!r}.")
    if not 0 <= number < num_layers:
        raise ValueError(f"{name}: expected 0 to {num_layers - 1}, got {number}.")
    return number


def load(
    host: "HostKV",
    device: DeviceKV,
    layer: Any,
    host_slots: Any,
    device_slots: Any,
    *,
    device_layer: Any = None,
    donate: bool,
) -> LayerKV:
    """See `HostKV.load`."""
    layer = check_layer("layer", layer, host.spec.num_layers)
    start = prepare_loads(host, device, host_slots, device_slots, own_layers=device_layer is not None, donate=donate)
    return start(layer, device_layer)


def prepare_loads(
    host: "HostKV",
    device: DeviceKV,
    host_slots: Any,
    device_slots: Any,
    *,
    own_layers: bool = False,
    donate: bool,
) -> Callable[..., LayerKV]:
    """Checks what loads of any layer have in common, once.

    Args:
      host: the buffer.
      device: the device arrays.
      host_slots: slots of the buffer.
      device_slots: slots of the device arrays.
      own_layers: whether `device` counts its layers by itself instead of having those of the buffer.
      donate: give up each layer's device arrays as its load starts.

    Returns:
      `start(layer, device_layer=None)`, which starts one layer's load and returns its arrays.
    """
    expected = max(device.num_layers, 1) if own_layers and isinstance(device, DeviceKV) else host.spec.num_layers
    num_device = check_device(device, host.spec, num_layers=expected)
    moves, run = _plan(host, num_device, host_slots, device_slots)

    def start(layer: Any, device_layer: Any = None) -> LayerKV:
        target = check_layer("device_layer", layer if device_layer is None else device_layer, device.num_layers)
        if isinstance(target, Tracer):
            raise TypeError("load: which device arrays to fill has to be known while tracing; give device_layer.")
        arrays = device.layer(target)
        if needs_staging(host, arrays, moves):
            return staged.load_in_chunks(arrays, host, layer, moves, run, chunk_pages=staged.CHUNK_PAGES, donate=donate)
        static = {"layout": host.layout, "page_size": host.spec.page_size, "run": run}
        calls = [
            functools.partial(
                update,
                _load,
                host.spec.dtype,
                getattr(arrays, side.name),
                host.leaves[side.leaf],
                jnp.int32(layer),
                moves,
                donate=donate,
                side=side,
                **static,
            )
            for side in host.sides
        ]
        nbytes = blocking_bytes((arrays, host, moves), layer_bytes(host, moves, run))
        return LayerKV(*run_together(calls, nbytes))

    return start


def _load(
    array: Array,
    leaf: Array,
    layer: Array,
    moves: Moves,
    *,
    side: Side,
    layout: str,
    page_size: int,
    run: int,
    place: Place,
) -> Array:
    """Copies every run of one layer and side into its device array."""
    side = with_one_head(side, layout)
    leaf = for_moving(leaf, side, place)
    num_layers = leaf.shape[AXES[layout].index("layer") + (side.index is not None)]

    def move(i: Array, rows: Array) -> Array:
        source, target = jnp.asarray(moves.host)[i], jnp.asarray(moves.device)[i]
        block = read_block(leaf, side, layout, page_size, layer=layer, num_layers=1, slot=source, num_tokens=run)
        return lax.dynamic_update_slice_in_dim(rows, block[0], target, axis=0)

    # A traced layer that does not exist moves nothing.
    total = jnp.where((layer >= 0) & (layer < num_layers), moves.total, 0)
    rows = lax.fori_loop(0, total, move, rows_of(array, side, place))
    return from_bytes(rows.reshape(array.shape), array.dtype)
