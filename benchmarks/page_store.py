"""Page store on local files against plain Python file I/O of the same bytes, interleaved.

    python -m benchmarks.page_store [--pages 1000] [--directory DIR] [--json]

Ratios are plain time / store time (1 = as fast as plain files), the median over rounds; files stay in the page cache on
both sides. The plain side writes and reads the bytes of each page with `open`; the store also checks, checksums, moves
pages from and to the host buffer and renames files into place. Both rates are also given per processor second, which
another program on the machine disturbs less.
"""

import argparse
import functools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from dots_jax.host.allocate import allocate_host_kv
from dots_jax.host.specs import KVSpec
from dots_jax.host.store import PageStore

SPEC = KVSpec(num_layers=9, num_heads=4, head_dim=192, v_head_dim=128, page_size=64)  # MiMo-V2-Flash, global attention


class Clock:
    """Wall and processor seconds of calls, by name."""

    def __init__(self):
        self.times: dict[str, list[tuple[float, float]]] = {}

    def __call__(self, name: str, function: Callable[[], Any]) -> Any:
        """Calls the function and keeps its times."""
        cpu, wall = time.process_time(), time.perf_counter()
        result = function()
        elapsed = time.perf_counter() - wall, time.process_time() - cpu
        self.times.setdefault(name, []).append(elapsed)
        return result

    def median(self, name: str, which: int = 0) -> float:
        """Seconds, the middle of all rounds."""
        return statistics.median(pair[which] for pair in self.times[name])

    def ratio(self, base: str, name: str, which: int = 0) -> float:
        """The middle of the rounds' `base` / `name`; each round's two calls follow one another."""
        pairs = zip(self.times[base], self.times[name], strict=True)
        return statistics.median(a[which] / b[which] for a, b in pairs)


def plain_put(directory: Path, pages: np.ndarray) -> None:
    directory.mkdir(exist_ok=True)
    for i, page in enumerate(pages):
        with (directory / str(i)).open("wb") as file:
            file.write(page.data)


def plain_get(directory: Path, count: int) -> None:
    for i in range(count):
        with (directory / str(i)).open("rb") as file:
            file.read()


def fill(pages: int) -> tuple[Any, np.ndarray]:
    """A buffer with random pages, and the same bytes as `uint8[pages, page_bytes]`."""
    host = allocate_host_kv(SPEC, pages, layout="page_first_direct")
    data = np.random.default_rng(0).integers(0, 256, (pages, SPEC.page_bytes), dtype=np.uint8)
    for i, page in enumerate(data):
        host = host.set_page(i, page, donate=True)
    return host, data


VARIANTS = {
    "xxh3": {},
    "sha256": {"checksum": "sha256"},
    "durable": {"durable": True},
}


def measure(pages: int, rounds: int, directory: Path, variants: list[str]) -> dict[str, Any]:
    host, data = fill(pages)
    slots = np.arange(pages * SPEC.page_size)
    keys = PageStore.page_keys(slots, SPEC.page_size)
    clock = Clock()
    for _ in range(rounds):
        for number, name in enumerate(variants):
            with PageStore.open(f"file://{directory}/{number}", SPEC, **VARIANTS[name]) as store:
                clock(f"plain put / {name}", functools.partial(plain_put, directory / "plain", data))
                clock(f"put / {name}", functools.partial(store.put, keys, host, slots))
                clock(f"plain get / {name}", functools.partial(plain_get, directory / "plain", pages))
                host, hits = clock(f"get / {name}", functools.partial(store.get, keys, host, slots, donate=True))
            assert all(hits), f"{hits.count(False)} pages lost"
            shutil.rmtree(directory / "plain")  # both sides make their files anew in every round
            shutil.rmtree(directory / str(number))
    for i in (0, pages // 2, pages - 1):
        assert (host.get_page(i) == data[i]).all(), f"page {i} differs"
    size = data.nbytes / 1e9
    rows = {}
    for name in variants:
        rows[name] = {
            f"{what}_{figure}": round(value, 3)
            for what in ("put", "get")
            for figure, value in (
                ("ratio", clock.ratio(f"plain {what} / {name}", f"{what} / {name}")),
                ("ratio_cpu", clock.ratio(f"plain {what} / {name}", f"{what} / {name}", 1)),
                ("gb_s", size / clock.median(f"{what} / {name}")),
                ("plain_gb_s", size / clock.median(f"plain {what} / {name}")),
            )
        }
    clock("xxh3", lambda: [xxhash.xxh3_128_digest(page.data) for page in data])
    rate = round(size / clock.median("xxh3"), 2)
    return {"pages": pages, "page_bytes": SPEC.page_bytes, "xxh3_gb_s": rate, "stores": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=1000, help="pages of 1.47 MB (default 1000)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="where to make and remove the files (default: temporary files)")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="default: all")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="page-store-", dir=options.directory) as directory:
        report = measure(options.pages, options.rounds, Path(directory), options.variant or list(VARIANTS))
    if options.json:
        print(json.dumps(report))
        return
    print(f"{report['pages']} pages of {report['page_bytes']} bytes; XXH3 alone {report['xxh3_gb_s']} GB/s")
    for name, row in report["stores"].items():
        for what in ("put", "get"):
            ratio, by_cpu, rate, plain = (row[f"{what}_{x}"] for x in ("ratio", "ratio_cpu", "gb_s", "plain_gb_s"))
            print(
                f"{name:20} {what}  {ratio:.2f} x plain ({by_cpu:.2f} by processor time)  "
                f"{rate:.2f} GB/s, plain {plain:.2f} GB/s"
            )


if __name__ == "__main__":
    main()
