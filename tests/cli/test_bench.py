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


@pytest.mark.parametrize("failed", [False, True])
def test_table_shows_figures_and_a_failure_is_exit_code_1_with_its_reason(small, monkeypatch, capsys, failed):
    def measure(*_):
        fast = Timing("xla", seconds=2e-5, spread=0.04, over_floor=2.0, vs_unfused=3.25, cosine_difference=1e-7)
        other = Timing("mosaic_gpu", problem="output differs", failed=failed)
        return [ShapeResult(SMALL, 1e-5, "bytes", 10_000_000, (fast, other))]

    monkeypatch.setattr(bench, "measure", measure)
    assert run("--quick") == int(failed)
    out = capsys.readouterr().out
    assert "copy 1 GB/s, matrix product 1 TFLOP/s" in out
    row = next(line.split() for line in out.splitlines() if line.split()[:1] == ["small"])
    flops = f"{SMALL.flops / 2e-5 / 1e12:.3g}"
    assert row[1:] == ["xla", "10.0", "0.00", "10.0", "20.0", "2.00", "3.25", "-", "4", "%", "500", flops]
    assert "small mosaic_gpu: output differs" in out


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
        (("--rounds", "0"), "--rounds must be at least 1 and at most 1000000, got 0"),
        (("--rounds", "9" * 30), "--rounds must be at least 1 and at most 1000000, got 9"),
        (("--shapes", ","), "--shapes names no shape"),
        (("--time-limit", "nan", "--list"), "--time-limit must be positive"),
        (("--time-limit", "inf"), "--time-limit must be positive and at most 604800, got inf"),
        (("--save", "/"), "--save /: Is a directory"),
        (("--save", "/no such folder/file"), "there is no such folder"),
    ],
)
def test_bad_arguments(words, message):
    with pytest.raises(ArgumentError, match=message):
        run(*words)


def test_json_has_its_keys_when_time_runs_out_before_the_first_shape(small, monkeypatch, capsys):
    monkeypatch.setattr(bench, "measure", lambda *_: iter(()))
    assert run("--json", "--time-limit", "1") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["shapes"], report["not_reached"]) == ([], ["small"])
    assert report["device"]["platform"] == "cpu"


def test_save_writes_the_report_and_a_refused_run_leaves_no_file(small, capsys, tmp_path):
    path = tmp_path / "report.json"
    with pytest.raises(ArgumentError, match="no shape matches"):
        run("--save", str(path), "--shapes", "none")
    assert not path.exists()
    assert run("--save", str(path), "--rounds", "1") == 0
    assert [shape["name"] for shape in json.loads(path.read_text())["shapes"]] == ["small"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--implementation", "xla", "--implementation", "mosaic_gpu"),
            "--implementation mosaic_gpu: it needs a Hopper",
        ),
        (("--implementation", "interpret"), "--implementation interpret: v_dim 64 is not a positive multiple of 128"),
    ],
)
def test_an_implementation_that_takes_no_shape_is_refused_before_anything_is_timed(small, monkeypatch, words, message):
    def time(*_, **__):
        raise AssertionError("timed")

    monkeypatch.setattr(bench, "measure_ceilings", time)
    monkeypatch.setattr(bench, "measure", time)
    with pytest.raises(ArgumentError, match=message):
        run(*words)


def test_nan_is_null_in_json_and_in_the_saved_file(small, monkeypatch, capsys, tmp_path):
    def measure(*_):
        wrong = Timing("xla", seconds=2e-5, cosine_difference=float("nan"), problem="output differs", failed=True)
        return [ShapeResult(SMALL, 1e-5, "bytes", 10_000_000, (wrong,))]

    def refuse(name):
        raise AssertionError(name)

    monkeypatch.setattr(bench, "measure", measure)
    path = tmp_path / "report.json"
    assert run("--json", "--save", str(path)) == 1
    for text in (capsys.readouterr().out, path.read_text()):
        report = json.loads(text, parse_constant=refuse)
        assert report["shapes"][0]["timings"][0]["cosine_difference"] is None


def test_a_simulation_without_threads_is_refused_before_anything_is_timed(monkeypatch):
    monkeypatch.delenv("NPROC", raising=False)
    with pytest.raises(ArgumentError, match="--implementation interpret: simulating the kernel needs NPROC=16 or more"):
        run("--implementation", "interpret", "--shapes", "h8-s1-b1")
