"""The swapped body (few query rows), simulated with race detection, against the float32 definition."""

import dataclasses

import decode_cases
import numpy as np
import pytest
from decode_cases import ADVERSARIAL, Case, check
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from pallas_kernels.swa_latent_decode import Config, default_config, swapped_roles
from pallas_kernels.swa_latent_decode.config import SMEM_BYTES_PER_BLOCK
from pallas_kernels.swa_latent_decode.ring import RingShape

# The simulated products meet the poison of keys that are masked afterwards.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")


@pytest.fixture(autouse=True)
def no_races():
    yield
    races = interpret_pallas_call.get_races()
    assert races is None or not races.races_found


def config(case: Case, splits: int = 1, rows: int | None = None) -> Config:
    """The swapped plan with the narrowest tile that holds all rows, or 32 rows a tile."""
    rows = min(32, -(-case.seq * case.heads // 8) * 8) if rows is None else rows
    return Config("swapped", splits=splits, tile_rows=rows)


def by_name(*names: str) -> list[Case]:
    cases = {case.name: case for case in ADVERSARIAL}
    return [cases[name] for name in names]


@pytest.mark.parametrize(
    "case",
    by_name(
        "page ids huge, negative and one past the pool",
        "window start and end inside tiles of the pool's last pages",
        "ragged counts",
    ),
    ids=lambda case: case.name,
)
def test_adversarial(case):
    check(case, config(case, splits=2))


@pytest.mark.long
@pytest.mark.parametrize("case", ADVERSARIAL, ids=lambda case: case.name)
def test_every_adversarial_case(case):
    check(case, config(case))


def test_released_geometry_four_drafts():
    """All 32 rows and a ring that holds barely more than one page; the third page reuses every slot."""
    case = Case("released", (190,), seq=4, width=1088, v_dim=1024, window=130, table_width=3)
    check(case, config(case))


def test_several_tiles_of_rows():
    case = Case("tiles", (70,), seq=2, heads=24, window=None, table_width=2)
    assert config(case).num_tiles(case.seq, case.heads) == 2
    check(case, config(case))


def test_two_runs_are_bit_identical():
    case = Case("twice", (140,), heads=1, window=None)
    first, second = (decode_cases.run(case, config(case, splits=2)) for _ in range(2))
    assert (first[0].tobytes(), first[1].tobytes()) == (second[0].tobytes(), second[1].tobytes())


SWEEP = [
    Case(f"b{len(lengths)}-s{seq}-h{heads}-l{lengths}-w{window}", lengths, seq=seq, heads=heads, window=window,
         table_width=-(-max(*lengths, 1) // 64), seed=seq)
    for lengths, seq, heads, window in (
        ((0, 0, 0), 1, 8, 513),
        ((1, 63, 64), 1, 8, 64),
        ((65, 512, 513), 2, 8, 513),
        ((514, 576, 577), 4, 8, 513),
        ((640, 641, 5), 4, 8, 513),
        ((641, 640, 639), 1, 1, 1),
        ((513,), 8, 1, 65),
        ((577,), 1, 24, 513),
        ((641,), 1, 64, 513),
        ((130,), 8, 8, 65),
    )
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("case", SWEEP, ids=lambda case: case.name)
def test_sweep(case, splits):
    check(case, config(case, splits))


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "splits"),
    [
        (Case("released-s1", (641,), width=1088, v_dim=1024, window=513, table_width=11), 1),
        (Case("released-s2", (577,), seq=2, width=1088, v_dim=1024, window=513, table_width=11), 10),
        (Case("default-full", (321, 64), seq=3, width=576, v_dim=512, window=None, table_width=6), 2),
        (Case("no rope", (130,), width=256, v_dim=256, window=100, table_width=3), 1),
        (Case("two rope chunks", (130,), width=256, v_dim=128, window=100, table_width=3), 1),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_geometries(case, splits):
    check(case, config(case, splits))


MISTAKES = {
    "window one key too wide": {"window": 66},
    "window one key too narrow": {"window": 64},
    "one more token": {"lengths": (131,)},
    "scale one percent off": {"scale": 1.01},
}


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES)
def test_comparison_sees_planted_mistakes(mistake):
    """The tolerances are tight enough to tell a kernel that does something slightly different."""
    case = Case("planted", (130,), window=65, table_width=3, scale=1.0)
    inputs = decode_cases.build(case)
    inputs = dataclasses.replace(inputs, kv_pages=np.where(np.isfinite(inputs.kv_pages), inputs.kv_pages, 0.1))
    wrong = dataclasses.replace(case, **MISTAKES[mistake])
    wrong_inputs = dataclasses.replace(inputs, lengths=np.asarray(wrong.lengths, np.int32))
    got = decode_cases.run(wrong, config(case), wrong_inputs)
    with pytest.raises(AssertionError):
        decode_cases.compare(case, got, decode_cases.reference(case, inputs))


@pytest.mark.long
def test_comparison_sees_poison(monkeypatch):
    """Without the zeroing of unseen tokens their NaN comes back through 0 * NaN."""
    monkeypatch.setattr(swapped_roles, "_zero_unseen", lambda *_: None)
    case = Case("poison", (70,), table_width=2)
    with pytest.raises(AssertionError):
        check(case, config(case))


@pytest.mark.parametrize(("rows", "slots"), [(8, 25), (16, 23), (24, 20), (32, 18)])
def test_ring_fills_shared_memory(rows, slots):
    shape = RingShape(1088, 1024, rows)
    assert shape.slots == slots > shape.chunks == 17
    assert shape.smem_bytes <= SMEM_BYTES_PER_BLOCK < shape.smem_bytes + 64 * 64 * 2
    assert Config("swapped", tile_rows=rows).smem_bytes(1088, 1024) == shape.smem_bytes


def test_ring_walks_every_column_once():
    shape = RingShape(1088, 1024, 8)
    assert [int(shape.column(k)) for k in range(17)] == [1024, *range(0, 1024, 64)]
    assert [int(shape.slot(24, k)) for k in range(3)] == [24, 0, 1]


@pytest.mark.parametrize(("heads", "seq", "plan"), [(8, 4, "swapped"), (8, 5, "column_split"), (1, 1, "swapped")])
def test_few_rows_run_swapped(heads, seq, plan):
    chosen = default_config(128, seq, heads, 1088, 1024, 513, 16, np.float16)
    assert chosen.plan == plan
    assert chosen.tile_rows >= min(heads * seq, 64)
