"""What XLA must know about a GPU to compile for it when none is present."""

# Field names are those of XLA's GpuTargetConfigProto; figures are NVIDIA's for the H200 SXM. Only the compute
# capability and the limits (registers, shared memory, threads) decide what the Mosaic GPU compiler emits; the rates
# would steer XLA's own fusions and autotuning, which a Pallas kernel does not use.
_H200 = """
gpu_device_info {
  name: "NVIDIA H200"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  l2_cache_size: 62914560
  memory_bandwidth: 4800000000000
  device_memory_size: 151397597184
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA H200"
"""

_TARGETS = {"sm_90a": _H200}

SUPPORTED_ARCHITECTURES = tuple(_TARGETS)

SMEM_LIMIT_BYTES = 232_448
"""Shared memory that one block of compute capability 9.0 can have when it asks for more than the default: 227 KiB."""


class UnsupportedArchitectureError(ValueError):
    """The kernels are not written for the architecture that was asked for."""


def target_config(architecture: str) -> str:
    """The text proto that `jax.experimental.topologies.get_topology_desc(target_config=...)` wants.

    Args:
      architecture: as the CUDA tools spell it, `"sm_90a"`.

    Raises:
      UnsupportedArchitectureError: for any other architecture, saying what it would need.
    """
    if architecture not in _TARGETS:
        raise UnsupportedArchitectureError(
            f"architecture {architecture!r} is not supported, only {', '.join(SUPPORTED_ARCHITECTURES)}: the kernels "
            "use wgmma, which exists on sm_90a alone (sm_100a needs bodies written for tcgen05 and tensor memory, "
            "sm_80 and sm_120 bodies for mma.sync)"
        )
    return _TARGETS[architecture]
