"""The XLA decode against the same algorithm in PyTorch, and how its cost grows: ratios measured in one run.

    python benchmarks/decode_cpu.py --torch-python path/to/python-with-torch

Each ratio is a median over rounds in which the two sides alternate, so that both see the same machine.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

from dots_jax import DotsConfig, PageTable, swa_latent_decode, write_latent

GEOMETRY = DotsConfig.dots3_note_prev().swa
SHAPES = [(1, 1), (8, 1), (8, 4), (32, 1)]
LIMITS = {"bfloat16": dict.fromkeys(SHAPES, 0.6), "float32": dict.fromkeys(SHAPES, 0.8) | {(8, 4): 1.0}}
NUM_PAGES = 1024

# torch's worker threads keep spinning for up to 0.2 s after a call, on the cores that the next measurement needs.
SETTLE_SECONDS = 0.25


class TorchPeer:
    """The child process that runs `torch_peer.py`."""

    def __init__(self, python: str):
        script = Path(__file__).with_name("torch_peer.py")
        self._child = subprocess.Popen(
            [python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def ask(self, **request) -> float | str:
        """Sends one request and waits for its answer."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps(request) + "\n")
        answer = self._child.stdout.readline()
        if not answer:
            sys.exit("the torch process ended; does that interpreter have torch?")
        return json.loads(answer)


def time_once(step: Callable[[], object]) -> float:
    """Seconds of one blocking call."""
    start = time.perf_counter()
    jax.block_until_ready(step())
    return time.perf_counter() - start


def time_warm(step: Callable[[], object]) -> float:
    """Seconds of the second of two calls in a row."""
    time_once(step)
    return time_once(step)


def alternate(first: Callable[[], float], second: Callable[[], float], rounds: int) -> tuple[float, float, float]:
    """Median seconds of both and the median of the per-round ratios first / second."""
    first()
    second()
    pairs = []
    for _ in track(range(rounds), description="rounds", transient=True, console=Console(stderr=True)):
        pairs.append((first(), second()))
        time.sleep(SETTLE_SECONDS)
    return (
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(a / b for a, b in pairs),
    )


