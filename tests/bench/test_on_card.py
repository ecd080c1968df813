import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import on_card_check, on_card_relayout, on_card_verdict


def make_case(**mistake):
    static: dict[str, Any] = {"window": 70, "scale": 0.1, "v_dim": 64}
    return on_card_check.Case(
        name="small",
        function=on_card_check.public("xla", **(static | mistake)),
        q=jax.ShapeDtypeStruct((16, 2, 4, 96), jnp.bfloat16),
        kv_pages=jax.ShapeDtypeStruct((40, 64, 96), jnp.bfloat16),
        columns=12,
        splits=1,
        **static,
    )


def test_a_right_implementation_agrees():
    case = make_case()
    result = on_card_check.check(case, on_card_check.compile_case(case))
    assert result["problem"] is None
    assert 0 < result["cosine_difference"] < on_card_check.COSINE_LIMIT


@pytest.mark.parametrize("mistake", [{"window": 71}, {"scale": 0.101}])
def test_planted_mistakes_are_found(mistake):
    case = make_case(**mistake)
    assert on_card_check.check(case, on_card_check.compile_case(case))["problem"]


def test_results_that_change_from_run_to_run_are_found():
    case = make_case()
    compiled, runs = on_card_check.compile_case(case), []

    def unstable(*arguments):
        out, lse = compiled(*arguments)
        runs.append(None)
        return out * (1 + 2.0**-7 * len(runs) % 2), lse

    assert "two runs differ" in on_card_check.check(case, unstable)["problem"]


def test_inputs_poison_what_no_query_may_read_and_nothing_else():
    case = make_case()
    inputs = on_card_check.make_inputs(case, seed=0)
    rows, seq = case.q.shape[:2]
    assert {0, 65, 576, 700, 2**30} <= set(inputs.lengths.tolist())
    _, lse = on_card_check.expected(case, inputs, np.full(rows, seq, np.int32), rows)
    assert not np.isnan(lse).any()
    assert np.isnan(inputs.kv_pages.astype(np.float32)).mean() > 0.05
    assert np.isin(inputs.pages, on_card_check.IMPOSSIBLE).any()


def test_every_variant_of_the_kernel_becomes_a_case():
    names = [case.name for case in on_card_check.cases("xla", 16, 160)]
    assert len(names) == len(set(names)) > 0
    assert {f"dispatch-{name}" for name in on_card_check.DISPATCHED} < set(names)
    for case in on_card_check.cases("kernel", None, None):
        assert case.q.shape[0] >= len(on_card_check.LENGTHS)


def test_a_variant_that_fails_is_a_problem_with_its_reason():
    class Broken:
        def result(self):
            raise RuntimeError("no kernel\nimage")

    result = on_card_check.attempt(make_case(), Broken(), 0.0, None)
    assert result["problem"] == "RuntimeError: no kernel image"


def report(**changes):
    """A saved benchmark in which everything is just good enough."""
    shapes = []
    for heads, seq, batch in ((64, 1, 128), (64, 4, 256), (8, 2, 128), (8, 4, 1)):
        timing = {"implementation": "mosaic_gpu", "seconds": 12e-6, "over_floor": 1.25, "vs_unfused": 3.0} | changes
        shape = {"name": f"h{heads}-s{seq}-b{batch}", "heads": heads, "seq": seq, "batch": batch, "window": 513}
        shapes.append(shape | {"flops": 0.6 * 12e-6 * 1e15, "timings": [timing]})
    return {"ceilings": {"flops_per_s": 1e15, "bytes_per_s": 4e12}, "shapes": shapes}


def verdict(tmp_path, content):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(content))
    return on_card_verdict.main([str(path)])


def test_verdict_when_every_goal_is_met(tmp_path, capsys):
    assert verdict(tmp_path, report()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(on_card_verdict.GOALS)
    assert all(line.startswith("met") for line in lines)


@pytest.mark.parametrize(
    ("changes", "missed"),
    [({"over_floor": 1.28}, 1), ({"over_floor": 1.31}, 2), ({"seconds": 13e-6}, 2), ({"vs_unfused": 2.9}, 1),
     ({"vs_unfused": 0.9}, 2)],
)  # fmt: skip
def test_verdict_names_each_missed_goal(tmp_path, capsys, changes, missed):
    assert verdict(tmp_path, report(**changes)) == 1
    assert capsys.readouterr().out.count("MISSED") == missed


def test_verdict_without_anything_to_judge(tmp_path, capsys):
    assert verdict(tmp_path, {"shapes": []}) == 2
    assert verdict(tmp_path, {}) == 2
    assert on_card_verdict.main([str(tmp_path / "absent.json")]) == 2


@pytest.mark.parametrize("order", ["token_major", "layer_major"])
def test_relayout_references_move_each_page_by_hand(order):
    rng = np.random.default_rng(0)
    layers = [rng.integers(0, 1000, (3 * 64, 2, 4), np.int32) for _ in range(2)]
    ids = np.array([2, -1, 0, 3], np.int32)
    block = np.zeros((4, 64, 2, 2, 4) if order == "token_major" else (4, 2, 64, 2, 4), np.int32)
    for position, layer in np.ndindex(4, 2):
        if 0 <= ids[position] < 3:
            page = layers[layer][64 * ids[position] : 64 * (ids[position] + 1)]
            block[(position, slice(None), layer) if order == "token_major" else (position, layer)] = page
    arrays = [jnp.asarray(layer) for layer in layers]
    np.testing.assert_array_equal(on_card_relayout.xla_gather(arrays, jnp.asarray(ids), order), block)
    emptied = [jnp.zeros_like(layer) for layer in arrays]
    scattered = on_card_relayout.xla_scatter(jnp.asarray(block), emptied, jnp.asarray(ids), order)
    for got, layer in zip(scattered, layers, strict=True):
        np.testing.assert_array_equal(got[128:], layer[128:])
        np.testing.assert_array_equal(got[:64], layer[:64])
        assert not np.asarray(got[64:128]).any()


def test_same_bits_tells_one_nan_from_another():
    nan, other = (jnp.asarray(np.array([bits], np.uint16).view(jnp.bfloat16)) for bits in (0x7FC0, 0x7FC1))
    assert on_card_relayout.same_bits([nan], [nan])
    assert not on_card_relayout.same_bits([nan], [other])
