"""The same decode in PyTorch: gather, two batched products, mask, softmax.

Imported where torch is installed beside jax, and otherwise run as a child process by an interpreter that has torch
(`--torch-python`). As a child it reads one JSON request a line and answers each with one line: set a problem up, or
time one step. So a benchmark can alternate the two frameworks whichever way torch is installed.
"""

import json
import sys
import time

import torch

PAGE = 64


def decode(q, kv_pages, slots, visible, scale, v_dim):
    """One step; `slots` int64[B, T] are the flat cache slots of each row's window, `visible` the mask bool[B, S, T].

    Shapes: q [B, S, H, D], kv_pages [N, 64, D]; returns [B, S, H, v_dim].
    """
    batch, steps, heads, width = q.shape
    keys = kv_pages.view(-1, width)[slots]
    scores = torch.matmul(q.view(batch, steps * heads, width), keys.transpose(1, 2)).float() * scale
    scores = scores.view(batch, steps, heads, -1).masked_fill(~visible[:, :, None], torch.finfo(torch.float32).min)
    weights = torch.softmax(scores, dim=-1).to(q.dtype).view(batch, steps * heads, -1)
    return torch.matmul(weights, keys[..., :v_dim]).view(batch, steps, heads, v_dim)


def make_step(batch, steps, heads, width, v_dim, window, num_pages, lengths, pages, dtype, threads, gather):
    """Sets one problem up and returns a function that runs a step of it.

    `gather` is "pages": every page that the window touches; or "tokens": as serving engines do, the window's own tokens
    rounded up to a multiple of 8.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    dtype = getattr(torch, dtype)
    q = (0.1 * torch.randn(batch, steps, heads, width)).to(dtype)
    kv_pages = (0.1 * torch.randn(num_pages, PAGE, width)).to(dtype)
    lengths, pages = torch.tensor(lengths), torch.tensor(pages)
    if gather == "pages":
        tokens = ((window + steps - 1 + PAGE - 2) // PAGE + 1) * PAGE
        first = (lengths - steps - window + 1).clamp(min=0) // PAGE * PAGE
    else:
        tokens = (window + steps - 1 + 7) // 8 * 8
        first = (lengths - tokens).clamp(min=0)
    key = first[:, None] + torch.arange(tokens)
    slots = pages.gather(1, (key // PAGE).clamp(max=pages.shape[1] - 1)) * PAGE + key % PAGE
    position = lengths[:, None] - steps + torch.arange(steps)
    visible = (key[:, None] <= position[..., None]) & (key[:, None] > position[..., None] - window)
    return lambda: decode(q, kv_pages, slots, visible, 0.0625, v_dim)


def serve() -> None:
    """Answers requests on standard input until it closes."""
    step = None
    with torch.inference_mode():
        for line in sys.stdin:
            request = json.loads(line)
            if request["do"] == "setup":
                step = make_step(**request["problem"])
                step()
                answer: float | str = torch.__version__
            else:
                assert step is not None
                step()  # warm, as the other side
                start = time.perf_counter()
                step()
                answer = time.perf_counter() - start
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
