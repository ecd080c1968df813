"""What the job verifies about itself while it runs."""

import dataclasses
from collections import Counter

import jax.numpy as jnp
import numpy as np

from dots_jax.decode import swa_latent_decode_reference
from dots_jax.pages import PagePoolError, PageTable, check_pool
from dots_jax.sizes import PAGE_SIZE
from dots_jax.workload.content import Banks
from dots_jax.workload.loop import TRACES, LoopSpec, Outputs, State
from dots_jax.workload.mirror import Mirror
from dots_jax.workload.scheduler import Scheduler

# Largest cosine difference to the float32 reference on the same rounded inputs. Rounding the output
# and the weights to bfloat16 leaves 1e-6 to 4e-6; a window that is off by one token leaves 1e-4 or more.
COSINE_LIMIT = {"bfloat16": 1e-5, "float16": 1e-5, "float32": 1e-9}
LSE_LIMIT = 1e-5
MOST_FAILURES_KEPT = 20


@dataclasses.dataclass
class Worst:
    """Largest differences to the reference so far: output (absolute and cosine) and log sum of exponentials."""

    absolute: float = 0.0
    cosine: float = 0.0
    lse: float = 0.0


class Checks:
    """Collects failures instead of raising, so that a run reports all of them.

    Attributes:
      failures: one line each.
      failure_count: how many there were; `failures` keeps the first ones.
      worst: largest differences seen.
      samples: (row, layer) pairs compared with the reference.
      pool_checks: how often pool and table were verified.
      retraces: functions traced after the warm-up.
    """

    def __init__(self, spec: LoopSpec, banks: Banks, mirror: Mirror):
        self._spec, self._mirror = spec, mirror
        self._latent, self._query = np.asarray(banks.latent), np.asarray(banks.query)
        self._cosine_limit = COSINE_LIMIT[str(self._latent.dtype)]
        self._warm: Counter[str] = Counter()
        self.failures: list[str] = []
        self.failure_count = 0
        self.worst = Worst()
        self.samples = 0
        self.pool_checks = 0
        self.retraces = 0

    def warmed_up(self) -> None:
        """From here on, tracing again is a failure."""
        self._warm = TRACES.copy()

    def fail(self, message: str) -> None:
        """Records a failure."""
        self.failure_count += 1
        if len(self.failures) < MOST_FAILURES_KEPT:
            self.failures.append(message)

    def traces(self) -> None:
        """No function was traced since the warm-up: shapes, dtypes and static values were the same all along."""
        again = TRACES - self._warm
        self.retraces = again.total()
        if again:
            self.fail("traced again after the warm-up: " + ", ".join(f"{name} x{n}" for name, n in again.items()))

    def pages(self, state: State, scheduler: Scheduler, step: int) -> None:
        """The pool adds up, and every row has the length and as many pages as the host's arithmetic says."""
        self.pool_checks += 1
        try:
            check_pool(state.pool, state.table)
        except PagePoolError as error:
            self.fail(f"step {step}: {error}")
        lengths = np.asarray(state.table.lengths)
        held = np.sum(np.asarray(state.table.pages) >= 0, axis=1)
        for what, got, expected in (
            ("length", lengths, scheduler.lengths),
            ("pages held", held, self._mirror.pages_held(scheduler.lengths)),
        ):
            for row in np.flatnonzero(got != expected):
                self.fail(f"step {step} row {row}: {what}: expected {expected[row]}, got {got[row]}")
        if int(state.refused):
            self.fail(f"step {step}: {int(state.refused)} rows were refused pages that were reserved for them")

    def outputs(self, outputs: Outputs, row: int, layer: int, *, request_id: int, length: int, step: int) -> None:
        """One row of one layer equals the reference over the rows that the host knows were written.

        The expected keys come from the mirror in plain order, without the run's pages, so a wrong page, a lost write
        and a wrong sum all show here. The window starts at the oldest token that the first query sees; attention has no
        position of its own, so moving the start to 0 changes nothing.

        Args:
          outputs: of the step.
          row: of the batch.
          layer: of the model.
          request_id: the request in the row.
          length: its committed tokens before the step.
          step: for the message and the contents.
        """
        self.samples += 1
        spec, where = self._spec, f"step {step} row {row} layer {layer}"
        first = max(0, length - (spec.window - 1))
        end = length + spec.draft_tokens
        keys = self._latent[self._mirror.keys(row, request_id, first, end, layer)]
        num_pages = -(-len(keys) // PAGE_SIZE)
        kv_pages = np.zeros((num_pages, PAGE_SIZE, keys.shape[1]), keys.dtype)
        kv_pages.reshape(-1, keys.shape[1])[: len(keys)] = keys
        table = PageTable(jnp.arange(num_pages, dtype=jnp.int32)[None], jnp.array([len(keys)], jnp.int32), PAGE_SIZE)
        expected, expected_lse = swa_latent_decode_reference(
            self._query[self._mirror.queries(request_id, length, step, layer)][None],  # pyright: ignore[reportArgumentType]
            kv_pages,  # pyright: ignore[reportArgumentType]
            table,
            window=spec.window,
            scale=spec.geometry.softmax_scale,
            v_dim=spec.geometry.kv_lora_rank,
        )
        got = np.asarray(outputs.outs[layer])[row].astype(np.float64)
        got_lse = np.asarray(outputs.lses[layer])[row]
        if not (np.isfinite(got).all() and np.isfinite(got_lse).all()):
            self.fail(f"{where}: the output is not finite")
            return
        self._compare(where, got, expected[0].astype(np.float64), float(np.abs(got_lse - expected_lse[0]).max()))

    def _compare(self, where: str, got: np.ndarray, expected: np.ndarray, lse_error: float) -> None:
        absolute = float(np.abs(got - expected).max())
        norms = np.linalg.norm(got, axis=-1) * np.linalg.norm(expected, axis=-1)
        cosine = float(np.max(1 - np.sum(got * expected, axis=-1) / np.maximum(norms, np.finfo(np.float64).tiny)))
        worst = self.worst
        worst.absolute, worst.cosine = max(worst.absolute, absolute), max(worst.cosine, cosine)
        worst.lse = max(worst.lse, lse_error)
        if cosine > self._cosine_limit:
            self.fail(f"{where}: cosine difference to the reference {cosine:.2g}, at most {self._cosine_limit:.2g}")
        if lse_error > LSE_LIMIT:
            self.fail(f"{where}: log-sum-exp differs from the reference by {lse_error:.2g}, at most {LSE_LIMIT:.2g}")
        # The cosine does not see a wrong factor.
        ratio = float(np.linalg.norm(got) / max(np.linalg.norm(expected), np.finfo(np.float64).tiny))
        if abs(ratio - 1) > 1e-3:
            self.fail(f"{where}: the output's norm is {ratio:.4f} of the reference's")

    def empty(self, state: State) -> None:
        """After every request gave up its pages, all of them are free."""
        if used := state.pool.num_pages - int(state.pool.num_free):
            self.fail(f"{used} pages are still in use after every request was freed")
