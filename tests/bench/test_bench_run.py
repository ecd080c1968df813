import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dots_jax.bench import run, timing, torch_peer
from dots_jax.bench.device import Device, default_device
from dots_jax.bench.floor import Ceilings, measure_ceilings
from dots_jax.bench.inputs import abstract_arguments, make_inputs, present_pages, row_lengths
from dots_jax.bench.shapes import PAGE_SIZE, Shape
from dots_jax.bench.unfused import unfused_decode
from dots_jax.decode import swa_latent_decode_reference

SLIDING = Shape("small", batch=3, seq=2, heads=4, width=96, v_dim=64, window=70, context=300, scale=0.1)
FULL = dataclasses.replace(SLIDING, name="small-full", window=None)
TINY_DEVICE = Device("cpu", "test", cache_bytes=1 << 16, memory_bytes=1 << 24)
CEILINGS = Ceilings(bytes_per_s=1e9, flops_per_s=1e8)  # slow enough for two calls to a launch where launches queue
BOTH = pytest.mark.parametrize("shape", [SLIDING, FULL], ids=lambda shape: shape.name)


@functools.cache
def float32_inputs(shape):
    return make_inputs(shape, jnp.float32, distinct=3)


@BOTH
def test_no_two_calls_share_a_page_and_every_visible_page_is_present(shape):
    inputs = float32_inputs(shape)
    held = np.concatenate([np.asarray(call.table.pages)[present_pages(shape)] for call in inputs.calls])
    assert sorted(held) == list(range(inputs.kv_pages.shape[0]))
    lengths, present = row_lengths(shape), present_pages(shape)
    for row, length in enumerate(lengths):
        oldest = 0 if shape.window is None else max(0, length - shape.seq - shape.window + 1)
        seen = np.unique(np.arange(oldest, length) // PAGE_SIZE)
        assert np.flatnonzero(present[row]).tolist() == seen.tolist()


@pytest.mark.parametrize("calls", [1, 2, 3, 4, 7])
def test_launches_rotate_through_all_calls_in_order(calls):
    inputs = float32_inputs(SLIDING)
    seen = [call for _, batch in inputs.sets(calls) for call in batch]
    assert all(len(batch) == calls for _, batch in inputs.sets(calls))
    assert len(seen) % 3 == 0
    assert all(call is inputs.calls[i % 3] for i, call in enumerate(seen))


@BOTH
def test_programs_compiled_ahead_fit_the_inputs(shape):
    def describe(leaf):
        return leaf.shape, leaf.dtype

    made = float32_inputs(shape).sets(2)[0]
    promised = abstract_arguments(shape, jnp.float32, distinct=3, calls_per_launch=2)
    assert jax.tree.structure(made) == jax.tree.structure(promised)
    assert list(map(describe, jax.tree.leaves(made))) == list(map(describe, jax.tree.leaves(promised)))


@BOTH
def test_unfused_paths_compute_the_decode(shape):
    inputs = float32_inputs(shape)
    q, table = inputs.calls[1]
    kwargs = {"window": shape.window, "scale": shape.scale, "v_dim": shape.v_dim}
    expected, _ = swa_latent_decode_reference(q, inputs.kv_pages, table, **kwargs)
    np.testing.assert_allclose(
        jax.jit(unfused_decode, static_argnums=0)(shape, inputs.kv_pages, q, table), expected, atol=2e-5
    )


@pytest.mark.skipif(not torch_peer.available("cpu"), reason="torch is an optional peer of the benchmark, not installed")
@BOTH
def test_torch_peer_computes_the_decode(shape):
    inputs = float32_inputs(shape)
    q, table = inputs.calls[1]
    arrays = [torch_peer.from_jax(x) for x in (inputs.kv_pages, q, table.pages, table.lengths)]
    expected = unfused_decode(shape, inputs.kv_pages, q, table)
    np.testing.assert_allclose(torch_peer.unfused_decode(shape, *arrays).numpy(), expected, atol=2e-5)


def test_chained_calls_return_every_result():
    total = timing.chain(lambda shared, x: shared * x, 3)
    results = jax.jit(total)(jnp.float32(2), [jnp.arange(4.0) + i for i in range(3)])
    np.testing.assert_array_equal(np.stack(results), 2 * (np.arange(4) + np.arange(3)[:, None]))
    with pytest.raises(ValueError, match="calls must be at least 1, got 0"):
        timing.chain(lambda shared, x: x, 0)


def test_interleaved_programs_take_turns_over_rotating_arguments():
    log = []
    programs = {
        name: timing.Program(lambda *x, name=name: log.append((name, *x)), [(0,), (1,)], 1, lambda _: None)
        for name in "ab"
    }
    times = timing.interleave(programs, rounds=4, round_s=1e-9)
    warm_up = 2 * (2 + 1)
    assert [name for name, _ in log[warm_up:]] == list("abababab")
    assert [turn for name, turn in log if name == "a"] == [0, 1, 0, 1, 0, 1, 0]
    assert {name: len(t) for name, t in times.items()} == {"a": 4, "b": 4}


def test_a_launch_of_several_calls_counts_as_several():
    program = timing.Program(lambda: None, [()], 1000, lambda _: None)
    assert program.run(1) < 1e-3


def test_distinct_calls_overflow_the_cache_unless_memory_is_short():
    one = SLIDING.min_bytes(2)
    device = Device("gpu", "x", cache_bytes=10 * one, memory_bytes=1000 * one)
    assert device.distinct_calls(SLIDING, 2) == 40
    assert dataclasses.replace(device, memory_bytes=13 * one).distinct_calls(SLIDING, 2) == 10
    assert dataclasses.replace(device, cache_bytes=1000 * one, memory_bytes=1 << 40).distinct_calls(SLIDING, 2) == 512
    assert dataclasses.replace(device, memory_bytes=0).distinct_calls(SLIDING, 2) == 2
    assert (device.calls_per_launch(1e-5), device.calls_per_launch(2e-4), device.calls_per_launch(1.0)) == (16, 5, 2)
    assert TINY_DEVICE.calls_per_launch(1e-5) == 1


def test_default_device_describes_the_cpu():
    device = default_device()
    assert device.platform == "cpu"
    assert device.kind.endswith("cores")
    assert 0 < device.cache_bytes <= 64 << 20
    assert device.memory_bytes > 0


def test_ceilings_are_positive_and_finite():
    ceilings = measure_ceilings(jnp.float32, copy_bytes=1 << 16, matrix_size=32, rounds=2, round_s=1e-6)
    assert 0 < ceilings.bytes_per_s < np.inf
    assert 0 < ceilings.flops_per_s < np.inf


def measure(implementations=("xla",), device=TINY_DEVICE):
    settings = run.Settings(jnp.float32, implementations, rounds=3, round_s=1e-4)
    (result,) = run.measure([SLIDING], settings, device, CEILINGS)
    return result, {timing.implementation: timing for timing in result.timings}


@pytest.mark.parametrize("platform", ["cpu", "gpu"])  # as on a GPU: chains of several calls in a launch
def test_one_shape_measured(platform):
    result, timings = measure(device=dataclasses.replace(TINY_DEVICE, platform=platform))
    assert result.floor_s == pytest.approx(SLIDING.flops / 1e8)
    xla, unfused = timings["xla"], timings["unfused"]
    assert not xla.failed
    assert xla.seconds
    assert unfused.seconds
    assert xla.over_floor == pytest.approx(xla.seconds / result.floor_s)
    assert xla.cosine_difference is not None
    assert abs(xla.cosine_difference) < 1e-6
    assert unfused.vs_unfused == 1.0


@pytest.mark.parametrize("mistake", [{"window": 69}, {"scale": 0.2}])
def test_a_wrong_output_fails(monkeypatch, mistake):
    right = run.swa_latent_decode
    monkeypatch.setattr(run, "swa_latent_decode", lambda *args, **kwargs: right(*args, **(kwargs | mistake)))
    _, timings = measure()
    assert timings["xla"].failed
    assert "differs from the unfused path" in (timings["xla"].problem or "")


def test_nan_is_a_wrong_output(monkeypatch):
    right = run.swa_latent_decode
    monkeypatch.setattr(run, "swa_latent_decode", lambda *args, **kwargs: right(*args, **kwargs) * jnp.nan)
    assert measure()[1]["xla"].failed


def test_a_torch_that_fails_costs_only_its_own_row(monkeypatch):
    def fail(array):
        raise RuntimeError("out of memory\non the card")

    monkeypatch.setattr(torch_peer, "available", lambda platform: True)
    monkeypatch.setattr(torch_peer, "from_jax", fail)
    settings = run.Settings(implementations=("xla",), dtype=jnp.float32, rounds=1, round_s=0.001)
    (result,) = run.measure([SLIDING], settings, TINY_DEVICE, CEILINGS)
    timings = {timing.implementation: timing for timing in result.timings}
    assert timings["xla"].seconds > 0
    assert (timings["torch"].problem, timings["torch"].failed) == ("out of memory on the card", False)


def test_an_implementation_that_cannot_run_is_reported_and_the_others_are_timed(monkeypatch):
    def decode(*_, implementation, **__):
        raise {"mosaic_gpu": NotImplementedError("needs a Hopper GPU"), "xla": ValueError("broken")}[implementation]

    monkeypatch.setattr(run, "swa_latent_decode", decode)
    _, timings = measure(("mosaic_gpu", "xla"))
    assert (timings["mosaic_gpu"].problem, timings["mosaic_gpu"].failed) == ("needs a Hopper GPU", False)
    assert (timings["xla"].problem, timings["xla"].failed) == ("broken", True)
    assert timings["unfused"].seconds


def test_cosine_difference():
    a = np.array([1.0, 2.0, 3.0])
    assert run.cosine_difference(a, a) == 0
    assert run.cosine_difference(a, -a) == 2
    assert run.cosine_difference(0 * a, 0 * a) == 0
    assert np.isnan(run.cosine_difference(a, a * np.nan))
