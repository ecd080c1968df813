"""Per-layer device arrays on the other side of a transfer."""

from typing import Any, NamedTuple

from jax import Array
from jaxtyping import Shaped

from dots_jax.host.layouts import Side, sides_of
from dots_jax.host.specs import Spec
from dots_jax.pytree import frozen_pytree


class LayerKV(NamedTuple):
    """Device arrays of one layer.

    Attributes:
      k: `[slots, heads, head_dim]`, or the latent rows `[slots, 1, latent_dim]` (or `[slots, latent_dim]`).
      v: `[slots, heads, v_head_dim]`; None for a latent cache.
    """

    k: Shaped[Array, "slots ..."]
    v: Shaped[Array, "slots ..."] | None = None


@frozen_pytree()
class DeviceKV:
    """One array per layer and side, as the device keeps them.

    Args:
      k: a `[slots, heads, head_dim]` array per layer. A latent cache has its rows here, `[slots, 1, latent_dim]` or
        `[slots, latent_dim]`.
      v: a `[slots, heads, v_head_dim]` array per layer; empty for a latent cache.
    """

    k: tuple[Shaped[Array, "slots ..."], ...]
    v: tuple[Shaped[Array, "slots ..."], ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "k", tuple(self.k))
        object.__setattr__(self, "v", () if self.v is None else tuple(self.v))
        if self.v and len(self.v) != len(self.k):
            raise ValueError(f"DeviceKV: expected as many V as K layers, got {len(self.k)} K and {len(self.v)} V.")

    @property
    def num_layers(self) -> int:
        """Layers held."""
        return len(self.k)

    def layer(self, index: int) -> LayerKV:
        """Arrays of one layer."""
        return LayerKV(self.k[index], self.v[index] if self.v else None)

    def with_layer(self, index: int, arrays: LayerKV | tuple[Any, ...]) -> "DeviceKV":
        """A copy of the tuples in which one layer's arrays are replaced (what `load` returned)."""
        k, v = list[Any](self.k), list[Any](self.v)
        k[index] = arrays[0]
        if v:
            v[index] = arrays[1]
        return DeviceKV(tuple(k), tuple(v))

    def append(self, *drafts: "DeviceKV") -> "DeviceKV":
        """These layers, then those of `drafts` in the order given: the packed list that a buffer with drafts takes."""
        k, v = self.k, self.v
        for draft in drafts:
            k, v = (*k, *draft.k), (*v, *draft.v)
        return DeviceKV(k, v)


def is_array(value: Any) -> bool:
    """Whether a value has a shape and a dtype to check: arrays of JAX and NumPy, traced ones, and abstract shapes."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def check_device(device: DeviceKV, spec: Spec, *, num_layers: int) -> int:
    """Checks device arrays against a spec, by shape and dtype alone.

    Args:
      device: the arrays.
      spec: what they have to match.
      num_layers: layers they must have.

    Returns:
      Slots of each array.

    Raises:
      TypeError: not a `DeviceKV`.
      ValueError: layers, heads, widths, dtype or slots differ; naming the array, expected and got.
    """
    if not isinstance(device, DeviceKV):
        raise TypeError(f"device: expected a DeviceKV, got {type(device).__name__}.")
    num_slots = None
    sides = sides_of(spec, "asymmetric")
    if len(sides) == 1 and device.v:
        raise ValueError("device.v: expected no V for a latent buffer, got arrays.")
    for side in sides:
        arrays = device.k if side.name == "k" else device.v
        if len(arrays) != num_layers:
            raise ValueError(f"device.{side.name}: expected {num_layers} layers, got {len(arrays)}.")
        for layer, array in enumerate(arrays):
            check_row(f"device.{side.name}[{layer}]", array, side, spec)
            if num_slots is None:
                num_slots = array.shape[0]
            if array.shape[0] != num_slots:
                raise ValueError(f"device.{side.name}[{layer}]: expected {num_slots} slots, got {array.shape[0]}.")
    assert num_slots is not None
    return num_slots


def check_row(name: str, array: Any, side: Side, spec: Spec) -> None:
    """Checks one device array's row against one side.

    Raises:
      ValueError: naming the array, expected and got.
    """
    if not is_array(array):
        raise ValueError(f"{name}: expected an array of {spec.dtype}, got {type(array).__name__}.")
    row = tuple(array.shape[1:])
    if array.ndim < 2 or row[-1] != side.width:
        raise ValueError(
            f"{name}: expected rows {side.width} wide ({side.name.upper()} of {spec}), got "
            f"{row[-1] if row else 'no width'} from shape {tuple(array.shape)}."
        )
    if row != (side.heads, side.width) and (side.heads != 1 or row != (side.width,)):
        raise ValueError(f"{name}: expected shape [slots, {side.heads}, {side.width}], got {tuple(array.shape)}.")
    if array.dtype != spec.dtype:
        raise ValueError(f"{name}: expected {spec.dtype}, got {array.dtype}.")
