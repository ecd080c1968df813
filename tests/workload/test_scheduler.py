import numpy as np
import pytest

from dots_jax.workload.request import Request
from dots_jax.workload.scheduler import Scheduler, pages_needed


@pytest.mark.parametrize(
    ("request_", "pages"),
    [(Request(1, 1), 1), (Request(61, 1), 2), (Request(60, 1), 1), (Request(600, 37), 10), (Request(100_000, 500), 10)],
)
def test_pages_needed_counts_drafts_and_stops_at_the_window(request_, pages):
    assert pages_needed(request_, 513, 4) == pages


def test_admits_in_order_while_pages_suffice_and_reuses_what_finishes():
    requests = [Request(5000, 4), Request(5000, 8), Request(30, 4)]
    scheduler = Scheduler(requests, batch=3, num_pages=15, window=513, draft_tokens=4)

    assert [(a.row, a.request_id) for a in scheduler.admit()] == [(0, 0)]  # the second needs 10 of the 5 left
    assert scheduler.waiting == 2  # and the short third one does not overtake it
    assert scheduler.accept(np.array([3, 3, 3])).tolist() == [3, 0, 0]
    assert not scheduler.finish().any()
    assert scheduler.accept(np.array([4, 4, 4])).tolist() == [1, 0, 0]  # only one more was wanted
    assert scheduler.lengths.tolist() == [5004, 0, 0]
    assert scheduler.finish().tolist() == [True, False, False]

    assert [(a.row, a.request_id) for a in scheduler.admit()] == [(0, 1), (1, 2)]
    assert scheduler.accept(np.array([4, 4, 4])).tolist() == [4, 4, 0]
    assert scheduler.finish().tolist() == [False, True, False]
    scheduler.accept(np.array([4, 1, 1]))
    assert scheduler.finish().tolist() == [True, False, False]
    assert (scheduler.finished, scheduler.decoded, scheduler.waiting) == (3, 16, 0)
    assert not scheduler.active.any()
