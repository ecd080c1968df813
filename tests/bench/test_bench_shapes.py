import numpy as np
import pytest

from dots_jax.bench import shapes
from dots_jax.bench.floor import Ceilings
from dots_jax.bench.shapes import Shape


def by_name(name):
    (shape,) = shapes.select([name])
    return shape


@pytest.mark.parametrize(
    ("name", "floor_us", "bound_by"),
    [
        ("h64-s1-b128", 41, "bytes"),
        ("h64-s2-b128", 49, "bytes"),
        ("h64-s4-b128", 90, "flops"),
        ("h8-s1-b128", 34, "bytes"),
        ("h8-s2-b128", 35, "bytes"),
        ("h8-s4-b128", 37, "bytes"),
    ],
)
def test_floors_at_an_h200s_measured_ceilings(name, floor_us, bound_by):
    h200 = Ceilings(bytes_per_s=4.3e12, flops_per_s=788e12)
    assert h200.floor_s(by_name(name), 2) * 1e6 == pytest.approx(floor_us, abs=1)
    assert h200.bound_by(by_name(name), 2) == bound_by


@pytest.mark.parametrize(("window", "context", "seq"), [(5, 20, 3), (5, 4, 3), (30, 20, 4), (None, 20, 4), (1, 9, 1)])
def test_keys_by_drawing_the_mask(window, context, seq):
    position = context - seq + np.arange(seq)[:, None]
    key = np.arange(context)
    mask = (key <= position) & ((key > position - window) if window else True)
    shape = Shape("x", batch=3, seq=seq, heads=2, width=6, v_dim=4, window=window, context=context, scale=1.0)
    assert shape.keys_seen == mask.sum()
    assert shape.keys_read == mask.any(axis=0).sum()
    assert shape.flops == 3 * 2 * mask.sum() * 2 * (6 + 4)
    assert shape.min_bytes(2) == 3 * 2 * (mask.any(axis=0).sum() * 6 + seq * 2 * (6 + 4))


def test_names_are_unique_and_the_defaults_exist():
    names = [shape.name for shape in shapes.ALL]
    assert len(set(names)) == len(names) == 36 + 12
    for platform in ("cpu", "gpu"):
        for quick in (False, True):
            assert set(shapes.default_names(platform, quick)) <= set(names)
    assert len(shapes.default_names("gpu", quick=False)) == len(names)


def test_select_by_pattern_keeps_the_order_and_refuses_what_matches_nothing():
    assert [shape.batch for shape in shapes.select(["h8-s4-b*"])] == [1, 8, 32, 64, 128, 256]
    assert shapes.select(["full4k-*-b1", "h64-s1-b1"])[0].name == "h64-s1-b1"
    with pytest.raises(ValueError, match="no shape matches 'h65-"):
        shapes.select(["h8-s1-b1", "h65-*"])
