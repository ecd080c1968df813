"""The unfused decode in torch, where torch is installed; JAX arrays cross without a copy.

The algorithm is that of `unfused.py`: `index_select`, two `bmm`, and a float32 softmax between them.
"""

import importlib.util
from typing import Any

from dots_jax.bench.shapes import PAGE_SIZE, Shape


def available(platform: str) -> bool:
    """Whether torch can run on the device that JAX uses."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return platform == "cpu" or (platform in ("gpu", "cuda") and torch.cuda.is_available())


def from_jax(array: Any) -> Any:
    """A torch tensor over the same memory."""
    import torch

    return torch.from_dlpack(array)


def synchronize(platform: str) -> None:
    """Waits for everything torch has launched."""
    import torch

    if platform != "cpu":
        torch.cuda.synchronize()


def unfused_decode(shape: Shape, kv_pages: Any, q: Any, pages: Any, lengths: Any) -> Any:
    """`[B, S, H, v_dim]` from torch tensors: kv_pages `[N, 64, D]`, pages int32 `[B, P]`, lengths int32 `[B]`."""
    import torch

    with torch.inference_mode():
        extent = min(-(-shape.keys_read // 8) * 8, shape.context)
        batch, seq, heads, width = q.shape
        ends = lengths.long()[:, None]
        position = ends - seq + torch.arange(seq, device=q.device)
        key = (ends - extent).clamp_min(0) + torch.arange(extent, device=q.device)
        page = pages.long().gather(1, key // PAGE_SIZE)
        slots = (page * PAGE_SIZE + key % PAGE_SIZE).clamp_min(0)
        rows = kv_pages.reshape(-1, width).index_select(0, slots.reshape(-1)).reshape(batch, extent, width)
        scores = torch.bmm(q.reshape(batch, seq * heads, width), rows.transpose(1, 2))
        scores = scores.reshape(batch, seq, heads, extent).float() * shape.scale
        visible = (key[:, None] <= position[..., None]) & (page[:, None] >= 0)
        if shape.window is not None:
            visible &= key[:, None] > position[..., None] - shape.window
        scores = scores.masked_fill(~visible[:, :, None], torch.finfo(torch.float32).min)
        weights = scores.softmax(-1).to(q.dtype).reshape(batch, seq * heads, extent)
        return torch.bmm(weights, rows[..., : shape.v_dim]).reshape(batch, seq, heads, shape.v_dim)
