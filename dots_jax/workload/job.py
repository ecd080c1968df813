"""The run: warm-up, then admit, decode, check and finish until the steps or the requests are used up."""

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.typing import DTypeLike

from dots_jax.sizes import PAGE_SIZE, bytes_per_token, window_pages
from dots_jax.workload.checks import Checks, Worst
from dots_jax.workload.content import make_banks
from dots_jax.workload.loop import LoopSpec, Outputs, State, admit, decode_step, finish, make_state, pages_in_use
from dots_jax.workload.mirror import Mirror
from dots_jax.workload.request import Request
from dots_jax.workload.scheduler import Scheduler


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """Sizes of a run.

    Attributes:
      batch: rows.
      steps: most steps.
      num_pages: pages of the pool.
      dtype: of queries and caches.
      seed: of everything random.
      check_every: steps between checks; the first step is checked in all rows and layers, the last in all rows.
      samples: rows compared with the reference at the other checks.
    """

    batch: int
    steps: int
    num_pages: int
    dtype: DTypeLike
    seed: int
    check_every: int = 8
    samples: int = 2


@dataclasses.dataclass(frozen=True)
class JobResult:
    """What a run measured; times in seconds, lengths in tokens.

    Attributes:
      steps: decode steps.
      tokens: accepted tokens.
      requests_admitted: requests that got a row.
      requests_finished: requests that decoded all they wanted.
      requests_waiting: requests left over.
      shortest: shortest row at the end of a step.
      longest: longest row at the end of a step.
      decode_s: in decode steps, and in finishing requests.
      admit_s: in admitting requests.
      check_s: in checks.
      warm_up_s: until everything was compiled.
      pages_peak: most pages in use at once.
      pages_end: pages in use after the last step.
      held_peak: most pages that one row held between steps.
      bytes_per_request: bytes of all layers' pages that one row can hold during a step, constant in its length.
      worst: largest differences to the reference.
      samples: (row, layer) pairs compared.
      pool_checks: times that pool and table were verified.
      retraces: traces after the warm-up.
      failures: of the checks, the first ones.
      failure_count: of the checks, all.
    """

    steps: int
    tokens: int
    requests_admitted: int
    requests_finished: int
    requests_waiting: int
    shortest: int
    longest: int
    decode_s: float
    admit_s: float
    check_s: float
    warm_up_s: float
    pages_peak: int
    pages_end: int
    held_peak: int
    bytes_per_request: int
    worst: Worst
    samples: int
    pool_checks: int
    retraces: int
    failures: tuple[str, ...]
    failure_count: int


class _Stopwatch:
    """Sums time by purpose. Work on the device is asynchronous, so a change of purpose waits for it."""

    def __init__(self):
        self.seconds: dict[str, float] = {"warm_up": 0.0, "admit": 0.0, "decode": 0.0, "check": 0.0}
        self._purpose, self._since = "warm_up", time.perf_counter()

    def switch(self, purpose: str, state: State) -> None:
        if purpose != self._purpose:
            jax.block_until_ready(state)
            now = time.perf_counter()
            self.seconds[self._purpose] += now - self._since
            self._purpose, self._since = purpose, now


