"""Compiles variants for a GPU architecture, each in a process of its own, and judges what came out."""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.report.parse import Figures, ReportFormatError, read_dump
from pallas_kernels.report.target import SMEM_LIMIT_BYTES
from pallas_kernels.report.variant import Variant
from pallas_kernels.report.worker import RESULT_FILE

_DUMPS = ("PTX", "PTXAS", "SASS")


@dataclass(frozen=True)
class Entry:
    """One line of the report: a variant, its figures if it compiled, and what is wrong with it.

    Args:
      figures: None when the variant did not compile or its report was not understood.
      compile_s: seconds XLA and the assembler took; None when it did not compile.
      lower_s: seconds of tracing and lowering.
      faults: one line for each thing that is not acceptable; empty when the variant is good.
    """

    kernel: str
    variant: str
    arch: str
    figures: Figures | None
    compile_s: float | None
    lower_s: float | None
    faults: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """A flat mapping; figures are null when there are none."""
        names = [field.name for field in fields(Figures)]
        figures = asdict(self.figures) if self.figures else dict.fromkeys(names)
        return {
            "kernel": self.kernel,
            "arch": self.arch,
            "variant": self.variant,
            **figures,
            "compile_s": self.compile_s,
            "lower_s": self.lower_s,
            "jax_version": jax.__version__,
            "ptxas_version": assembler_version(),
            "faults": list(self.faults),
        }


def assembler_version() -> str | None:
    """The version of NVIDIA's wheel with `ptxas`; None where the assembler comes from elsewhere."""
    try:
        return importlib.metadata.version("nvidia-cuda-nvcc")
    except importlib.metadata.PackageNotFoundError:
        return None


def judge(variant: Variant, figures: Figures) -> tuple[str, ...]:
    """What is not acceptable about the machine code of `variant`, a line each."""
    faults = []
    if figures.spill_bytes:
        faults.append(f"spills {figures.spill_bytes} bytes of registers")
    if figures.smem_bytes > SMEM_LIMIT_BYTES:
        faults.append(f"needs {figures.smem_bytes:,} bytes of shared memory, the limit is {SMEM_LIMIT_BYTES:,}")
    if variant.expects_tensor_cores and not figures.tensor_core_instructions:
        faults.append("has no tensor-core instruction (HGMMA, QGMMA) where some are expected")
    if variant.expects_bulk_copies and not figures.bulk_copies:
        faults.append("has no bulk copy (UTMALDG, UTMASTG, UBLKCP) where some are expected")
    if variant.expects_cluster_stores and not figures.cluster_stores:
        faults.append("has no store to another block's shared memory (STAS) where some are expected")
    return tuple(faults)


def compile_variants(
    pairs: Sequence[tuple[str, Variant]],
    architecture: str,
    *,
    jobs: int = 1,
    timeout_s: float = 600,
    keep: Path | None = None,
) -> Iterator[Entry]:
    """Compiles (module, variant) pairs and yields an entry for each as it finishes.

    Args:
      pairs: what to compile, as `registry.select` gives it.
      architecture: one of `target.SUPPORTED_ARCHITECTURES`.
      jobs: how many compilers run at once; `compile_s` is only comparable at 1.
      timeout_s: seconds after which a variant counts as failed.
      keep: folder for the PTX, machine code and logs, one folder for each variant; by default they are deleted.
    """
    with ExitStack() as stack:
        root = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kernel-report-")))
        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        stack.callback(pool.shutdown, cancel_futures=True)
        futures = []
        for module, variant in pairs:
            folder = (root / f"{variant.kernel}.{variant.name}").absolute()
            futures.append(pool.submit(_compile_one, module, variant, architecture, folder, timeout_s))
        for future in as_completed(futures):
            yield future.result()


def _compile_one(module: str, variant: Variant, architecture: str, folder: Path, timeout_s: float) -> Entry:
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.iterdir():  # a kept folder from an earlier run must not be read as this run's
        if stale.is_file():
            stale.unlink()
    result = _run_worker(module, variant, architecture, folder, timeout_s)
    figures = None
    if "error" in result:
        faults: tuple[str, ...] = (f"failed to compile: {_one_line(result['error'])}",)
    else:
        try:
            figures = read_dump(folder)
            faults = judge(variant, figures)
        except ReportFormatError as error:
            faults = (f"compiled, but {error}",)
    return Entry(
        kernel=variant.kernel,
        variant=variant.name,
        arch=architecture,
        figures=figures,
        compile_s=result.get("compile_s"),
        lower_s=result.get("lower_s"),
        faults=faults,
    )


def _run_worker(module: str, variant: Variant, architecture: str, folder: Path, timeout_s: float) -> dict[str, Any]:
    """The worker's result; `{"error": ...}` when it failed in any way."""
    command = [sys.executable, "-m", "pallas_kernels.report.worker"]
    command += [module, variant.kernel, variant.name, architecture, str(folder)]
    log = folder / "log.txt"
    try:
        with log.open("wb") as output:
            done = subprocess.run(
                command, env=_environment(folder), stdout=output, stderr=output, timeout=timeout_s, check=False
            )
    except subprocess.TimeoutExpired:
        return {"error": f"still compiling after {timeout_s:g} s"}
    if (path := folder / RESULT_FILE).is_file():
        return json.loads(path.read_text())
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return {"error": f"the compiler process ended with {how}: {lines[-1] if lines else 'no output'}"}


def _environment(folder: Path) -> dict[str, str]:
    environment = dict(os.environ)
    environment |= {f"MOSAIC_GPU_DUMP_{what}": "1" for what in _DUMPS}
    environment["MOSAIC_GPU_DUMP_TO"] = str(folder)
    # Without cuDNN, cuBLAS and a driver the plugin would refuse to load; compiling a Pallas kernel needs none of them.
    environment["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # a cached program leaves no machine code behind
    # `python -m` must find the same packages as this process, however they came onto its path.
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    return environment


def _one_line(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
