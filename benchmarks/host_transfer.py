"""Host transfers: cost against the buffer's size, bandwidth against `numpy.copyto`, and overlap of layer-wise loads.

    python benchmarks/host_transfer.py [--rounds 9] [--pages 256] [--json]

Ratios come from rounds in which both sides alternate, so that both see the same machine; each is the median over
rounds, with the best round of either side beside it. Bandwidth ratios are copyto time / transfer time (1 = as fast).
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from dots_jax.host import DeviceKV, KVSpec, allocate_host_kv

GLOBAL_POOL = KVSpec(9, 4, 192, 128)  # MiMo-V2-Flash, global attention: 23,040 bytes per token
SMALL_POOL = KVSpec(4, 1, 64, 48, page_size=16)  # 14,336 bytes per page, so that 16,384 pages take 235 MB
LIMITS = {"size": 1.1, "bandwidth": 0.7, "extra memory": 2.0}


def seconds(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(step())
    return time.perf_counter() - start


def device_arrays(spec: KVSpec, num_slots: int, seed: int = 0) -> DeviceKV:
    keys = iter(jax.random.split(jax.random.key(seed), 2 * spec.num_layers))

    def layers(width: int) -> tuple[jax.Array, ...]:
        shape = (num_slots, spec.num_heads, width)
        return tuple(jax.random.normal(next(keys), shape, spec.dtype) for _ in range(spec.num_layers))

    return jax.block_until_ready(DeviceKV(layers(spec.head_dim), layers(spec.v_width)))


class Transfers:
    """A buffer and device arrays that are replaced by each donated transfer."""

    def __init__(self, spec: KVSpec, layout: str, num_pages: int, host_pages: np.ndarray, device_pages: np.ndarray):
        self.host = allocate_host_kv(spec, num_pages, layout=layout)
        self.device = device_arrays(spec, (int(device_pages.max()) + 1) * spec.page_size)
        offsets = np.arange(spec.page_size)
        self.slots = [(pages[:, None] * spec.page_size + offsets).reshape(-1) for pages in (host_pages, device_pages)]

    def backup(self) -> Any:
        """Backs every page up."""
        self.host = self.host.backup(self.device, *self.slots, donate=True)
        return self.host

    def load(self) -> Any:
        """Loads every page of every layer."""
        for layer, arrays in self.host.load_layers(self.device, *self.slots, donate=True):
            self.device = self.device.with_layer(layer, arrays)
        return self.device


def alternate(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step in each round, after one round that compiles."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(rounds + 1):
        for name, step in steps.items():
            taken = seconds(step)
            if round_number:
                times[name].append(taken)
    return times


def ratio(over: list[float], under: list[float]) -> tuple[float, float]:
    """Median of the rounds' ratios, and the ratio of the best rounds."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True)), min(over) / min(under)


