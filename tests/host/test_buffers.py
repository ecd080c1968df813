import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hosts import LATENT, LEGAL, LEGAL_IDS, SYMMETRIC, T1, filled

from dots_jax.host import AsymmetricHostKV, KVSpec, LatentHostKV, SymmetricHostKV, allocate_host_kv
from dots_jax.host.buffers import CLASSES
from dots_jax.host.layouts import kind_of, leaf_shapes


def build(spec, layout, **kwargs):
    """The buffer's class from arrays that have the right shapes."""
    kind = kind_of(spec)
    shapes = leaf_shapes(spec, kind, layout if layout in ("layer_first", "page_first_direct") else "page_first", 4)
    leaves = {name: jnp.zeros(shape, spec.dtype) for name, shape in shapes.items()}
    return CLASSES[kind](**leaves, spec=spec, layout=layout, **kwargs)  # pyright: ignore[reportCallIssue]


@pytest.fixture
def no_allocation(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("memory was allocated")

    monkeypatch.setattr("dots_jax.host.allocate._zeros", refuse)


@pytest.mark.parametrize("layout", ["layer_first", "page_head", "", "page_unified", "page_first "])
@pytest.mark.parametrize("num_pages", [4, 1 << 40])
def test_founding_error_comes_before_allocation_and_budget(no_allocation, layout, num_pages):
    text = (
        f"Unsupported layout for models with head_dim != v_head_dim: {layout}; "
        "expected 'page_first' or 'page_first_direct'."
    )
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        allocate_host_kv(T1, num_pages, layout=layout, memory_budget=0)
    assert str(caught.value) == text
    assert type(caught.value) is ValueError


def test_layout_comes_before_path(no_allocation):
    with pytest.raises(ValueError, match="head_dim != v_head_dim: layer_first"):
        allocate_host_kv(T1, 4, layout="layer_first", io_backend="nonsense", memory_budget=0)


@pytest.mark.parametrize("layout", ["layer_first", "page_head", ""])
def test_classes_check_the_layout_like_the_factory(layout):
    with pytest.raises(ValueError, match=f"head_dim != v_head_dim: {layout}; expected 'page_first' or"):
        build(T1, layout)


@pytest.mark.parametrize("spec", [SYMMETRIC, LATENT], ids=["symmetric", "latent"])
@pytest.mark.parametrize("layout", ["page_unified", ""])
def test_unknown_layouts_list_the_known_ones(no_allocation, spec, layout):
    with pytest.raises(ValueError, match=f"^Unsupported layout: {layout}.*'layer_first'.*'page_first_direct'"):
        allocate_host_kv(spec, 4, layout=layout)
    with pytest.raises(ValueError, match=f"^Unsupported layout: {layout}"):
        build(spec, layout)


def test_latent_has_no_page_head():
    with pytest.raises(ValueError, match=r"^Unsupported layout: page_head; a latent buffer has"):
        allocate_host_kv(LATENT, 4, layout="page_head")


@pytest.mark.parametrize("spec", [T1, SYMMETRIC, LATENT], ids=["asymmetric", "symmetric", "latent"])
@pytest.mark.parametrize(("layout", "io"), [("page_first", "direct"), ("page_first_direct", "kernel")])
def test_path_that_does_not_fit_is_refused_at_construction(no_allocation, spec, layout, io):
    for construct in (
        lambda: allocate_host_kv(spec, 4, layout=layout, io_backend=io, memory_budget=0),
        lambda: build(spec, layout, io_backend=io),
    ):
        with pytest.raises(ValueError, match=f"'{layout}'.*'{io}'"):
            construct()


def test_v_as_wide_as_k_is_refused():
    spec = KVSpec(2, 1, 192, 128, page_size=2)
    k, v = jnp.zeros((8, 2, 1, 192), jnp.bfloat16), jnp.zeros((8, 2, 1, 192), jnp.bfloat16)
    with pytest.raises(
        ValueError, match=r"AsymmetricHostKV\.v: expected bfloat16 of shape \(8, 2, 1, 128\).*\(8, 2, 1, 192\)"
    ):
        AsymmetricHostKV(k, v, spec=spec, layout="page_first")


@pytest.mark.parametrize("shape", [(8, 3, 2, 5), (8, 2, 2, 4), (7, 3, 2, 4), (0, 3, 2, 4), (8, 3, 8), ()])
def test_wrong_shapes_are_refused(shape):
    v = jnp.zeros((8, 3, 2, 6), jnp.float16)
    with pytest.raises(ValueError, match=r"AsymmetricHostKV\.[kv]: expected float16 of shape"):
        AsymmetricHostKV(jnp.zeros(shape, jnp.float16), v, spec=T1, layout="page_first")


def test_wrong_dtype_and_page_count_are_refused():
    k, v = jnp.zeros((8, 3, 2, 4), jnp.float16), jnp.zeros((8, 3, 2, 6), jnp.float16)
    assert AsymmetricHostKV(k, v, spec=T1, layout="page_first").num_pages == 4
    with pytest.raises(ValueError, match=r"AsymmetricHostKV\.v: expected float16 .* got bfloat16"):
        AsymmetricHostKV(k, v.astype(jnp.bfloat16), spec=T1, layout="page_first")
    with pytest.raises(ValueError, match=r"AsymmetricHostKV\.v: .*\(8, 3, 2, 6\).*4 pages.*\(6, 3, 2, 6\)"):
        AsymmetricHostKV(k, v[:6], spec=T1, layout="page_first")


def test_each_class_wants_its_spec():
    kv = jnp.zeros((2, 8, 3, 2, 4), jnp.float16)
    with pytest.raises(ValueError, match="head_dim 4 and v_head_dim 6; use AsymmetricHostKV"):
        SymmetricHostKV(kv, spec=T1, layout="page_first")
    with pytest.raises(TypeError, match="expected a LatentSpec"):
        LatentHostKV(kv, spec=SYMMETRIC, layout="page_first")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="expected a KVSpec"):
        SymmetricHostKV(kv, spec=LATENT, layout="page_first")  # pyright: ignore[reportArgumentType]


