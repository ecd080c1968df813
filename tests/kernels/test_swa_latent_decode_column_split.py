"""The column-split body, simulated with race detection, against the float32 definition."""

import dataclasses

import decode_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_cases import ADVERSARIAL, Case, build, check, compare, covering, reference, run

from pallas_kernels.swa_latent_decode import Config, column_split, decode, exchange, visible

# The simulated products meet the poison of keys that are masked afterwards.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

WHOLE, HALF = Config("column_split", block_tokens=64), Config("column_split")


@pytest.mark.parametrize("case", ADVERSARIAL, ids=lambda case: case.name)
def test_adversarial(case):
    check(case, WHOLE)


@pytest.mark.parametrize("case", ADVERSARIAL[2:6], ids=lambda case: case.name)
def test_adversarial_in_half_pages_with_splits(case):
    check(case, dataclasses.replace(HALF, splits=2))


def test_released_geometry():
    check(Case("released", (600,), heads=64, width=1088, v_dim=1024, window=160, table_width=10), HALF)


def test_default_geometry_with_splits_and_two_tiles():
    case = Case("default", (100,), seq=4, heads=24, width=576, v_dim=512, window=None, table_width=2)
    check(case, dataclasses.replace(WHOLE, splits=2))


def test_no_rope_columns():
    check(Case("no rope", (100, 64), width=128, v_dim=128), WHOLE)


def test_two_runs_are_bit_identical():
    case = Case("twice", (130, 66), seq=2)
    (out, lse), (again, lse_again) = (run(case, HALF) for _ in range(2))
    assert (out.tobytes(), lse.tobytes()) == (again.tobytes(), lse_again.tobytes())


MISTAKEN = Case("mistaken", (150, 129), seq=1, window=65, table_width=3, seed=3)


def test_planted_window_off_by_one_is_seen(monkeypatch):
    limits = visible.row_limits
    monkeypatch.setattr(column_split, "row_limits", lambda *args, **named: limits(*args, **named) - 1)
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


RAGGED = (0, 1, 63, 64, 65, 512, 513, 514, 576, 577, 640, 641)
SWEEP = covering(
    {
        "batch": (1, 3),
        "seq": (1, 2, 4, 8),
        "heads": (1, 8, 24, 64, 128),
        "length": RAGGED,
        "window": (1, 64, 65, 513),
        "block_tokens": (32, 64),
        "splits": (1, 3),
    }
)


@pytest.mark.long
@pytest.mark.parametrize("setting", SWEEP, ids=lambda setting: "-".join(f"{k}{v}" for k, v in setting.items()))
def test_sweep(setting):
    length = setting["length"]
    others = {1: (), 3: (max(length - 3, 0), 77)}[setting["batch"]]
    case = Case("sweep", (length, *others), setting["seq"], setting["heads"], window=setting["window"], table_width=11)
    check(case, Config("column_split", splits=setting["splits"], block_tokens=setting["block_tokens"]))


@pytest.mark.long
@pytest.mark.parametrize("case", ADVERSARIAL, ids=lambda case: case.name)
def test_adversarial_in_half_pages(case):
    check(case, dataclasses.replace(HALF, splits=3))


@pytest.mark.long
@pytest.mark.parametrize(("seq", "lengths"), [(1, (641, 514)), (4, (600,))])
def test_released_geometry_over_the_whole_window(seq, lengths):
    case = Case("released", lengths, seq=seq, heads=64, width=1088, v_dim=1024, window=513, table_width=11)
    check(case, HALF)


def test_sweep_covers_every_pair():
    assert {setting["heads"] for setting in SWEEP if setting["seq"] == 8} == {1, 8, 24, 64, 128}
    assert decode_cases.covering({"a": (1, 2), "b": (1, 2)}).__len__() == 4
