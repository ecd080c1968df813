"""Handing a tile of partial scores to the other block of the cluster and taking its tile in return.

The GPU path writes straight into the peer's shared memory, which the interpreter cannot simulate; its twin goes through
a scratch array in global memory. This file is all that differs between the two.
"""

import dataclasses
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

HALF_AXIS = "column_half"
"""Name of the cluster axis: which half of the latent columns a block owns."""

_SCORES = plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True)
class Mailbox:
    """Where one block receives its peer's partial scores.

    Attributes:
      inbox: float32 [2, 64, tokens] shared memory, one slot per warpgroup; the peer writes it.
      arrived: One barrier per warpgroup, in this block: the slot holds the peer's tile.
      global_inbox: float32 [2, 2, 64, tokens] (receiving block, warpgroup, ...) global memory, of the simulation only.
      met: One cluster barrier per warpgroup, of the simulation only.
    """

    inbox: Any
    arrived: Any
    global_inbox: Any = None
    met: Any = None


def send(mailbox: Mailbox, partial: jax.Array, warpgroup: jax.Array) -> None:
    """Sends `partial` (float32 [64, tokens]) to the same warpgroup of the peer block.

    The caller makes sure that the peer has finished with its inbox.
    """
    peer = 1 - jax.lax.axis_index(HALF_AXIS)
    if mailbox.global_inbox is not None:
        mailbox.global_inbox.at[peer, warpgroup][...] = partial
        plgpu.barrier_arrive(mailbox.met.at[warpgroup])
        return
    slot, arrived = mailbox.inbox.at[warpgroup], mailbox.arrived.at[warpgroup]
    plgpu.async_store_smem(partial, slot, arrived, cluster_idx=peer, cluster_dim=HALF_AXIS)


def receive(mailbox: Mailbox, warpgroup: jax.Array) -> jax.Array:
    """Waits for what the peer sent to this warpgroup and returns it."""
    if mailbox.global_inbox is not None:
        plgpu.barrier_wait(mailbox.met.at[warpgroup])
        return mailbox.global_inbox[jax.lax.axis_index(HALF_AXIS), warpgroup]
    plgpu.barrier_wait(mailbox.arrived.at[warpgroup])
    return plgpu.load(mailbox.inbox.at[warpgroup], layout=_SCORES)


def simulation_scratch(grid: tuple[int, ...], tokens: int) -> jax.ShapeDtypeStruct:
    """The global-memory inboxes of every cluster of a simulated `grid`."""
    return jax.ShapeDtypeStruct((*grid, 2, 2, 64, tokens), "float32")


def simulation_barrier() -> plgpu.ClusterBarrier:
    """The barriers on which the simulated blocks meet."""
    return plgpu.ClusterBarrier(collective_axes=(HALF_AXIS,), num_barriers=2)


__all__ = ["HALF_AXIS", "Mailbox", "receive", "send", "simulation_barrier", "simulation_scratch"]
