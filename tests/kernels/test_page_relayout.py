"""The page relayout kernels, simulated with race detection, against indexing in NumPy."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from pallas_kernels.page_relayout import block_to_pages, kernels, pages_to_block, unsupported_reason
from pallas_kernels.page_relayout.tiling import STAGES, Order, Tiling

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(autouse=True)
def no_races():
    yield
    races = interpret_pallas_call.get_races()
    assert races is None or not races.races_found


@dataclasses.dataclass(frozen=True)
class Case:
    """Random bytes (NaN patterns among them) in every layer, and ids that are out of range on both sides."""

    layers: int = STAGES + 2
    num_pages: int = 5
    page_size: int = 4
    heads: int = 2
    width: int = 32
    dtype: np.dtype = BFLOAT16
    order: Order = "token_major"
    ids: tuple[int, ...] = (3, -1, 0, 5, 4, -(2**31), 2**31 - 1)

    def caches(self) -> list[np.ndarray]:
        shape = (self.num_pages * self.page_size, self.heads, self.width)
        return [random_bits(shape, self.dtype, seed) for seed in range(self.layers)]

    def block(self) -> np.ndarray:
        return random_bits(self.pages_of(self.caches()).shape, self.dtype, seed=99)

    def in_range(self) -> list[tuple[int, slice]]:
        size = self.page_size
        return [(i, slice(p * size, (p + 1) * size)) for i, p in enumerate(self.ids) if 0 <= p < self.num_pages]

    def pages_of(self, caches: list[np.ndarray]) -> np.ndarray:
        shape = (len(self.ids), self.page_size, self.layers, self.heads, self.width)
        block = np.zeros(shape, self.dtype)
        for i, slots in self.in_range():
            block[i] = np.stack([cache[slots] for cache in caches], axis=1)
        return block if self.order == "token_major" else block.swapaxes(1, 2)

    def with_pages(self, caches: list[np.ndarray], block: np.ndarray) -> list[np.ndarray]:
        block = block if self.order == "token_major" else block.swapaxes(1, 2)
        caches = [cache.copy() for cache in caches]
        for layer, cache in enumerate(caches):
            for i, slots in self.in_range():
                cache[slots] = block[i, :, layer]
        return caches


def random_bits(shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    raw = np.random.default_rng(seed).integers(0, 256, size=(*shape, dtype.itemsize), dtype=np.uint8)
    return raw.view(dtype)[..., 0]


def assert_same_bytes(got, expected: np.ndarray):
    got = np.asarray(got)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(
        np.ascontiguousarray(got).view(np.uint8), np.ascontiguousarray(expected).view(np.uint8)
    )


def check(case: Case):
    caches, block = case.caches(), case.block()
    layers, ids = [jnp.asarray(cache) for cache in caches], jnp.asarray(case.ids, jnp.int32)
    got = pages_to_block(layers, ids, case.page_size, order=case.order, interpret=True)
    assert_same_bytes(got, case.pages_of(caches))
    new = block_to_pages(jnp.asarray(block), layers, ids, case.page_size, order=case.order, interpret=True)
    for layer, expected in zip(new, case.with_pages(caches, block), strict=True):
        assert_same_bytes(layer, expected)
    for layer, before in zip(layers, caches, strict=True):
        assert_same_bytes(layer, before)  # arguments that were not donated keep their bytes


def test_more_layers_than_stages():
    check(Case())


def test_layer_major_fp8():
    check(Case(layers=2, dtype=np.dtype(ml_dtypes.float8_e4m3fn), order="layer_major", ids=(1, 4, -1)))


def test_a_page_of_many_tiles():
    """More than one tile of tokens and of columns."""
    case = Case(layers=1, num_pages=3, page_size=32, heads=3, width=128, dtype=np.dtype(np.float32), ids=(2, 0))
    tiling = Tiling(1, 96, 32, 384, 4, 2, "token_major")
    assert tiling.grid == (2, 2, 2)
    check(case)


@pytest.mark.long
@pytest.mark.parametrize("order", ["token_major", "layer_major"])
@pytest.mark.parametrize(
    "dtype", [np.int8, ml_dtypes.float8_e5m2, np.float16, ml_dtypes.bfloat16, np.int32, np.float32]
)
@pytest.mark.parametrize("layers", [1, STAGES, STAGES + 1, 2 * STAGES + 1])
def test_sweep(layers, dtype, order):
    check(Case(layers=layers, dtype=np.dtype(dtype), order=order, ids=(1, 0, -1, 4)))


def test_a_planted_mistake_is_seen(monkeypatch):
    """Layers in the wrong order: same bytes, other places."""
    stream = kernels._stream
    monkeypatch.setattr(kernels, "_stream", lambda sources, *rest: stream(sources[::-1], *rest))
    with pytest.raises(AssertionError):
        check(Case(layers=2, ids=(1,)))


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"width": 5}, "30 bytes is not a multiple of 16"),
        ({"slots": 130}, "130 slots are not whole pages of 64"),
        ({"dtype": np.float64}, "float64 is not 1, 2 or 4 bytes"),
        ({"num_layers": 65}, "65 layers are not in 1..64"),
        ({"num_layers": 0}, "0 layers"),
        ({"page_size": 1, "slots": 4, "width": 8}, "48 bytes is not a multiple of 128"),
    ],
)
def test_unsupported(changes, fragment):
    shapes = {"num_layers": 39, "slots": 128, "page_size": 64, "heads": 3, "width": 64, "dtype": np.float16}
    assert unsupported_reason(**shapes) is None
    reason = unsupported_reason(**{**shapes, **changes})
    assert reason is not None
    assert fragment in reason


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("columns", [192 * 8, 128 * 4, 1088, 576, 656])
def test_tiles_fit_the_copy_engine(columns, itemsize):
    tiling = Tiling(39, 1024, 64, columns, itemsize, 3, "token_major")
    assert tiling.tile_columns <= 256
    assert tiling.tile_columns * itemsize % 16 == 0
    assert 3 * (STAGES * tiling.tile_bytes + 2048) <= 228 * 1024  # blocks of one multiprocessor
    pages, tokens, tiles = tiling.grid
    assert (pages, tokens * tiling.tile_tokens, tiles * tiling.tile_columns) == (3, 64, columns)


@pytest.mark.parametrize(
    ("columns", "itemsize"), [(192 * 8, 2), (128 * 8, 2), (1088, 2), (1088, 4), (576, 2), (576, 1), (656, 1)]
)
def test_tiles_of_served_caches_are_whole_vectors_of_all_threads(columns, itemsize):
    """64 bits for each of 128 threads: JAX 0.11 cannot store zeros to a tile of another size."""
    assert Tiling(39, 1024, 64, columns, itemsize, 3, "token_major").tile_bytes % 1024 == 0


def test_refused_arguments():
    layers = [jnp.zeros((8, 2, 32), jnp.float16)] * 2
    ids = jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="one shape and dtype"):
        pages_to_block([layers[0], layers[0][:4]], ids, 4)
    with pytest.raises(ValueError, match=r"block: expected \(1, 4, 2, 2, 32\) float16, got \(1, 2, 4, 2, 32\)"):
        block_to_pages(jnp.zeros((1, 2, 4, 2, 32), jnp.float16), layers, ids, 4)
    with pytest.raises(ValueError, match="no pages"):
        pages_to_block(layers, ids[:0], 4)
