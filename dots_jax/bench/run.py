"""Measures one shape: compile, check, time in turns, compare."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dots_jax.bench import torch_peer
from dots_jax.bench.device import Device
from dots_jax.bench.floor import Ceilings
from dots_jax.bench.inputs import Inputs, abstract_arguments, make_inputs
from dots_jax.bench.shapes import Shape
from dots_jax.bench.timing import Program, chain, interleave
from dots_jax.bench.unfused import unfused_decode
from dots_jax.decode import implementations, swa_latent_decode

_CHECKED_ROWS = 8  # of the batch, compared with the unfused path; bringing all of them to the host would take longest
_COMPILE_SHARE = 2 / 3

UNFUSED, TORCH = "unfused", "torch"

COSINE_LIMIT = 1e-3
"""Largest cosine difference to the unfused path, which itself rounds scores to the model's dtype; a wrong key or column
costs far more."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """One implementation at one shape.

    Args:
      implementation: its name; `"unfused"` and `"torch"` are the paths to compare with.
      seconds: median for one call; None when it did not run.
      spread: (largest - smallest) / median over the rounds.
      over_floor: seconds / floor.
      vs_unfused: how many times faster than the unfused path, the median over rounds.
      vs_torch: the same against torch; None without torch.
      cosine_difference: of the output to the unfused path's.
      problem: why it did not run, or what is wrong with its output.
      failed: whether `problem` is a failure rather than a shape that the implementation does not take.
    """

    implementation: str
    seconds: float | None = None
    spread: float | None = None
    over_floor: float | None = None
    vs_unfused: float | None = None
    vs_torch: float | None = None
    cosine_difference: float | None = None
    problem: str | None = None
    failed: bool = False


@dataclasses.dataclass(frozen=True)
class ShapeResult:
    """All implementations at one shape, with the shape's floor in seconds and the smallest bytes it must move."""

    shape: Shape
    floor_s: float
    bound_by: str
    min_bytes: int
    timings: tuple[Timing, ...]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to measure.

    Args:
      dtype: of q and the cache.
      implementations: names that `swa_latent_decode` knows.
      rounds: turns of each implementation.
      round_s: seconds that a turn aims at.
      compile_threads: compilers at once, all before the first timing.
      torch: whether to time torch, where it is installed.
      time_limit_s: seconds after which no further shape is started, two thirds of them for compiling; None is no limit.
    """

    dtype: Any
    implementations: tuple[str, ...]
    rounds: int = 9
    round_s: float = 0.02
    compile_threads: int = 1
    torch: bool = True
    time_limit_s: float | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return jnp.dtype(self.dtype).itemsize


def default_implementations(platform: str) -> tuple[str, ...]:
    """The implementations that are worth timing on a platform; the interpreter never is."""
    return ("mosaic_gpu", "xla") if platform in ("gpu", "cuda") else ("xla",)


def refusal(shape: Shape, name: str, dtype) -> str | None:
    """Why the implementation does not take the shape on the default device, or None if it does; compiles nothing."""
    kv_pages, (call,) = abstract_arguments(shape, dtype, distinct=1, calls_per_launch=1)
    return implementations.refusal(name, call.q, kv_pages, call.table, window=shape.window, v_dim=shape.v_dim)


def measure(
    shapes: Sequence[Shape],
    settings: Settings,
    device: Device,
    ceilings: Ceilings,
    on_step: Callable[[str], None] = lambda step: None,
) -> Iterator[ShapeResult]:
    """Compiles everything, then times shape after shape and yields each result.

    Args:
      shapes: what to measure.
      settings: how.
      device: where.
      ceilings: for the floor.
      on_step: told after each compilation and each shape what was done, from any thread.

    Yields:
      The results in the order of `shapes`; those that the time limit cut off are left out.
    """
    started = time.monotonic()
    compile_s = None if settings.time_limit_s is None else _COMPILE_SHARE * settings.time_limit_s
    programs = _compile_all(shapes, settings, device, ceilings, on_step, compile_s)
    for shape in shapes:
        late = settings.time_limit_s is not None and time.monotonic() - started > settings.time_limit_s
        if shape in programs and not late:
            yield _measure_shape(shape, programs.pop(shape), settings, device, ceilings)
            on_step(f"timed {shape.name}")


def _compile_all(
    shapes: Sequence[Shape],
    settings: Settings,
    device: Device,
    ceilings: Ceilings,
    on_step: Callable[[str], None],
    timeout_s: float | None,
) -> dict[Shape, dict[str, Any]]:
    """Programs by shape and implementation; without the shapes that were not ready after `timeout_s`."""
    pool = ThreadPoolExecutor(settings.compile_threads)
    names = (UNFUSED, *settings.implementations)
    futures = {
        shape: {name: pool.submit(_compile, shape, name, settings, device, ceilings) for name in names}
        for shape in shapes
    }
    every = [future for by_name in futures.values() for future in by_name.values()]
    for future in every:
        future.add_done_callback(lambda done: None if done.cancelled() else on_step("compiling"))
    try:
        wait(every, timeout_s)
    finally:  # an interrupt too, or the program would compile the rest before it ends
        pool.shutdown(wait=False, cancel_futures=True)
    return {
        shape: {name: future.result() for name, future in by_name.items()}
        for shape, by_name in futures.items()
        if all(future.done() and not future.cancelled() for future in by_name.values())
    }


def _call(shape: Shape, name: str) -> Callable[..., jax.Array]:
    """The implementation as a function of the pool and what rotates."""
    if name == UNFUSED:
        return jax.jit(lambda kv_pages, call: unfused_decode(shape, kv_pages, call.q, call.table))
    decode = functools.partial(
        swa_latent_decode, window=shape.window, scale=shape.scale, v_dim=shape.v_dim, implementation=name
    )
    return jax.jit(lambda kv_pages, call: decode(call.q, kv_pages, call.table))


def _compile(shape: Shape, name: str, settings: Settings, device: Device, ceilings: Ceilings) -> Any:
    """The compiled chain of calls, or the `Timing` that says why there is none."""
    calls = device.calls_per_launch(ceilings.floor_s(shape, settings.itemsize))
    distinct = device.distinct_calls(shape, settings.itemsize)
    try:
        run = jax.jit(chain(_call(shape, name), calls))
        return run.lower(*abstract_arguments(shape, settings.dtype, distinct, calls)).compile()
    except NotImplementedError as error:
        return Timing(name, problem=_one_line(error))
    except Exception as error:  # one broken shape must not cost the others their measurement
        return Timing(name, problem=_one_line(error), failed=True)


def _measure_shape(
    shape: Shape, programs: dict[str, Any], settings: Settings, device: Device, ceilings: Ceilings
) -> ShapeResult:
    calls = device.calls_per_launch(ceilings.floor_s(shape, settings.itemsize))
    inputs = make_inputs(shape, settings.dtype, device.distinct_calls(shape, settings.itemsize))
    sets = inputs.sets(calls)
    timings = {name: value for name, value in programs.items() if isinstance(value, Timing)}
    runnable = {name: value for name, value in programs.items() if not isinstance(value, Timing)}
    outputs: dict[str, np.ndarray] = {}
    for name in list(runnable):
        try:
            outputs[name] = np.asarray(runnable[name](*sets[0])[0][:_CHECKED_ROWS].astype(jnp.float32))
        except Exception as error:  # an implementation that fails on the device is a finding, not the end of the table
            del runnable[name]
            timings[name] = Timing(name, problem=_one_line(error), failed=True)
    launchable = {name: Program(launch, sets, calls) for name, launch in runnable.items()}
    if settings.torch and torch_peer.available(device.platform):
        try:
            launchable[TORCH], outputs[TORCH] = _torch_program(shape, inputs, calls, device)
        except Exception as error:  # it shares the device's memory with JAX, and is only the peer
            timings[TORCH] = Timing(TORCH, problem=_one_line(error))
    seconds = interleave(launchable, settings.rounds, settings.round_s)
    floor_s = ceilings.floor_s(shape, settings.itemsize)
    for name in launchable:
        timings[name] = _judge(name, seconds, outputs, floor_s)
    order = [name for name in (*settings.implementations, UNFUSED, TORCH) if name in timings]
    return ShapeResult(
        shape=shape,
        floor_s=floor_s,
        bound_by=ceilings.bound_by(shape, settings.itemsize),
        min_bytes=shape.min_bytes(settings.itemsize),
        timings=tuple(timings[name] for name in order),
    )


def _torch_program(shape: Shape, inputs: Inputs, calls: int, device: Device) -> tuple[Program, np.ndarray]:
    kv_pages = torch_peer.from_jax(inputs.kv_pages)
    peers = [
        tuple(torch_peer.from_jax(leaf) for leaf in (call.q, call.table.pages, call.table.lengths))
        for call in inputs.calls
    ]
    decode = functools.partial(torch_peer.unfused_decode, shape, kv_pages)

    def launch(batch: Sequence[tuple]) -> list[Any]:
        return [decode(*peer) for peer in batch]

    sets = [(peers[start : start + calls],) for start in range(0, len(peers), calls)]
    sets = [one for one in sets if len(one[0]) == calls] or [((peers * calls)[:calls],)]
    program = Program(launch, sets, calls, lambda _: torch_peer.synchronize(device.platform))
    return program, decode(*peers[0])[:_CHECKED_ROWS].float().cpu().numpy()


def _judge(name: str, seconds: dict[str, np.ndarray], outputs: dict[str, np.ndarray], floor_s: float) -> Timing:
    times = seconds[name]
    median = float(np.median(times))

    def faster_than(other: str) -> float | None:
        return float(np.median(seconds[other] / times)) if other in seconds else None

    difference = cosine_difference(outputs[name], outputs[UNFUSED]) if UNFUSED in outputs else None
    wrong = difference is not None and not difference <= COSINE_LIMIT
    return Timing(
        implementation=name,
        seconds=median,
        spread=float((times.max() - times.min()) / median),
        over_floor=median / floor_s,
        vs_unfused=faster_than(UNFUSED),
        vs_torch=faster_than(TORCH),
        cosine_difference=difference,
        problem=f"output differs from the unfused path: cosine difference {difference:.1e}" if wrong else None,
        failed=wrong,
    )


def cosine_difference(a: np.ndarray, b: np.ndarray) -> float:
    """`1 - 2 <a, b> / (<a, a> + <b, b>)`, in float64: 0 for equal arrays, NaN if either holds one."""
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    size = a @ a + b @ b
    return float(1 - 2 * (a @ b) / size) if size else 0.0


def _one_line(error: Exception, limit: int = 200) -> str:
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= limit else line[: limit - 1] + "…"
