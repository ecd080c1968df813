"""Geometries, device arrays and a NumPy oracle shared by the tests of host buffers."""

import jax
import jax.numpy as jnp
import numpy as np

from dots_jax.host import AsymmetricHostKV, DeviceKV, KVSpec, LatentSpec, Spec, allocate_host_kv

T1 = KVSpec(3, 2, 4, 6, page_size=2, dtype=jnp.float16)
F1_GLOBAL = KVSpec(9, 4, 192, 128)
F1_SWA = KVSpec(39, 8, 192, 128)
SYMMETRIC = KVSpec(3, 2, 4, page_size=2, dtype=jnp.float16)
LATENT = LatentSpec(3, 5, page_size=2, dtype=jnp.float16)

# Every buffer there is: a spec and a layout it has.
LEGAL = [
    *((T1, layout) for layout in ("page_first", "page_first_direct")),
    *((SYMMETRIC, layout) for layout in ("layer_first", "page_first", "page_first_direct", "page_head")),
    *((LATENT, layout) for layout in ("layer_first", "page_first", "page_first_direct")),
]
LEGAL_IDS = [f"{type(spec).__name__}-{getattr(spec, 'v_head_dim', 0)}-{layout}" for spec, layout in LEGAL]


def bits(array) -> np.ndarray:
    """The bytes of an array as unsigned integers, with its shape."""
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def random_device(spec: Spec, num_slots: int, seed: int = 0) -> DeviceKV:
    """Device arrays of random bytes: NaN payloads and infinities included."""
    rng = np.random.default_rng(seed)

    def layers(width: int):
        shape = (num_slots, spec.num_heads, width * spec.itemsize)
        return tuple(
            jnp.asarray(rng.integers(0, 256, shape, np.uint8).view(spec.dtype)) for _ in range(spec.num_layers)
        )

    if isinstance(spec, LatentSpec):
        return DeviceKV(layers(spec.latent_dim))
    return DeviceKV(layers(spec.head_dim), layers(spec.v_width))


def zeros_like(device: DeviceKV) -> DeviceKV:
    return jax.tree.map(jnp.zeros_like, device)


def canonical(host) -> list[np.ndarray]:
    """Each side as `[slot, layer, head, width]` of unsigned integers, whatever the layout."""
    spec, order = (
        host.spec,
        {
            "layer_first": lambda a: a.transpose(1, 0, 2, 3),
            "page_first": lambda a: a,
            "page_first_direct": lambda a: a.transpose(0, 2, 1, 3, 4).reshape(-1, a.shape[1], *a.shape[3:]),
            "page_head": lambda a: a.transpose(0, 2, 3, 1, 4).reshape(-1, a.shape[3], a.shape[1], a.shape[4]),
        }[host.layout],
    )
    if isinstance(host, AsymmetricHostKV):
        sides = [bits(host.k), bits(host.v)]
    elif isinstance(spec, LatentSpec):
        sides = [bits(host.kv)]
    else:
        sides = list(bits(host.kv))
    return [order(side) for side in sides]


def stacked(device: DeviceKV) -> list[np.ndarray]:
    """Device arrays as `[slot, layer, head, width]` of unsigned integers, one per side."""
    return [np.stack([bits(array) for array in side], axis=1) for side in (device.k, device.v) if side]


def filled(spec: Spec, layout: str, num_pages: int, seed: int = 1, **kwargs):
    """A buffer of random bytes, and the device arrays it was filled from (the same slots)."""
    host = allocate_host_kv(spec, num_pages, layout=layout, **kwargs)
    device = random_device(spec, num_pages * spec.page_size, seed)
    slots = np.arange(num_pages * spec.page_size)
    return host.backup(device, slots, slots), device
