"""Finds the variants of every kernel."""

import fnmatch
import importlib
import importlib.util
import pkgutil
from collections.abc import Sequence

import pallas_kernels
from pallas_kernels.report.variant import Variant


def kernel_modules() -> tuple[str, ...]:
    """The modules that list variants: `pallas_kernels.<kernel>.variants` of every kernel folder that has one."""
    folders = [module.name for module in pkgutil.iter_modules(pallas_kernels.__path__) if module.ispkg]
    names = [f"{pallas_kernels.__name__}.{folder}.variants" for folder in sorted(folders)]
    return tuple(name for name in names if importlib.util.find_spec(name) is not None)


def load_variants(module: str) -> tuple[Variant, ...]:
    """The variants that one module lists.

    Raises:
      ModuleNotFoundError: there is no such module.
      ValueError: two of its variants have the same kernel and name.
    """
    variants = tuple(importlib.import_module(module).variants())
    seen = set()
    for variant in variants:
        if (key := (variant.kernel, variant.name)) in seen:
            raise ValueError(f"{module} lists {variant.kernel}/{variant.name} twice")
        seen.add(key)
    return variants


def select(
    variants: Sequence[tuple[str, Variant]], kernels: Sequence[str] = (), names: Sequence[str] = ()
) -> list[tuple[str, Variant]]:
    """Those (module, variant) pairs that match one of the shell patterns of each kind; no pattern matches all."""

    def matches(text: str, patterns: Sequence[str]) -> bool:
        return not patterns or any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns)

    return [pair for pair in variants if matches(pair[1].kernel, kernels) and matches(pair[1].name, names)]
