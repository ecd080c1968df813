import itertools

import numpy as np
import pytest
from hosts import LATENT, LEGAL, LEGAL_IDS, SYMMETRIC, T1

from dots_jax.host import layouts


def offset_by_formula(layout, *, t, l, h, num_slots, p, num_layers, heads, width, itemsize):  # noqa: E741
    stride = heads * width * itemsize
    ldim = stride * num_layers
    return {
        "layer_first": l * num_slots * stride + t * stride + h * width * itemsize,
        "page_first": t * ldim + l * stride + h * width * itemsize,
        "page_first_direct": (t // p) * p * ldim + l * p * stride + (t % p) * stride + h * width * itemsize,
        "page_head": (t // p) * p * ldim + h * p * (ldim // heads) + (t % p) * (ldim // heads) + l * (stride // heads),
    }[layout]


@pytest.mark.parametrize(("spec", "layout"), LEGAL, ids=LEGAL_IDS)
def test_byte_offsets_follow_the_formulas(spec, layout):
    num_pages = 4
    for side in layouts.sides_of(spec, layouts.kind_of(spec)):
        seen = set()
        for t, l, h in itertools.product(range(8), range(3), range(side.heads)):  # noqa: E741
            got = layouts.byte_offset(spec, side, layout, num_pages, slot=t, layer=l, head=h)
            assert got == offset_by_formula(
                layout, t=t, l=l, h=h, num_slots=8, p=2, num_layers=3, heads=side.heads, width=side.width, itemsize=2
            )
            seen.add(got)
        size = layouts.side_nbytes(spec, side, num_pages)
        assert seen == set(range(0, size, side.width * 2))


def test_shapes():
    def shapes(spec, layout):
        return list(layouts.leaf_shapes(spec, layouts.kind_of(spec), layout, 4).values())

    assert shapes(T1, "page_first") == [(8, 3, 2, 4), (8, 3, 2, 6)]
    assert shapes(T1, "page_first_direct") == [(4, 3, 2, 2, 4), (4, 3, 2, 2, 6)]
    assert shapes(SYMMETRIC, "layer_first") == [(2, 3, 8, 2, 4)]
    assert shapes(SYMMETRIC, "page_first") == [(2, 8, 3, 2, 4)]
    assert shapes(SYMMETRIC, "page_first_direct") == [(2, 4, 3, 2, 2, 4)]
    assert shapes(SYMMETRIC, "page_head") == [(2, 4, 2, 2, 3, 4)]
    assert shapes(LATENT, "layer_first") == [(3, 8, 1, 5)]
    assert shapes(LATENT, "page_first") == [(8, 3, 1, 5)]
    assert shapes(LATENT, "page_first_direct") == [(4, 3, 2, 1, 5)]


@pytest.mark.parametrize(("spec", "layout"), LEGAL, ids=LEGAL_IDS)
@pytest.mark.parametrize("num_pages", [1, 4])
def test_leaves_hold_exactly_the_tokens(spec, layout, num_pages):
    kind = layouts.kind_of(spec)
    shapes = layouts.leaf_shapes(spec, kind, layout, num_pages)
    assert len(shapes) == (2 if kind == "asymmetric" else 1)
    total = sum(int(np.prod(shape)) for shape in shapes.values()) * 2
    assert total == layouts.total_nbytes(spec, kind, layout, num_pages) == num_pages * 2 * spec.bytes_per_token


@pytest.mark.parametrize(
    ("kind", "layout", "kernel", "direct"),
    [
        ("symmetric", "layer_first", True, True),
        ("symmetric", "page_first", True, False),
        ("symmetric", "page_first_direct", False, True),
        ("symmetric", "page_head", True, False),
        ("asymmetric", "page_first", True, False),
        ("asymmetric", "page_first_direct", False, True),
        ("latent", "layer_first", True, True),
        ("latent", "page_first", True, False),
        ("latent", "page_first_direct", False, True),
    ],
)
def test_which_path_goes_with_which_layout(kind, layout, kernel, direct):
    layouts.check_io_backend(kind, layout, None)
    for io_backend, fits in {"kernel": kernel, "direct": direct}.items():
        if fits:
            layouts.check_io_backend(kind, layout, io_backend)
        else:
            other = "direct" if io_backend == "kernel" else "kernel"
            with pytest.raises(
                ValueError, match=rf"'{layout}'.*'{io_backend}'.*{layout} goes with io_backend '{other}'"
            ):
                layouts.check_io_backend(kind, layout, io_backend)


@pytest.mark.parametrize("io_backend", ["kernel_ascend", "", "Kernel"])
def test_unknown_path(io_backend):
    with pytest.raises(ValueError, match="expected 'kernel' or 'direct'"):
        layouts.check_io_backend("symmetric", "page_first", io_backend)
