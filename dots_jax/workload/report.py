"""How a run is shown: a few lines for people, one JSON object for programs."""

import dataclasses
from typing import Any

from dots_jax.sizes import PAGE_SIZE, window_pages
from dots_jax.workload.job import JobOptions, JobResult
from dots_jax.workload.loop import LoopSpec


def rates(result: JobResult) -> tuple[float, float]:
    """Accepted tokens a second, and milliseconds a step."""
    return result.tokens / max(result.decode_s, 1e-9), 1e3 * result.decode_s / max(result.steps, 1)


def as_json(spec: LoopSpec, options: JobOptions, result: JobResult, device: str) -> dict[str, Any]:
    """Settings, results and derived rates, ready for `json.dumps`."""
    tokens_per_s, ms_per_step = rates(result)
    settings = {
        "batch": options.batch,
        "layers": spec.layers,
        "draft_tokens": spec.draft_tokens,
        "window": spec.window,
        "pool_pages": options.num_pages,
        "dtype": str(options.dtype),
        "implementation": spec.implementation or "auto",
        "seed": options.seed,
        "device": device,
    }
    rate = {"tokens_per_s": tokens_per_s, "ms_per_step": ms_per_step}
    return {"ok": not result.failure_count, "settings": settings, **rate, **dataclasses.asdict(result)}


def as_text(spec: LoopSpec, options: JobOptions, result: JobResult, device: str) -> str:
    """The report that a person reads."""
    tokens_per_s, ms_per_step = rates(result)
    pages = window_pages(spec.window, spec.draft_tokens)
    worst = result.worst
    lines = [
        ("ran", f"{result.steps} steps of {options.batch} rows x {spec.draft_tokens} drafts in {spec.layers} layers,"
         f" {options.dtype} on {device}, implementation {spec.implementation or 'auto'}"),
        ("requests", f"{result.requests_admitted} admitted, {result.requests_finished} finished,"
         f" {result.requests_waiting} waiting; {result.shortest} to {result.longest} tokens long"),
        ("speed", f"{tokens_per_s:.1f} accepted tokens/s, {ms_per_step:.2f} ms a step"
         f" ({result.tokens} tokens in {result.decode_s:.1f} s; {result.admit_s:.1f} s admitting,"
         f" {result.check_s:.1f} s checking, {result.warm_up_s:.1f} s compiling)"),
        ("pages in use", f"{result.pages_peak} at most, {result.pages_end} at the end, of {options.num_pages}"),
        ("cache", f"{result.bytes_per_request / 2**20:.2f} MiB a request whatever its length: {pages} pages of"
         f" {PAGE_SIZE} tokens in {spec.layers} layers ({result.held_peak} held between steps)"),
        ("worst error", f"{worst.absolute:.2g} absolute, {worst.cosine:.2g} cosine, {worst.lse:.2g} log-sum-exp"),
        ("checks", f"{result.samples} outputs against the reference, {result.pool_checks} of the pool,"
         f" {result.retraces} retraces: " + ("all passed" if not result.failure_count else "FAILED")),
    ]  # fmt: skip
    failures = [f"  {line}" for line in result.failures]
    if hidden := result.failure_count - len(result.failures):
        failures.append(f"  and {hidden} more")
    return "\n".join([f"{name:<13} {text}" for name, text in lines] + failures)
