"""The serving shapes that the benchmark knows by name."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 513
PAGE_SIZE = 64


@dataclass(frozen=True)
class Shape:
    """One decode step of one layer.

    Args:
      name: unique; `h64-s4-b128` for the sliding layers, `full4k-h128-s1-b8` for full attention.
      batch: rows (requests).
      seq: query tokens of each row.
      heads: query heads on this device.
      width: elements of a cache row, latent and rope together.
      v_dim: leading elements of a cache row that are values.
      window: keys that a query sees, itself included; None is full attention.
      context: tokens that the longest row holds.
      scale: factor on the scores.
    """

    name: str
    batch: int
    seq: int
    heads: int
    width: int
    v_dim: int
    window: int | None
    context: int
    scale: float

    @property
    def keys_read(self) -> int:
        """Cache rows that one request needs in this step, whichever of its queries sees them."""
        return self.context if self.window is None else min(self.context, self.window + self.seq - 1)

    @property
    def keys_seen(self) -> int:
        """(query, key) pairs of one request and one head."""
        window = self.context if self.window is None else self.window
        return sum(min(window, self.context - self.seq + j + 1) for j in range(self.seq))

    def min_bytes(self, itemsize: int) -> int:
        """Bytes that must move: every needed cache row and q read once, the output written once."""
        queries = self.seq * self.heads * (self.width + self.v_dim)
        return self.batch * (self.keys_read * self.width + queries) * itemsize

    @property
    def flops(self) -> int:
        """Operations of the two products, a multiplication and an addition each counted."""
        return 2 * self.batch * self.heads * self.keys_seen * (self.width + self.v_dim)


def _sliding(heads: int, seq: int, batch: int) -> Shape:
    return Shape(
        name=f"h{heads}-s{seq}-b{batch}",
        batch=batch,
        seq=seq,
        heads=heads,
        width=1088,
        v_dim=1024,
        window=WINDOW,
        context=1024,
        scale=256**-0.5,
    )


def _full(thousands: int, heads: int, batch: int) -> Shape:
    return Shape(
        name=f"full{thousands}k-h{heads}-s1-b{batch}",
        batch=batch,
        seq=1,
        heads=heads,
        width=576,
        v_dim=512,
        window=None,
        context=thousands * 1024,
        scale=192**-0.5,
    )


# 64 heads: data-parallel attention; 8: tensor parallelism over 8. 1, 2, 4 tokens: no speculation, one and three drafts.
SLIDING = tuple(_sliding(h, s, b) for h in (64, 8) for s in (1, 2, 4) for b in (1, 8, 32, 64, 128, 256))
# The full layers have 128 heads; 16 is tensor parallelism over 8.
FULL = tuple(_full(k, h, b) for k in (4, 32) for h in (128, 16) for b in (1, 8, 32))
ALL = SLIDING + FULL

QUICK = ("h64-s1-b1", "h64-s1-b128", "h64-s4-b128", "h8-s1-b1", "h8-s4-b128", "full4k-h128-s1-b8", "full32k-h16-s1-b8")
CPU = ("h64-s1-b1", "h64-s1-b8", "h64-s4-b1", "h64-s4-b8", "h8-s1-b1", "h8-s1-b8", "h8-s4-b8", "full4k-h16-s1-b1")
CPU_QUICK = ("h64-s1-b1", "h8-s4-b1", "full4k-h16-s1-b1")


def default_names(platform: str, quick: bool) -> tuple[str, ...]:
    """What is timed when nobody names shapes: all on an accelerator, on a CPU those that take well under a second."""
    if platform == "cpu":
        return CPU_QUICK if quick else CPU
    return QUICK if quick else tuple(shape.name for shape in ALL)


def by_priority(shapes: Sequence[Shape]) -> list[Shape]:
    """The same shapes, those of the quick runs first."""
    return sorted(shapes, key=lambda shape: shape.name not in (*QUICK, *CPU_QUICK))


def select(patterns: Sequence[str]) -> tuple[Shape, ...]:
    """The shapes whose names match one of the shell patterns, in the order of `ALL`.

    Raises:
      ValueError: a pattern matches none.
    """
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(shape.name, pattern) for shape in ALL):
            raise ValueError(f"no shape matches {pattern!r}; names look like {SLIDING[0].name} and {FULL[0].name}")
    return tuple(shape for shape in ALL if any(fnmatch.fnmatchcase(shape.name, pattern) for pattern in patterns))