def problem(batch: int, steps: int, dtype: str, context: int = 2048, gather: str = "pages") -> dict:
    """A step of the released sliding layer: ragged lengths around `context`, each row's window on random pages."""
    rng = np.random.default_rng(0)
    lengths = context - rng.integers(0, 64, batch)
    width = -(-context // 64)
    pages = np.stack([rng.permutation(NUM_PAGES)[np.arange(width) % NUM_PAGES] for _ in range(batch)])
    return {
        "batch": batch,
        "steps": steps,
        "heads": GEOMETRY.num_heads,
        "width": GEOMETRY.latent_dim,
        "v_dim": GEOMETRY.kv_lora_rank,
        "window": GEOMETRY.window,
        "num_pages": NUM_PAGES,
        "lengths": lengths.tolist(),
        "pages": pages.tolist(),
        "dtype": dtype,
        "threads": 2,
        "gather": gather,
    }


def jax_step(problem: dict) -> tuple[Any, tuple]:
    """The jitted step and its arguments."""
    rng = np.random.default_rng(0)

    def values(*shape):
        return jnp.asarray(0.1 * rng.standard_normal(shape, np.float32), problem["dtype"])

    table = PageTable(jnp.asarray(problem["pages"], jnp.int32), jnp.asarray(problem["lengths"], jnp.int32))
    arguments = (
        values(problem["batch"], problem["steps"], problem["heads"], problem["width"]),
        values(problem["num_pages"], 64, problem["width"]),
        table,
    )
    step = jax.jit(
        lambda q, kv_pages, table: swa_latent_decode(
            q, kv_pages, table, window=problem["window"], scale=0.0625, v_dim=problem["v_dim"], implementation="xla"
        )
    )
    return step, arguments


def against_torch(peer: TorchPeer, rounds: int) -> list[dict]:
    """One result for each dtype and shape."""
    results = []
    for dtype, limits in LIMITS.items():
        for (batch, steps), limit in limits.items():
            for gather in ("pages", "tokens"):
                case = problem(batch, steps, dtype, gather=gather)
                version = peer.ask(do="setup", problem=case)
                step, arguments = jax_step(case)
                times = alternate(
                    lambda step=step, arguments=arguments: time_warm(lambda: step(*arguments)),
                    lambda: float(peer.ask(do="step")),
                    rounds,
                )
                name = f"decode {dtype} B={batch} S={steps} / torch {version}, {gather} gathered"
                results.append(result(name, *times, limit))
    return results


def context_growth(rounds: int) -> dict:
    """A step at 512 k tokens of context over one at 1 k."""
    sides = [jax_step(problem(8, 4, "bfloat16", context)) for context in (524_288, 1024)]
    (long, long_arguments), (short, short_arguments) = sides
    times = alternate(
        lambda: time_once(lambda: long(*long_arguments)), lambda: time_once(lambda: short(*short_arguments)), rounds
    )
    return result("decode bfloat16 B=8 S=4, context 512k / 1k", *times, 1.1)


def write_growth(rounds: int) -> dict:
    """A donated write into 16,384 pages over one into 64."""
    write = jax.jit(write_latent, donate_argnums=0)
    rng = np.random.default_rng(0)
    table = PageTable(jnp.asarray(rng.permutation(64)[:32, None], jnp.int32), jnp.full(32, 60))
    latent = jnp.ones((32, 4, GEOMETRY.latent_dim), jnp.bfloat16)
    caches = {n: jnp.zeros((n, 64, GEOMETRY.latent_dim), jnp.bfloat16) for n in (16_384, 64)}

    def run(num_pages: int) -> float:
        start = time.perf_counter()
        for _ in range(50):
            caches[num_pages] = write(caches[num_pages], table, latent)
        caches[num_pages].block_until_ready()
        return (time.perf_counter() - start) / 50

    return result(
        "write_latent donated, 16384 / 64 pages", *alternate(lambda: run(16_384), lambda: run(64), rounds), 1.1
    )


def step_memory() -> list[dict]:
    """Temporary bytes of a compiled step over those of the gathered window and its float32 scores."""
    results = []
    for batch, steps in SHAPES:
        case = problem(batch, steps, "bfloat16")
        step, arguments = jax_step(case)
        memory = step.lower(*arguments).compile().memory_analysis()
        tokens = ((case["window"] + steps + 61) // 64 + 1) * 64
        window_bytes = batch * tokens * case["width"] * 2
        score_bytes = batch * steps * case["heads"] * tokens * 4
        name = f"temporary memory B={batch} S={steps} / (window + scores)"
        needed = window_bytes + score_bytes
        results.append(result(name, memory.temp_size_in_bytes, needed, memory.temp_size_in_bytes / needed, 1.5))
    return results


def import_time(rounds: int) -> dict:
    """Importing dots_jax over importing jax alone, each in a fresh interpreter."""

    def run(module: str) -> float:
        code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
        return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)

    return result("import dots_jax / import jax", *alternate(lambda: run("dots_jax"), lambda: run("jax"), rounds), 1.3)


def result(name: str, ours: float, other: float, ratio: float, limit: float) -> dict:
    """One line of the table."""
    return {"name": name, "ours": ours, "other": other, "ratio": ratio, "limit": limit, "ok": ratio <= limit}


def main() -> None:
    """Measures everything and prints one line each; exits with 1 if a ratio is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--torch-python", default=sys.executable, help="an interpreter that has torch (default: this one)"
    )
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--no-torch", action="store_true", help="leave the comparison with torch out")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = [] if options.no_torch else against_torch(TorchPeer(options.torch_python), options.rounds)
    results += [context_growth(options.rounds), write_growth(options.rounds), *step_memory(), import_time(7)]
    if options.json:
        print(json.dumps({"jax": jax.__version__, "python": platform.python_version(), "results": results}, indent=1))
    else:
        print(f"jax {jax.__version__}, Python {platform.python_version()}, {platform.machine()}; medians")
        for line in results:
            units = f"{line['ours']:12.6g} {line['other']:12.6g}"
            verdict = "ok" if line["ok"] else "OVER"
            print(f"{line['name']:<66} {units}  ratio {line['ratio']:6.3f}  limit {line['limit']:.2f}  {verdict}")
    sys.exit(not all(line["ok"] for line in results))


if __name__ == "__main__":
    main()
