"""The host's own record of what the caches must hold, kept without page tables.

The device finds a token through extend, rollback, release and a page table. The mirror only remembers, for the last few
hundred positions of each row, which step wrote them; `content` turns that into the expected rows.
"""

import numpy as np

from dots_jax.sizes import PAGE_SIZE
from dots_jax.workload.content import latent_index, query_index
from dots_jax.workload.loop import LoopSpec


class Mirror:
    """Who wrote which position when, and how many pages a row must hold."""

    def __init__(self, spec: LoopSpec, batch: int):
        self._spec = spec
        self._ring = spec.live_tokens + spec.draft_tokens + PAGE_SIZE
        self._written_by = np.zeros((batch, self._ring), np.uint32)

    def admitted(self, row: int, context: int, step: int) -> None:
        """The context's live end was written."""
        first = max(0, context - self._spec.live_tokens)
        self._written_by[row, np.arange(first, context) % self._ring] = step

    def decoded(self, lengths: np.ndarray, active: np.ndarray, step: int) -> None:
        """Drafts were written at the ends of the active rows; `lengths` are those before the step."""
        for row in np.flatnonzero(active):
            positions = np.arange(lengths[row], lengths[row] + self._spec.draft_tokens)
            self._written_by[row, positions % self._ring] = step

    def keys(self, row: int, request_id: int, first: int, end: int, layer: int) -> np.ndarray:
        """Bank indices of the cache rows of positions `first` to `end` (exclusive)."""
        positions = np.arange(first, end, dtype=np.uint32)
        written_by = self._written_by[row, positions % self._ring]
        return latent_index(np.full_like(positions, request_id), positions, written_by, layer)

    def queries(self, request_id: int, first: int, step: int, layer: int) -> np.ndarray:
        """Bank indices of the queries of one step, the first at position `first`."""
        positions = np.arange(first, first + self._spec.draft_tokens, dtype=np.uint32)
        return query_index(np.full_like(positions, request_id), positions, np.full_like(positions, step), layer)

    def pages_held(self, lengths: np.ndarray) -> np.ndarray:
        """Pages of each row between steps: those from the one with the oldest visible token to the last."""
        oldest_visible = np.maximum(0, lengths - (self._spec.window - 1))
        return -(-lengths // PAGE_SIZE) - oldest_visible // PAGE_SIZE