def table_columns(requests: Sequence[Request], draft_tokens: int) -> int:
    """Columns that the longest request needs, drafts included."""
    return -(-(max(request.tokens for request in requests) + draft_tokens) // PAGE_SIZE)


def run_job(
    spec: LoopSpec,
    requests: Sequence[Request],
    options: JobOptions,
    *,
    on_step: Callable[[int, int], None] | None = None,
) -> JobResult:
    """Runs the job.

    Args:
      spec: layers.
      requests: at least one; every one must fit the pool (see `scheduler.pages_needed`).
      options: sizes.
      on_step: called after each step with its number, counted from 1, and the tokens decoded so far.
    """
    run = _Run(spec, requests, options)
    run.warm_up()
    while run.step < options.steps:
        run.admit()
        if not run.scheduler.active.any():
            break
        run.decode()
        if on_step:
            on_step(run.step, run.scheduler.decoded)
    return run.result()


class _Run:
    """The state of a run; `step` counts the steps done."""

    def __init__(self, spec: LoopSpec, requests: Sequence[Request], options: JobOptions):
        self.spec, self.options, self.step = spec, options, 0
        self.watch = _Stopwatch()
        self.banks = make_banks(spec.geometry, options.dtype, options.seed)
        self.scheduler = Scheduler(
            requests,
            batch=options.batch,
            num_pages=options.num_pages,
            window=spec.window,
            draft_tokens=spec.draft_tokens,
        )
        self.mirror = Mirror(spec, options.batch)
        self.checks = Checks(spec, self.banks, self.mirror)
        self.random = np.random.default_rng([options.seed, 2])
        columns = table_columns(requests, spec.draft_tokens)
        self.state = make_state(
            spec, batch=options.batch, num_pages=options.num_pages, columns=columns, dtype=options.dtype
        )
        self.held_peak, self.shortest, self.longest, self.pages_end = 0, int(np.iinfo(np.int32).max), 0, 0

    def warm_up(self) -> None:
        """Compiles everything with calls that change nothing: an empty context, a step of no rows, nothing finished."""
        nobody = np.full(self.options.batch, -1)
        self.state = admit(self.spec, self.state, self.banks, *_int32(0, 0, 0, 0))
        self.state, _ = decode_step(self.spec, self.state, self.banks, *_int32(nobody, nobody, 0))
        self.state = finish(self.state, np.zeros(self.options.batch, bool))
        self.checks.warmed_up()

    def admit(self) -> None:
        """Gives empty rows to waiting requests."""
        for row, request_id, request in self.scheduler.admit():
            self.watch.switch("admit", self.state)
            values = _int32(row, request_id, request.context, self.step)
            self.state = admit(self.spec, self.state, self.banks, *values)
            self.mirror.admitted(row, request.context, self.step)
        self.watch.switch("decode", self.state)

    def decode(self) -> None:
        """One step, its checks if they are due, and the requests that it finished."""
        scheduler, step = self.scheduler, self.step
        ids, before = scheduler.request_ids.copy(), scheduler.lengths.copy()
        self.mirror.decoded(before, scheduler.active, step)
        kept = scheduler.accept(self.random.integers(1, self.spec.draft_tokens + 1, self.options.batch))
        self.state, outputs = decode_step(self.spec, self.state, self.banks, *_int32(ids, kept, step))
        active = scheduler.lengths[scheduler.active]
        self.held_peak = max(self.held_peak, int(self.mirror.pages_held(active).max()))
        self.shortest, self.longest = min(self.shortest, int(active.min())), max(self.longest, int(active.max()))

        last = step + 1 == self.options.steps or scheduler.over
        if last or step % self.options.check_every == 0:
            self.watch.switch("check", self.state)
            self._check(outputs, ids, before, last)
            self.pages_end = int(pages_in_use(self.state.pool))
            self.watch.switch("decode", self.state)
        done = scheduler.finish()
        if done.any():
            self.state = finish(self.state, done)
        self.step += 1

    def _check(self, outputs: Outputs, ids: np.ndarray, before: np.ndarray, last: bool) -> None:
        """Compares all rows in all layers at the first step, all rows in one layer at the last, else a few rows."""
        self.checks.pages(self.state, self.scheduler, self.step)
        rows, layers = np.flatnonzero(ids >= 0), self.spec.layers
        if self.step == 0:
            pairs = [(row, layer) for row in rows for layer in range(layers)]
        else:
            some = rows if last else self.random.permutation(rows)[: self.options.samples]
            pairs = [(row, int(self.random.integers(layers))) for row in some]
        for row, layer in pairs:
            self.checks.outputs(
                outputs, int(row), layer, request_id=int(ids[row]), length=int(before[row]), step=self.step
            )

    def result(self) -> JobResult:
        """Gives everything back, does the last checks and sums up."""
        self.watch.switch("check", self.state)
        peak = int(self.state.peak_pages)
        self.state = finish(self.state, np.ones(self.options.batch, bool))
        self.checks.empty(self.state)
        self.checks.traces()
        self.watch.switch("done", self.state)
        seconds, checks, scheduler, spec = self.watch.seconds, self.checks, self.scheduler, self.spec
        row_bytes = bytes_per_token(spec.geometry, self.options.dtype) * spec.layers
        return JobResult(
            steps=self.step,
            tokens=scheduler.decoded,
            requests_admitted=scheduler.finished + int(scheduler.active.sum()),
            requests_finished=scheduler.finished,
            requests_waiting=scheduler.waiting,
            shortest=self.shortest,
            longest=self.longest,
            decode_s=seconds["decode"],
            admit_s=seconds["admit"],
            check_s=seconds["check"],
            warm_up_s=seconds["warm_up"],
            pages_peak=peak,
            pages_end=self.pages_end,
            held_peak=self.held_peak,
            bytes_per_request=window_pages(spec.window, spec.draft_tokens) * PAGE_SIZE * row_bytes,
            worst=checks.worst,
            samples=checks.samples,
            pool_checks=checks.pool_checks,
            retraces=checks.retraces,
            failures=tuple(checks.failures),
            failure_count=checks.failure_count,
        )


def _int32(*values: int | np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(value, np.int32) for value in values)