def test_two_arrays_of_one_width():
    k = jnp.zeros((8, 3, 2, 4), jnp.float16)
    assert AsymmetricHostKV(k, k, spec=SYMMETRIC, layout="page_first").num_pages == 4
    with pytest.raises(ValueError, match=r"^Unsupported layout: page_head; an asymmetric buffer has"):
        AsymmetricHostKV(k, k, spec=SYMMETRIC, layout="page_head")


@pytest.mark.parametrize(("spec", "layout"), LEGAL, ids=LEGAL_IDS)
def test_pytree(spec, layout):
    host = allocate_host_kv(spec, 4, layout=layout)
    leaves = jax.tree.leaves(host)
    assert len(leaves) == (2 if isinstance(host, AsymmetricHostKV) else 1)
    assert sum(leaf.nbytes for leaf in leaves) == host.nbytes == 8 * spec.bytes_per_token
    assert (host.num_pages, host.num_slots, host.spec, host.layout) == (4, 8, spec, layout)
    # Placeholders of any kind pass through.
    assert jax.tree.leaves(jax.tree.map(lambda _: None, host)) == []
    jax.tree.map(lambda _: object(), host)
    out = jax.eval_shape(lambda host: host, host)
    assert type(out) is type(host)
    stacked = jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(np.asarray(leaf))] * 2), host)
    mapped = jax.vmap(lambda host: host)(stacked)
    assert jax.tree.structure(mapped) == jax.tree.structure(host)


def test_static_fields_decide_what_is_compiled():
    traces = []

    @jax.jit
    def touch(host):
        traces.append(host.layout)
        return host.num_pages

    for layout in ("page_first", "page_first_direct"):
        for _ in range(2):
            touch(filled(T1, layout, 4)[0])
    assert traces == ["page_first", "page_first_direct"]


@pytest.mark.parametrize(
    ("page_size", "widths", "aligned"),
    [(4, (192, 128), False), (8, (192, 128), True), (4, (128, 192), False), (64, (192, 128), True)],
)
def test_page_alignment_of_the_global_pool(page_size, widths, aligned):
    spec = KVSpec(9, 4, *widths, page_size=page_size)
    for layout in ("page_first", "page_first_direct"):
        assert allocate_host_kv(spec, 2, layout=layout).is_page_aligned(4096) is aligned


def test_page_alignment_needs_both_sides_and_whole_pages():
    assert not allocate_host_kv(T1, 4, layout="page_first").is_page_aligned(4096)
    assert allocate_host_kv(T1, 4, layout="page_first").is_page_aligned(48)
    assert not allocate_host_kv(T1, 4, layout="page_first").is_page_aligned(96)
    spec = KVSpec(2, 4, 128, page_size=8)
    assert allocate_host_kv(spec, 2, layout="page_head").is_page_aligned()
    assert not allocate_host_kv(spec, 2, layout="layer_first").is_page_aligned()


@pytest.mark.parametrize("nbytes", [0, -4096])
def test_page_alignment_wants_a_positive_size(nbytes):
    with pytest.raises(ValueError, match=f"nbytes: expected at least 1, got {nbytes}"):
        build(T1, "page_first").is_page_aligned(nbytes)


@pytest.mark.parametrize(("spec", "layout"), LEGAL, ids=LEGAL_IDS)
@pytest.mark.parametrize("value", [None, [0.0], 1.0, object()], ids=["None", "list", "float", "object"])
def test_a_leaf_that_is_no_array_is_refused_by_name(spec, layout, value):
    leaves = allocate_host_kv(spec, 4, layout=layout).leaves
    for name in leaves:
        text = rf"HostKV\.{name}: expected an array of float16, got {type(value).__name__}"
        with pytest.raises(ValueError, match=text):
            CLASSES[kind_of(spec)](**(leaves | {name: value}), spec=spec, layout=layout)
