"""`decode`: the main job, a workload decoded by the sliding layers and checked as it goes."""

import argparse
import functools
import sys
from typing import TYPE_CHECKING

from dots_jax.cli.errors import ArgumentError
from dots_jax.cli.output import json_text

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from dots_jax.config import DotsConfig
    from dots_jax.workload.job import JobOptions, JobResult
    from dots_jax.workload.loop import LoopSpec
    from dots_jax.workload.request import Request

DTYPES = ("bfloat16", "float16", "float32")
IMPLEMENTATIONS = ("xla", "mosaic_gpu", "interpret")
DEFAULT_CONTEXT = 8192

DESCRIPTION = """\
Decodes a batch of requests with the sliding layers of the released model. Each step extends pages, writes the latents
of the draft tokens, decodes every layer, rolls back rejected drafts and releases what left the window. Contents are
random; how many drafts are accepted is drawn from the seed. Samples are compared with the reference. Exit code 1 if a
check failed, 2 for arguments that cannot be used."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "decode", help="decode a workload and check it (the main job)", description=DESCRIPTION
    )
    at_least_1 = _whole_number(1)
    parser.add_argument("--layers", type=at_least_1, default=3, help="sliding layers to run (default: %(default)s)")
    parser.add_argument("--batch", type=at_least_1, default=8, help="rows of the batch (default: %(default)s)")
    parser.add_argument("--steps", type=at_least_1, default=64, help="most steps (default: %(default)s)")
    parser.add_argument(
        "--context",
        type=at_least_1,
        help=f"longest context of the synthetic requests, tokens (default: {DEFAULT_CONTEXT}); the others are shorter",
    )
    parser.add_argument("--draft-tokens", type=at_least_1, default=4, help="query tokens a step (default: %(default)s)")
    parser.add_argument(
        "--trace", metavar="FILE", help="take the requests from a trace, Azure CSV or Mooncake JSON lines"
    )
    parser.add_argument("--pages", type=at_least_1, help="pages of the pool (default: what the batch needs)")
    parser.add_argument(
        "--config", metavar="PATH", help="config.json whose sliding layers to run (default: the released model)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="of queries and cache (default: %(default)s)"
    )
    parser.add_argument(
        "--implementation", choices=IMPLEMENTATIONS, help="of the decode (default: the best that can run)"
    )
    parser.add_argument("--seed", type=_whole_number(0), default=0, help="of all random numbers (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the report")
    parser.set_defaults(run=run)


def _whole_number(least: int):
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value < 2**31:
            bounds = f"at least {least}" if value < least else "at most 2**31 - 1"
            raise argparse.ArgumentTypeError(f"expected a whole number of {bounds}, got {text!r}")
        return value

    return parse


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; 1 if a check failed."""
    import jax

    from dots_jax.workload import report

    spec, requests, options = prepare(arguments)
    result = _run_with_progress(spec, requests, options)
    device = jax.devices()[0]
    name = device.device_kind if device.platform != "cpu" else "cpu"
    if arguments.json:
        print(json_text(report.as_json(spec, options, result, name)))
    else:
        print(report.as_text(spec, options, result, name))
    return 1 if result.failure_count else 0


def prepare(arguments: argparse.Namespace) -> "tuple[LoopSpec, tuple[Request, ...], JobOptions]":
    """Turns arguments into a job.

    Raises:
      ArgumentError: for anything that would fail later: an unreadable file, a pool that cannot hold one request, a
        cache that memory cannot hold, an implementation that cannot run here.
    """
    from dots_jax.sizes import window_pages
    from dots_jax.workload.job import JobOptions
    from dots_jax.workload.loop import LoopSpec

    config = load_config(arguments.config)
    spec = LoopSpec(config.swa, arguments.layers, arguments.draft_tokens, arguments.implementation)
    num_pages = arguments.pages or arguments.batch * window_pages(spec.window, spec.draft_tokens)
    options = JobOptions(arguments.batch, arguments.steps, num_pages, arguments.dtype, arguments.seed)
    _check_memory(spec, options)  # before the requests, which are as many as the batch has rows
    requests = _requests(arguments, config)
    _check_pool_size(spec, requests, num_pages)
    return spec._replace(implementation=_implementation(spec, options)), requests, options


def load_config(path: str | None) -> "DotsConfig":
    """The configuration that `--config` names, the released model's without it (`ArgumentError` if it is no good)."""
    from dots_jax.config import DotsConfig

    if path is None:
        return DotsConfig.dots3_note_prev()
    try:
        return DotsConfig.from_hf(path)
    except OSError as error:
        raise ArgumentError(f"--config: {error.strerror}: {error.filename}") from None
    except ValueError as error:
        raise ArgumentError(f"--config: {error}") from None


