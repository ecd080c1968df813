"""The kernel under `shard_map` over heads and over batch; as a script, lowered for CUDA with two CPU devices.

Simulating needs a mesh of one device: the simulator keeps the barriers of several devices in one place.
"""

import decode_cases
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.swa_latent_decode import Config, decode

CASE = decode_cases.Case("sharded", (70, 130), heads=16, window=65, table_width=3)
BY_HEADS = (P(None, None, "x"), P(), P(), P(), P()), P(None, None, "x")
BY_ROWS = (P("x"), P(), P("x"), P("x"), P("x")), P("x")


def sharded(specs, *, interpret: bool):
    """The jitted decode, sharded over all devices."""

    def one(*arrays):
        config = Config("column_split", block_tokens=64)
        named = {"window": CASE.window, "scale": CASE.scale, "v_dim": CASE.v_dim}
        return decode(*arrays, **named, config=config, interpret=interpret)

    in_specs, out = specs
    mesh = Mesh(np.array(jax.devices()), ("x",))
    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=in_specs, out_specs=(out, out), check_vma=False))


def arrays(inputs: decode_cases.Inputs) -> list[jax.Array]:
    return [jnp.asarray(getattr(inputs, name)) for name in ("q", "kv_pages", "pages", "lengths", "counts")]


def main():
    assert len(jax.devices()) == 2
    for specs, shape in ((BY_HEADS, (2, 1, 8, 128)), (BY_ROWS, (1, 1, 16, 128))):
        traced = sharded(specs, interpret=False).trace(*arrays(decode_cases.build(CASE)))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "mosaic_gpu" in text
        assert f"tensor<{'x'.join(map(str, shape))}xbf16>" in text, "each device computes its own part"


if __name__ == "__main__":
    main()
