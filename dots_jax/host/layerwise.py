"""Loading layer by layer, so that one layer is used while the next ones are still moving."""

import collections
import functools
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from dots_jax.host import transfer
from dots_jax.host.device import DeviceKV, LayerKV
from dots_jax.host.workers import blocking_bytes, start

if TYPE_CHECKING:
    from dots_jax.host.buffers import HostKV


class LoadedLayer(NamedTuple):
    """One layer, loaded.

    Attributes:
      layer: its number.
      arrays: its new device arrays.
    """

    layer: int
    arrays: LayerKV


class LayerLoads(Iterator[LoadedLayer]):
    """Loads of consecutive layers, handed out in order and each once.

    A layer's arrays exist only in the item that `next` returns for it, so that no layer can be read before its load was
    started, and a load is started no more than `prefetch` layers ahead of the one in use. Starting a load does not wait
    for it: the copy of the layers ahead runs while the caller computes with this one. Do not donate the buffer to
    something else before the last layer has come.
    """

    def __init__(
        self,
        host: "HostKV",
        device: DeviceKV,
        host_slots: Any,
        device_slots: Any,
        *,
        prefetch: int = 1,
        donate: bool = False,
    ):
        """Checks everything and starts nothing.

        Args:
          host: the buffer.
          device: arrays of every layer, draft layers last.
          host_slots: slots of the buffer.
          device_slots: slots of the device arrays, one for each host slot.
          prefetch: layers whose load runs ahead of the one handed out; 0 loads each when it is asked for.
          donate: give up the device arrays of each layer as its load starts.

        Raises:
          ValueError: `prefetch` is negative, or the arrays or slots are refused as by `HostKV.load`.
        """
        if prefetch < 0:
            raise ValueError(f"prefetch: expected at least 0, got {prefetch}.")
        self._start = transfer.prepare_loads(host, device, host_slots, device_slots, donate=donate)
        self._layers = iter(range(host.spec.num_layers))
        self._ahead: collections.deque[tuple[int, Future]] = collections.deque()
        row = host.spec.k_token_stride + host.spec.v_token_stride
        self._nbytes = blocking_bytes((host, device, device_slots), row * len(device_slots))
        self._prefetch = prefetch

    def __next__(self) -> LoadedLayer:
        """Hands out the next layer, after starting the loads that may run ahead of it."""
        while len(self._ahead) <= self._prefetch and (layer := next(self._layers, None)) is not None:
            call = functools.partial(self._start, layer)
            self._ahead.append((layer, start(call, self._nbytes if self._prefetch else 0)))
        if not self._ahead:
            raise StopIteration
        layer, arrays = self._ahead.popleft()
        return LoadedLayer(layer, arrays.result())
