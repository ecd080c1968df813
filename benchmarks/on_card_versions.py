"""Prints what a measurement must name: device, driver and package versions."""

import importlib.metadata
import platform
import shutil
import subprocess

import jax

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "torch", "numpy", "nvidia-cuda-nvcc")


def main() -> None:
    device = jax.devices()[0]
    print(f"{device.device_kind} ({device.platform}), Python {platform.python_version()}")
    for package in PACKAGES:
        try:
            print(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            print(package, "absent")
    print("ptxas", shutil.which("ptxas") or "not on the path")
    if smi := shutil.which("nvidia-smi"):
        query = "name,driver_version,memory.total,clocks.max.sm,power.limit"
        print(subprocess.run([smi, f"--query-gpu={query}", "--format=csv"], capture_output=True, text=True).stdout)


if __name__ == "__main__":
    main()
