import argparse
import json

import pytest

from dots_jax.bench import shapes
from dots_jax.bench.device import Device
from dots_jax.bench.floor import Ceilings
from dots_jax.bench.run import ShapeResult, Timing
from dots_jax.bench.shapes import Shape
from dots_jax.cli import bench
from dots_jax.cli.errors import ArgumentError

SMALL = Shape("small", batch=2, seq=1, heads=2, width=96, v_dim=64, window=70, context=128, scale=0.1)


def run(*words):
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers(dest="command"))
    arguments = parser.parse_args(["bench", *words])
    return arguments.run(arguments)


@pytest.fixture
def small(monkeypatch):
    """One small shape and quick ceilings in place of the serving shapes."""
    monkeypatch.setattr(shapes, "ALL", (SMALL,))
    monkeypatch.setattr(shapes, "default_names", lambda platform, quick: ("small",))
    monkeypatch.setattr(
        bench, "default_device", lambda: Device("cpu", "test", cache_bytes=1 << 16, memory_bytes=1 << 24)
    )
    monkeypatch.setattr(bench, "measure_ceilings", lambda *args, **kwargs: Ceilings(1e9, 1e12))


def test_json_states_times_floor_and_ratios(small, capsys):
    assert run("--json", "--rounds", "2", "--dtype", "float32") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["device"]["platform"] == "cpu"
    assert report["ceilings"] == {"bytes_per_s": 1e9, "flops_per_s": 1e12}
    (shape,) = report["shapes"]
    assert (shape["name"], shape["min_bytes"], shape["flops"]) == ("small", SMALL.min_bytes(4), SMALL.flops)
    timings = {timing["implementation"]: timing for timing in shape["timings"]}
    assert timings["xla"]["over_floor"] == pytest.approx(timings["xla"]["seconds"] / shape["floor_s"])
    assert timings["unfused"]["vs_unfused"] == 1.0


def test_table_and_quick(small, capsys):
    assert run("--quick") == 0
    out = capsys.readouterr().out
    assert "copy 1 GB/s" in out
    assert "x unfused" in out
    assert "small" in out


def test_a_failure_is_exit_code_1_with_its_reason(small, monkeypatch, capsys):
    def measure(*_):
        timing = Timing("xla", seconds=1e-6, over_floor=1.0, problem="output differs", failed=True)
        return [ShapeResult(SMALL, 1e-6, "bytes", 10, (timing,))]

    monkeypatch.setattr(bench, "measure", measure)
    assert run() == 1
    assert "small xla: output differs" in capsys.readouterr().out


def test_list(capsys):
    assert run("--list", "--shapes", "h8-s4-b1,full32k-*-b1") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "h8-s4-b1",
        "full32k-h128-s1-b1",
        "full32k-h16-s1-b1",
    ]
    assert run("--list", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)) == len(shapes.ALL)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--shapes", "h65-*"), "no shape matches 'h65-"),
        (("--rounds", "0"), "--rounds must be at least 1, got 0"),
    ],
)
def test_bad_arguments(words, message):
    with pytest.raises(ArgumentError, match=message):
        run(*words)


def test_an_implementation_for_another_device_is_refused_by_name(small):
    with pytest.raises(ArgumentError, match="--implementation mosaic_gpu: "):
        run("--implementation", "mosaic_gpu", "--rounds", "1")
