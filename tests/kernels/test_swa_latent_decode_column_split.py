"""The column-split body, simulated with race detection, against the float32 definition."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_cases import ADVERSARIAL, Case, build, check, compare, covering, reference, run
from sharded_decode import BY_HEADS, BY_ROWS, CASE, arrays, sharded

from pallas_kernels.swa_latent_decode import Config, column_split_tile, decode, exchange, visible

# The simulated products meet the poison of keys that are masked afterwards.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

WHOLE, HALF = Config("column_split", block_tokens=64), Config("column_split")


@pytest.mark.parametrize("case", ADVERSARIAL, ids=lambda case: case.name)
def test_adversarial(case):
    check(case, WHOLE)


@pytest.mark.parametrize("case", ADVERSARIAL[2:4], ids=lambda case: case.name)
def test_adversarial_in_half_pages_with_splits(case):
    check(case, dataclasses.replace(HALF, splits=2))


def test_released_geometry():
    check(Case("released", (600,), heads=64, width=1088, v_dim=1024, window=160, table_width=10), HALF)


def test_default_geometry_with_splits_and_two_tiles():
    case = Case("default", (100,), seq=4, heads=24, width=576, v_dim=512, window=None, table_width=2)
    check(case, dataclasses.replace(WHOLE, splits=2))


@pytest.mark.parametrize(("width", "v_dim"), [(128, 128), (448, 384)], ids=["no rope", "quarters of 96 columns"])
def test_other_widths(width, v_dim):
    check(Case("width", (100,), width=width, v_dim=v_dim, table_width=2), WHOLE)


def test_two_runs_are_bit_identical():
    case = Case("twice", (130, 66), seq=2)
    (out, lse), (again, lse_again) = (run(case, HALF) for _ in range(2))
    assert (out.tobytes(), lse.tobytes()) == (again.tobytes(), lse_again.tobytes())


MISTAKEN = Case("mistaken", (150, 129), seq=1, window=65, table_width=3, seed=3)


def test_planted_window_off_by_one_is_seen(monkeypatch):
    limits = visible.row_limits
    monkeypatch.setattr(column_split_tile, "row_limits", lambda *args, **named: limits(*args, **named) - 1)
    with pytest.raises(AssertionError):
        check(MISTAKEN, WHOLE)


def test_planted_dropped_key_is_seen():
    inputs = build(MISTAKEN)
    expected = reference(dataclasses.replace(MISTAKEN, window=64), inputs)
    with pytest.raises(AssertionError):
        compare(MISTAKEN, run(MISTAKEN, WHOLE, inputs), expected)


def test_planted_shifted_columns_are_seen():
    inputs = build(MISTAKEN)
    shifted = dataclasses.replace(inputs, kv_pages=np.roll(inputs.kv_pages, 1, axis=2))
    with pytest.raises(AssertionError):
        compare(MISTAKEN, run(MISTAKEN, WHOLE, shifted), reference(MISTAKEN, inputs))


def test_planted_forgotten_peer_is_seen(monkeypatch):
    receive = exchange.receive
    monkeypatch.setattr(exchange, "receive", lambda *args: receive(*args) * 0.0)
    with pytest.raises(AssertionError):
        check(MISTAKEN, WHOLE)


def test_vmap_over_an_outer_axis():
    case = Case("vmap", (70, 20), window=65, table_width=2)
    inputs = [build(dataclasses.replace(case, seed=seed)) for seed in range(2)]
    fields = ("q", "kv_pages", "pages", "lengths", "counts")
    stacked = (jnp.stack([jnp.asarray(getattr(each, name)) for each in inputs]) for name in fields)

    def one(*arrays):
        return decode(*arrays, window=65, scale=case.scale, v_dim=case.v_dim, config=WHOLE, interpret=True)

    outs, lses = jax.vmap(one)(*stacked)
    for each, out, lse in zip(inputs, outs, lses, strict=True):
        compare(case, (np.asarray(out), np.asarray(lse)), reference(case, each))


LENGTHS = ((0, 513, 640, 64), (1, 514, 577, 65), (63, 512, 576, 641))
SWEEP = covering({"heads": (1, 8, 24, 64, 128), "lengths": LENGTHS, "window": (1, 64, 65, 513), "tokens": (32, 64)})
SHAPES = covering({"batch": (1, 3), "seq": (1, 2, 4, 8), "heads": (1, 8, 24, 64, 128), "splits": (1, 3)})


def name(setting: dict) -> str:
    return " ".join(f"{key} {value}" for key, value in setting.items())


@pytest.mark.long
@pytest.mark.parametrize("setting", SWEEP, ids=name)
def test_lengths_and_windows(setting):
    case = Case("sweep", setting["lengths"], 1, setting["heads"], window=setting["window"], table_width=11)
    check(case, Config("column_split", block_tokens=setting["tokens"]))


@pytest.mark.long
@pytest.mark.parametrize("setting", SHAPES, ids=name)
def test_batches_and_tiles(setting):
    lengths = (77, 130, 6)[: setting["batch"]]
    case = Case("sweep", lengths, setting["seq"], setting["heads"], window=65, table_width=3)
    check(case, Config("column_split", block_tokens=64, splits=setting["splits"]))


@pytest.mark.long
@pytest.mark.parametrize("case", ADVERSARIAL, ids=lambda case: case.name)
def test_adversarial_in_half_pages(case):
    check(case, dataclasses.replace(HALF, splits=3))


@pytest.mark.long
@pytest.mark.parametrize(("seq", "lengths"), [(1, (641, 514)), (4, (600,))])
def test_released_geometry_over_the_whole_window(seq, lengths):
    case = Case("released", lengths, seq=seq, heads=64, width=1088, v_dim=1024, window=513, table_width=11)
    check(case, HALF)


def test_sweeps_cover_every_pair():
    assert {setting["heads"] for setting in SHAPES if setting["seq"] == 8} == {1, 8, 24, 64, 128}
    assert {setting["window"] for setting in SWEEP if 513 in setting["lengths"]} == {1, 64, 65, 513}
    assert len(covering({"a": (1, 2), "b": (1, 2)})) == 4


@pytest.mark.parametrize("specs", [BY_HEADS, BY_ROWS], ids=["heads", "rows"])
def test_shard_map(specs):
    inputs = build(CASE)
    out, lse = sharded(specs, interpret=True)(*arrays(inputs))
    compare(CASE, (np.asarray(out), np.asarray(lse)), reference(CASE, inputs))


@pytest.mark.long
def test_shard_map_over_two_devices_lowers_for_cuda():
    script = Path(__file__).with_name("sharded_decode.py")
    paths = os.pathsep.join([str(script.parents[2]), os.environ.get("PYTHONPATH", "")])
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    environment = {**os.environ, "PYTHONPATH": paths, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
