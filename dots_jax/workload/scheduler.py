"""Which requests are in the batch: admits them in order while pages are certain to suffice, drops finished ones.

                 waiting            batch rows (B of them)            finished
    requests  [r7 r6 r5 r4]  ->  [ r0 | r3 | -- | r2 ]  ->  done     [ r1 ]
                                       reserved pages <= pool pages

Every admitted request has as many pages reserved as it can ever hold at once, so growth is never refused and no request
has to be thrown out again. With a sliding window that is a constant, 10 pages for a window of 513 and 4 drafts.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dots_jax.sizes import PAGE_SIZE, window_pages
from dots_jax.workload.request import Request


class Admission(NamedTuple):
    """A request that just got a row of the batch; `request_id` counts from 0 in order of arrival."""

    row: int
    request_id: int
    request: Request


def pages_needed(request: Request, window: int, draft_tokens: int) -> int:
    """Most pages that the request holds at once, drafts that may be rejected included."""
    whole = -(-(request.tokens + draft_tokens - 1) // PAGE_SIZE)
    return min(whole, window_pages(window, draft_tokens))


class Scheduler:
    """Host-side state of a run.

    Attributes:
      request_ids: int32[B], the request in each row, -1 for an empty row.
      lengths: int32[B], committed tokens of each row.
      finished: how many requests are done.
      decoded: tokens decoded so far, accepted ones only.
    """

    def __init__(self, requests: Sequence[Request], *, batch: int, num_pages: int, window: int, draft_tokens: int):
        self._waiting = deque(enumerate(requests))
        self._window, self._draft_tokens = window, draft_tokens
        self._free_pages = num_pages
        self._reserved = np.zeros(batch, np.int32)
        self._remaining = np.zeros(batch, np.int32)
        self.request_ids = np.full(batch, -1, np.int32)
        self.lengths = np.zeros(batch, np.int32)
        self.finished = 0
        self.decoded = 0

    @property
    def active(self) -> np.ndarray:
        """bool[B], rows that hold a request."""
        return self.request_ids >= 0

    @property
    def waiting(self) -> int:
        """Requests that have not been admitted."""
        return len(self._waiting)

    @property
    def over(self) -> bool:
        """Whether nothing is left to decode once the rows that are done have been dropped."""
        return not self._waiting and not self._remaining[self.active].any()

    def admit(self) -> list[Admission]:
        """Moves waiting requests into empty rows, first come first served, while their pages can be reserved."""
        admitted = []
        for row in np.flatnonzero(~self.active):
            if not self._waiting:
                break
            request_id, request = self._waiting[0]
            pages = pages_needed(request, self._window, self._draft_tokens)
            if pages > self._free_pages:
                break
            self._waiting.popleft()
            self._free_pages -= pages
            self._reserved[row], self._remaining[row] = pages, request.output
            self.request_ids[row], self.lengths[row] = request_id, request.context
            admitted.append(Admission(int(row), request_id, request))
        return admitted

    def accept(self, drawn: np.ndarray) -> np.ndarray:
        """Counts one step's accepted tokens.

        Args:
          drawn: int[B], how many of the draft tokens the model would accept; a request that needs fewer takes fewer.

        Returns:
          int32[B], tokens kept of each row, 0 for an empty one.
        """
        kept = np.where(self.active, np.minimum(drawn, self._remaining), 0).astype(np.int32)
        self.lengths += kept
        self._remaining -= kept
        self.decoded += int(kept.sum())
        return kept

    def finish(self) -> np.ndarray:
        """bool[B], rows whose request is done; they are empty afterwards."""
        done = self.active & (self._remaining == 0)
        self._free_pages += int(self._reserved[done].sum())
        self.finished += int(done.sum())
        self.request_ids[done], self.lengths[done], self._reserved[done] = -1, 0, 0
        return done
