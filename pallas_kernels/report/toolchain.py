"""Finds what the report needs beside JAX: the CUDA plugin, an assembler and a disassembler."""

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from pathlib import Path

INSTALL_HINT = "pip install '.[kernel-report]' in a clone of dots-jax"

_PLUGINS = ("jax_plugins.xla_cuda13", "jax_cuda13_plugin", "jax_plugins.xla_cuda12")
_DEFAULT_TOOLKIT = Path("/usr/local/cuda")


def missing_packages() -> tuple[str, ...]:
    """Names of the packages to install before anything can be compiled; empty when all are there."""
    missing = []
    if not any(_has_module(name) for name in _PLUGINS):
        missing.append("jax-cuda13-plugin")
    if not _has_tool("ptxas"):
        missing.append("nvidia-cuda-nvcc")
    if not _has_tool("nvdisasm"):
        missing.append("nvidia-cuda-nvdisasm")
    return tuple(missing)


def version_mismatch() -> str | None:
    """What to install when the CUDA plugin is of another release than jaxlib, which then would not load it."""
    try:
        plugin, jaxlib = (importlib.metadata.version(name) for name in ("jax-cuda13-plugin", "jaxlib"))
    except importlib.metadata.PackageNotFoundError:  # another CUDA's plugin, or one built here
        return None
    if plugin.split(".")[:3] == jaxlib.split(".")[:3]:
        return None
    return f"jax-cuda13-plugin {plugin} does not fit jaxlib {jaxlib}: pip install 'jax-cuda13-plugin=={jaxlib}'"


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is absent
        return False


def _has_tool(name: str) -> bool:
    """Whether a CUDA command-line tool is on the path, in a toolkit, or brought by NVIDIA's wheels."""
    if shutil.which(name):
        return True
    toolkits = [Path(os.environ[key]) for key in ("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT") if os.environ.get(key)]
    toolkits.append(_DEFAULT_TOOLKIT)
    wheels = [root for entry in sys.path if entry for root in sorted((Path(entry) / "nvidia").glob("*"))]
    return any((root / "bin" / name).is_file() for root in (*toolkits, *wheels))
