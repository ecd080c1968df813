"""Compiles one variant in a process of its own.

`python -m pallas_kernels.report.worker MODULE KERNEL NAME ARCH FOLDER`

A fresh process for each variant because JAX caches compiled kernels (a second variant with the same kernel would leave
no machine code behind) and because a compiler that aborts must not take the report with it. The environment, set by
`pallas_kernels.report.compile`, tells Mosaic GPU to write what it makes into FOLDER.
"""

import json
import sys
import time
import traceback
from pathlib import Path

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.report.registry import load_variants
from pallas_kernels.report.target import target_config
from pallas_kernels.report.variant import Variant

RESULT_FILE = "result.json"
TRACEBACK_FILE = "traceback.txt"


def compile_for(variant: Variant, architecture: str) -> tuple[float, float]:
    """Lowers and compiles `variant` for a GPU that need not be present.

    Returns:
      Seconds for tracing and lowering, and for compiling.
    """
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_config(architecture), topology="1x1x1"
    )
    sharding = NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), PartitionSpec())
    jitted = jax.jit(variant.function, in_shardings=sharding, out_shardings=sharding)
    started = time.perf_counter()
    lowered = jitted.lower(*variant.arguments)
    between = time.perf_counter()
    lowered.compile()
    return between - started, time.perf_counter() - between


def main(argv: list[str]) -> int:
    """Writes the seconds, or one line of error, into the folder; 0 when the variant compiled."""
    module, kernel, name, architecture, folder = argv
    path = Path(folder) / RESULT_FILE
    try:
        (variant,) = [v for v in load_variants(module) if (v.kernel, v.name) == (kernel, name)]
        lower_s, compile_s = compile_for(variant, architecture)
    except Exception as error:  # whatever a compiler raises becomes the reason in the report
        (Path(folder) / TRACEBACK_FILE).write_text(traceback.format_exc())
        path.write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return 1
    path.write_text(json.dumps({"lower_s": lower_s, "compile_s": compile_s}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