def size_ratios(layout: str, rounds: int) -> dict[str, tuple[float, float]]:
    """Time of 8 pages in a buffer of 16,384 pages over the same in one of 64."""
    pages = np.array([5, 60, 17, 33, 2, 48, 9, 21])
    pools = {n: Transfers(SMALL_POOL, layout, n, pages * (n // 64), pages) for n in (64, 16384)}
    result = {}
    for kind in ("backup", "load"):
        steps = {str(n): getattr(pool, kind) for n, pool in pools.items()}
        times = alternate(steps, 20 * rounds)
        result[kind] = ratio(times["16384"], times["64"])
    return result


def bandwidth_ratios(layout: str, order: str, num_pages: int, rounds: int) -> dict[str, tuple[float, float]]:
    """`numpy.copyto` time over the transfer time of the same bytes."""
    rng = np.random.default_rng(0)
    shuffled = order == "shuffled"
    pages = [rng.permutation(num_pages) if shuffled else np.arange(num_pages) for _ in range(2)]
    pool = Transfers(GLOBAL_POOL, layout, num_pages, pages[0], 1 + pages[1])
    source = np.ones(num_pages * GLOBAL_POOL.page_bytes, np.uint8)
    target = np.zeros_like(source)
    times = alternate({"copyto": lambda: np.copyto(target, source), "backup": pool.backup, "load": pool.load}, rounds)
    return {kind: ratio(times["copyto"], times[kind]) for kind in ("backup", "load")}


def extra_memory(layout: str) -> dict[str, float]:
    """Peak extra bytes over bytes moved, from the compiled functions: 8 pages, 512 in the buffer."""
    host = allocate_host_kv(SMALL_POOL, 512, layout=layout)
    device = device_arrays(SMALL_POOL, 512 * SMALL_POOL.page_size)
    slots = jnp.arange(8 * SMALL_POOL.page_size, dtype=jnp.int32)
    backup = jax.jit(lambda host, device, a, b: host.backup(device, a, b), donate_argnums=0)
    load = jax.jit(lambda k, v, host, a, b: host.load(DeviceKV(k, v), 1, a, b), donate_argnums=(0, 1))
    moved = slots.size * SMALL_POOL.bytes_per_token
    result = {}
    for kind, lowered, bytes_moved in (
        ("backup", backup.lower(host, device, slots, slots), moved),
        ("load", load.lower(device.k, device.v, host, slots, slots), moved / SMALL_POOL.num_layers),
    ):
        stats = lowered.compile().memory_analysis()
        assert stats is not None
        copied = stats.output_size_in_bytes - stats.alias_size_in_bytes
        if kind == "load":  # arrays of the other layers are donated and dropped, not copied
            copied = 0
        result[kind] = (stats.temp_size_in_bytes + max(copied, 0)) / bytes_moved
    return result


def overlap(rounds: int) -> tuple[float, float]:
    """Time of loads with compute between them, prefetching over not, and over the compute alone."""
    pages = np.arange(64)
    pool = Transfers(GLOBAL_POOL, "page_first", 64, pages, 1 + pages)
    weights = jnp.ones((768, 768), jnp.float32)

    @jax.jit
    def compute(k: jax.Array) -> jax.Array:
        return jnp.tanh(k.reshape(-1, 768).astype(jnp.float32) @ weights).sum()

    def run(prefetch: int) -> list[jax.Array]:
        results = []
        for layer, arrays in pool.host.load_layers(pool.device, *pool.slots, prefetch=prefetch, donate=True):
            pool.device = pool.device.with_layer(layer, arrays)
            results.append(compute(arrays.k))
            if not prefetch:
                jax.block_until_ready(results[-1])
        return results

    pool.backup()
    times = alternate(
        {"waiting": lambda: run(0), "prefetch": lambda: run(1), "compute": lambda: [compute(k) for k in pool.device.k]},
        rounds,
    )
    return ratio(times["prefetch"], times["waiting"])[0], ratio(times["prefetch"], times["compute"])[0]


def measure(rounds: int, num_pages: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def add(what: str, layout: str, kind: str, value: float, best: float | None, limit: str | None):
        rows.append(
            {"measured": what, "layout": layout, "transfer": kind, "ratio": value, "best": best, "limit": limit}
        )

    for layout in ("page_first", "page_first_direct"):
        for kind, (median, best) in size_ratios(layout, rounds).items():
            add("16,384 pages / 64 pages", layout, kind, median, best, f"<= {LIMITS['size']}")
        for order in ("in order", "shuffled"):
            for kind, (median, best) in bandwidth_ratios(layout, order, num_pages, rounds).items():
                add(f"copyto / transfer, {order}", layout, kind, median, best, f">= {LIMITS['bandwidth']}")
        for kind, value in extra_memory(layout).items():
            add("extra bytes / bytes moved", layout, kind, value, None, f"<= {LIMITS['extra memory']}")
    waiting, compute = overlap(rounds)
    add("prefetch / waiting", "page_first", "layer-wise load", waiting, None, None)
    add("prefetch / compute alone", "page_first", "layer-wise load", compute, None, None)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each comparison (default: %(default)s)")
    parser.add_argument("--pages", type=int, default=256, help="pages of the bandwidth runs (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    rows = measure(args.rounds, args.pages)
    setting = {"jax": jax.__version__, "device": str(jax.devices()[0]), "machine": platform.machine()}
    if args.json:
        print(json.dumps({"setting": setting, "rows": rows}))
        return
    table = Table("measured", "layout", "transfer", "ratio", "best rounds", "limit", title=str(setting))
    for row in rows:
        best = "" if row["best"] is None else f"{row['best']:.2f}"
        table.add_row(row["measured"], row["layout"], row["transfer"], f"{row['ratio']:.2f}", best, row["limit"] or "")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