def _requests(arguments: argparse.Namespace, config: "DotsConfig") -> "tuple[Request, ...]":
    from dots_jax.workload.synthetic import synthetic_requests
    from dots_jax.workload.trace import TraceError, read_trace

    longest = config.max_position_embeddings
    if arguments.trace is not None:
        if arguments.context is not None:
            raise ArgumentError("--context is for synthetic requests and does not go with --trace")
        try:
            return read_trace(arguments.trace, longest=longest)
        except TraceError as error:
            raise ArgumentError(str(error)) from None
        except OSError as error:
            raise ArgumentError(f"--trace: {error.strerror}: {arguments.trace}") from None
    output = arguments.steps * arguments.draft_tokens  # more than can be accepted, so that no row runs dry
    context = arguments.context or max(1, min(DEFAULT_CONTEXT, longest - output))
    if context + output > longest:
        raise ArgumentError(
            f"--context {context} and {output} decoded tokens make {context + output}, the model has at most {longest}"
        )
    return synthetic_requests(arguments.batch, context=context, output=output, seed=arguments.seed)


def _check_pool_size(spec: "LoopSpec", requests: "tuple[Request, ...]", num_pages: int) -> None:
    from dots_jax.workload.scheduler import pages_needed

    for number, request in enumerate(requests):
        if (pages := pages_needed(request, spec.window, spec.draft_tokens)) > num_pages:
            raise ArgumentError(
                f"--pages {num_pages}: too few for request {number} ({request.context} + {request.output} tokens),"
                f" which needs {pages} for its window and drafts"
            )


def _check_memory(spec: "LoopSpec", options: "JobOptions") -> None:
    import jax
    import psutil

    from dots_jax.sizes import PAGE_SIZE, bytes_per_token

    device = jax.devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit") if device.platform != "cpu" else None
    available = psutil.virtual_memory().available if limit is None else limit
    geometry, row = spec.geometry, bytes_per_token(spec.geometry, options.dtype)
    queries = options.batch * spec.draft_tokens * geometry.num_heads
    # Queries as wide as a cache row; outputs of each layer, which are almost as wide; the latents of one admission.
    step = queries * row * (1 + spec.layers) + spec.live_tokens * row
    for what, needed in (
        (f"the cache of {options.num_pages} pages", options.num_pages * PAGE_SIZE * row * spec.layers),
        (f"a step of {options.batch} rows x {spec.draft_tokens} drafts over a window of {spec.window}", step),
    ):
        if needed > available:
            raise ArgumentError(
                f"{what} in {spec.layers} layers takes {needed / 2**30:.1f} GiB,"
                f" {available / 2**30:.1f} GiB are available"
            )


def _implementation(spec: "LoopSpec", options: "JobOptions") -> str:
    """The one that was asked for, or the first that can run, so that the report says what ran."""
    shape = {"batch": options.batch, "num_pages": options.num_pages, "dtype": options.dtype}
    if spec.implementation is None:
        kernel = spec._replace(implementation="mosaic_gpu")
        return "xla" if refusal(kernel, **shape) else "mosaic_gpu"
    if reason := refusal(spec, **shape):
        raise ArgumentError(f"--implementation {spec.implementation}: {reason}")
    return spec.implementation


def refusal(spec: "LoopSpec", *, batch: int, num_pages: int, dtype: "DTypeLike") -> str | None:
    """Why the implementation cannot decode these shapes here, in one line, or None if it can.

    Tracing is where an implementation says so; nothing is compiled or allocated.
    """
    import jax
    import jax.numpy as jnp

    from dots_jax.decode import swa_latent_decode
    from dots_jax.pages import PageTable

    geometry = spec.geometry
    decode = functools.partial(
        swa_latent_decode,
        window=spec.window,
        scale=geometry.softmax_scale,
        v_dim=geometry.kv_lora_rank,
        implementation=spec.implementation,
    )
    q = jax.ShapeDtypeStruct((batch, spec.draft_tokens, geometry.num_heads, geometry.latent_dim), jnp.dtype(dtype))
    kv_pages = jax.ShapeDtypeStruct((num_pages, 64, geometry.latent_dim), jnp.dtype(dtype))
    table = PageTable.empty(batch, 1)
    try:
        jax.eval_shape(decode, q, kv_pages, table)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return " ".join(str(error).split())
    return None


def _run_with_progress(spec: "LoopSpec", requests: "tuple[Request, ...]", options: "JobOptions") -> "JobResult":
    """Runs the job, with a bar on standard error where that is a terminal."""
    from dots_jax.workload.job import run_job

    if not sys.stderr.isatty():
        return run_job(spec, requests, options)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("compiling", total=options.steps)

        def show(step: int, tokens: int) -> None:
            progress.update(task, completed=step, description=f"decoding, {tokens} tokens")

        return run_job(spec, requests, options, on_step=show)
