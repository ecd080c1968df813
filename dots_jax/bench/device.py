"""What the benchmark must know of the device it runs on."""

import dataclasses
import os
import platform
from pathlib import Path

import jax
import psutil

from dots_jax.bench.shapes import Shape

_MIB = 1 << 20
# Level-2 caches by device name; the largest of them where the name is unknown, so that the pool is never too small.
_GPU_CACHES = {"H200": 60 * _MIB, "H100": 50 * _MIB, "A100": 40 * _MIB, "B200": 126 * _MIB}
_MOST_CALLS = 512
_CPU_INFO = Path("/proc/cpuinfo")
_CPU_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


@dataclasses.dataclass(frozen=True)
class Device:
    """The default JAX device.

    Args:
      platform: `"cpu"`, `"gpu"` or `"tpu"`.
      kind: its name.
      cache_bytes: of the last cache before memory.
      memory_bytes: that inputs may take.
    """

    platform: str
    kind: str
    cache_bytes: int
    memory_bytes: int

    @property
    def queues_launches(self) -> bool:
        """Whether launches return before they have run, so that several can be in flight."""
        return self.platform != "cpu"

    def distinct_calls(self, shape: Shape, itemsize: int) -> int:
        """Calls with inputs of their own: at least two; enough to overflow the cache four times if memory allows."""
        one = shape.min_bytes(itemsize)
        wanted = -(-4 * self.cache_bytes // one)
        # A table's pages are read whole, up to a page more on each side than the keys that count.
        affordable = int(self.memory_bytes / (1.3 * one))
        return max(2, min(wanted, affordable, _MOST_CALLS))

    def calls_per_launch(self, floor_s: float) -> int:
        """Calls in one launch: about a millisecond of work, so that starting the next one hides behind it."""
        return max(2, min(16, round(1e-3 / floor_s))) if self.queues_launches else 1


def default_device() -> Device:
    """Describes the device that new arrays go to."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        memory = min(2 << 30, psutil.virtual_memory().available // 4)
        return Device("cpu", f"{_cpu_name()}, {os.cpu_count()} cores", _cpu_cache_bytes(), memory)
    known = [size for name, size in _GPU_CACHES.items() if name in device.device_kind]
    stats = device.memory_stats() or {}
    memory = stats.get("bytes_limit", 16 << 30) // 4
    return Device(device.platform, device.device_kind, max(known or _GPU_CACHES.values()), memory)


def _cpu_name() -> str:
    """The processor as Linux names it."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "CPU"


def _cpu_cache_bytes() -> int:
    """The last-level cache as Linux states it, at most 64 MiB: a virtual machine is shown its host's whole cache."""
    try:
        text = _CPU_CACHE.read_text().strip()
        size = int(text.removesuffix("K")) << 10 if text.endswith("K") else int(text)
    except (OSError, ValueError):
        size = 32 * _MIB
    return min(size, 64 * _MIB)
