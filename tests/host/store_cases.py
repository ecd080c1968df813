"""Buffers of random bytes for the tests of the page store, made without compiling anything."""

import jax
import numpy as np

from dots_jax.host import Spec
from dots_jax.host.buffers import CLASSES
from dots_jax.host.layouts import kind_of, leaf_shapes


def random_host(spec: Spec, layout: str, num_pages: int, seed: int = 1):
    """A buffer of random bytes."""
    rng = np.random.default_rng(seed)
    kind, leaves = kind_of(spec), {}
    for name, shape in leaf_shapes(spec, kind, layout, num_pages).items():
        data = rng.integers(0, 256, (*shape[:-1], shape[-1] * spec.itemsize), np.uint8)
        leaves[name] = jax.device_put(data.view(spec.dtype))
    return CLASSES[kind](**leaves, spec=spec, layout=layout)


def page_bytes(host) -> list[bytes]:
    """Each page's bytes: K in the order layer, token, head, width, then V; computed from the arrays' definition."""
    spec, order = host.spec, {"layer_first": "lshw", "page_first": "slhw"}
    pages = [b""] * host.num_pages
    leaves = [np.asarray(leaf) for leaf in host.leaves.values()]
    sides = list(leaves[0]) if type(host).__name__ == "SymmetricHostKV" else leaves
    for side in sides:
        if host.layout in order:
            side = side if host.layout == "layer_first" else side.swapaxes(0, 1)  # layer, slot, head, width
            by_page = side.reshape(side.shape[0], host.num_pages, spec.page_size, *side.shape[2:]).swapaxes(0, 1)
        elif host.layout == "page_first_direct":
            by_page = side
        else:  # page, head, offset, layer, width
            by_page = side.transpose(0, 3, 2, 1, 4)
        for page in range(host.num_pages):
            pages[page] += by_page[page].tobytes()
    return pages
