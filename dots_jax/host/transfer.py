"""Copying slots between a host buffer and per-layer device arrays.

Both directions are a loop over runs of tokens in which each copy is one slice written in place, so that under donation
the cost follows what is moved and no buffer is ever copied whole.
"""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from dots_jax.host.device import DeviceKV, LayerKV, check_device
from dots_jax.host.moves import Moves, plan
from dots_jax.host.placement import rebuild, relabel, update
from dots_jax.host.regions import as_bits, from_bits, read_block, write_block
from dots_jax.host.slots import check_pair

if TYPE_CHECKING:
    from dots_jax.host.buffers import HostKV


def moves_whole_pages(host: "HostKV") -> bool:
    """Whether transfers of this buffer take whole pages only.

    A layer-first buffer moves single tokens; so do the other layouts when they were asked to serve the "kernel" path.
    Everything else moves pages.
    """
    return host.layout != "layer_first" and host.io_backend != "kernel"


def _rows(array: Array) -> Array:
    """A device array as `[slots, heads, width]` of unsigned integers; a latent row may come without its one head."""
    bits = as_bits(array)
    return bits[:, None] if bits.ndim == 2 else bits


def _plan(host: "HostKV", num_device: int, host_slots: Any, device_slots: Any) -> tuple[Moves, int]:
    sizes: dict[str, Any] = {
        "num_host": host.num_slots,
        "num_device": num_device,
        "page_size": host.spec.page_size,
        "need_pages": moves_whole_pages(host),
    }
    return plan(check_pair(host_slots, device_slots, **sizes), **sizes)


def backup(host: "HostKV", device: DeviceKV, host_slots: Any, device_slots: Any, *, donate: bool) -> "HostKV":
    """See `HostKV.backup`."""
    num_device = check_device(device, host.spec, num_layers=host.spec.num_layers)
    moves, run = _plan(host, num_device, host_slots, device_slots)
    return update(_backup, host, device, moves, donate=donate, run=run)


def _backup(host: "HostKV", device: DeviceKV, moves: Moves, *, run: int) -> "HostKV":
    original, host = host, relabel(host)
    spec = host.spec
    sources = [[_rows(array) for array in (device.k if side.name == "k" else device.v)] for side in host.sides]

    def move(i: Array, leaves: dict[str, Array]) -> dict[str, Array]:
        for side, layers in zip(host.sides, sources, strict=True):
            for layer, rows in enumerate(layers):
                block = lax.dynamic_slice_in_dim(rows, jnp.asarray(moves.device)[i], run)[None]
                leaves[side.leaf] = write_block(
                    leaves[side.leaf],
                    block,
                    side,
                    host.layout,
                    spec.page_size,
                    layer=layer,
                    slot=jnp.asarray(moves.host)[i],
                )
        return leaves

    leaves = {name: as_bits(leaf) for name, leaf in host.leaves.items()}
    leaves = lax.fori_loop(0, moves.total, move, leaves)
    return rebuild(original, {name: from_bits(leaf, spec.dtype) for name, leaf in leaves.items()})


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
    expected = host.spec.num_layers if device_layer is None else max(device.num_layers, 1)
    num_device = check_device(device, host.spec, num_layers=expected)
    layer = check_layer("layer", layer, host.spec.num_layers)
    target = check_layer("device_layer", layer if device_layer is None else device_layer, device.num_layers)
    moves, run = _plan(host, num_device, host_slots, device_slots)
    if isinstance(target, Tracer):
        raise TypeError("load: which device arrays to fill has to be known while tracing; give device_layer.")
    return update(_load, device.layer(target), host, jnp.int32(layer), moves, donate=donate, run=run)


def _load(arrays: LayerKV, host: "HostKV", layer: Array, moves: Moves, *, run: int) -> LayerKV:
    host = relabel(host)
    spec = host.spec
    leaves = {name: as_bits(leaf) for name, leaf in host.leaves.items()}
    given = [array for array in arrays if array is not None]

    def move(i: Array, targets: list[Array]) -> list[Array]:
        return [
            lax.dynamic_update_slice_in_dim(
                rows,
                read_block(
                    leaves[side.leaf],
                    side,
                    host.layout,
                    spec.page_size,
                    layer=layer,
                    num_layers=1,
                    slot=jnp.asarray(moves.host)[i],
                    num_tokens=run,
                )[0],
                jnp.asarray(moves.device)[i],
                axis=0,
            )
            for side, rows in zip(host.sides, targets, strict=True)
        ]

    targets = lax.fori_loop(0, moves.total, move, [_rows(array) for array in given])
    done = [from_bits(rows.reshape(array.shape), spec.dtype) for rows, array in zip(targets, given, strict=True)]
    return LayerKV(*done)
