"""How much host memory a process may take, and the refusal when a buffer needs more."""

import os
from pathlib import Path
from typing import Any

import psutil

from dots_jax.host.placement import Device

GIB = 1 << 30
MAX_RESERVE = 10 * GIB

# What XLA lets one CUDA client pin when the variable is not set.
_PINNED_POOL_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_PINNED_POOL_DEFAULT_GIB = 64


class HostMemoryError(ValueError):
    """A buffer needs more bytes than there are.

    Attributes:
      requested: bytes the buffer needs.
      available: bytes it may take.
    """

    def __init__(self, requested: int, available: int, limit: str = ""):
        self.requested = requested
        self.available = available
        super().__init__(
            f"Not enough host memory available: requested {requested} bytes ({requested / 1e9:.2f} GB), "
            f"available {available} bytes ({available / 1e9:.2f} GB){limit}."
        )
        self._limit = limit

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are rebuilt from their message alone, which is no argument here.
        return type(self), (self.requested, self.available, self._limit)


def _control_groups(root: Path, membership: Path) -> list[Path]:
    """The folders of this process's control group (version 2) and of its ancestors, up to the root.

    Inside a cgroup namespace the root is the process's own group. A group that the mount does not show has no folder.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    parts = [part for part in path.split("/") if part]
    if ".." in parts:  # outside the namespace's root
        parts = []
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _group_available(group: Path) -> int | None:
    """Bytes that one control group may still take, None where it sets no limit."""
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    # Clean file pages count as used but go away under pressure.
    return max(int(limit) - used + int(stat.get("inactive_file", 0)), 0)


def _cgroup_available(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes that this process's control group and all above it leave it, None where none sets a limit."""
    limits = [_group_available(group) for group in _control_groups(root, membership)]
    return min((limit for limit in limits if limit is not None), default=None)


def available_host_memory() -> int:
    """Bytes the operating system, or a tighter control group, can still hand out."""
    available = psutil.virtual_memory().available
    limit = _cgroup_available()
    return available if limit is None else min(available, limit)


def default_reserve() -> int:
    """Bytes left to everything else: 10 GiB, or an eighth of the memory where that is less."""
    return min(MAX_RESERVE, psutil.virtual_memory().total // 8)


def host_memory_budget(*, available: int | None = None, reserve: int | None = None, ranks_on_host: int = 1) -> int:
    """Bytes one rank may take for host buffers.

    Args:
      available: bytes free on the host; asked from the operating system where not given.
      reserve: bytes to leave to everything else; `default_reserve()` where not given.
      ranks_on_host: processes that share the host, each of which gets an equal part.

    Returns:
      `(available - reserve) // ranks_on_host`, at least 0.

    Raises:
      ValueError: `ranks_on_host` is below 1.
    """
    if ranks_on_host < 1:
        raise ValueError(f"ranks_on_host: expected at least 1, got {ranks_on_host}.")
    available = available_host_memory() if available is None else available
    reserve = default_reserve() if reserve is None else reserve
    return max(available - reserve, 0) // ranks_on_host


def pinned_pool_cap(platform: str) -> int | None:
    """Bytes that XLA lets one client pin on this platform; None where it has no cap of its own."""
    if platform not in ("gpu", "cuda", "rocm"):
        return None
    return int(os.environ.get(_PINNED_POOL_VARIABLE) or _PINNED_POOL_DEFAULT_GIB) * GIB


def check_budget(
    requested: int, *, memory_budget: int | None, memory_kind: str, device: Device, ranks_on_host: int = 1
) -> None:
    """Refuses a buffer that is too big, before it is allocated.

    Raises:
      HostMemoryError: with requested and available bytes; it names the pinned pool's own cap where that is the tighter.
    """
    budget = host_memory_budget(ranks_on_host=ranks_on_host) if memory_budget is None else memory_budget
    cap = pinned_pool_cap(device.platform) if memory_kind == "pinned_host" else None
    if cap is not None and cap < budget and requested > cap:
        raise HostMemoryError(
            requested, cap, f": the cap of XLA's pinned host memory pool, set by {_PINNED_POOL_VARIABLE}"
        )
    if not requested <= budget:  # a budget that is no number at all (NaN) allows nothing
        raise HostMemoryError(requested, budget)
