"""`info`: the model's geometry, the sizes that follow from it, and what this machine can run."""

import argparse
import platform
from typing import TYPE_CHECKING, Any

from dots_jax.cli.output import json_text

if TYPE_CHECKING:
    from dots_jax.config import DotsConfig, LatentGeometry

EXAMPLE_CONTEXTS = (1024, 32768, 524288)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "info",
        help="print geometry, cache sizes and what this machine can run",
        description="Prints the model's geometry, the sizes that follow from it, and what this machine can run.",
    )
    parser.add_argument("--config", metavar="PATH", help="config.json to read (default: the released model)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from dots_jax.cli.decode import load_config

    config = load_config(arguments.config)
    facts = {"geometry": geometry(config), "sizes": sizes(config), "machine": machine()}
    if arguments.json:
        print(json_text(facts))
        return 0
    for title, entries in facts.items():
        print(title)
        for name, value in entries.items():
            shown = ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else value
            print(f"  {name:<28} {shown}")
    return 0


def geometry(config: "DotsConfig") -> dict[str, Any]:
    """Layer counts, and each kind's ranks and heads."""

    def kind(one: "LatentGeometry") -> dict[str, Any]:
        return {
            "heads": one.num_heads,
            "q_lora": one.q_lora_rank,
            "kv_lora": one.kv_lora_rank,
            "nope": one.qk_nope_head_dim,
            "rope": one.qk_rope_head_dim,
            "v": one.v_head_dim,
            "theta": one.rope_theta,
            "window": one.window,
            "gate": one.gate,
            "latent_dim": one.latent_dim,
            "scale": round(one.softmax_scale, 7),
        }

    sliding = len(config.sliding_layers)
    return {
        "hidden_size": config.hidden_size,
        "layers": {"sliding": sliding, "full": config.num_hidden_layers - sliding},
        "sliding layers": kind(config.swa),
        "full layers": kind(config.full),
    }


def sizes(config: "DotsConfig") -> dict[str, Any]:
    """Bytes and pages of the caches in bfloat16."""
    from dots_jax.sizes import PAGE_SIZE, bytes_per_token, cache_bytes, window_pages

    assert config.swa.window is not None  # DotsConfig checked it
    facts: dict[str, Any] = {
        "page, tokens": PAGE_SIZE,
        "bytes a token and layer": {"sliding": bytes_per_token(config.swa), "full": bytes_per_token(config.full)},
        "pages a request (sliding)": {
            f"{drafts} queries a step": window_pages(config.swa.window, drafts) for drafts in (1, 4)
        },
    }
    for context in EXAMPLE_CONTEXTS:
        if context <= config.max_position_embeddings:
            size = cache_bytes(config, context)
            facts[f"cache MiB at {context}"] = {
                name: round(value / 2**20, 1)
                for name, value in (("sliding", size.swa), ("full", size.full), ("index", size.index))
            }
    return facts


def machine() -> dict[str, Any]:
    """Versions, devices, memory, and each implementation with the reason if it cannot run here."""
    import jax
    import psutil

    import dots_jax

    devices = jax.devices()
    kinds = sorted({device.platform if device.platform == "cpu" else device.device_kind for device in devices})
    return {
        "versions": {"dots-jax": dots_jax.__version__, "jax": jax.__version__, "python": platform.python_version()},
        "devices": {kind: sum(kind in (d.platform, d.device_kind) for d in devices) for kind in kinds},
        "cpus": psutil.cpu_count(),
        "memory available, GiB": round(psutil.virtual_memory().available / 2**30, 1),
        **{f"implementation {name}": verdict for name, verdict in implementations().items()},
    }


def implementations() -> dict[str, str]:
    """For each implementation of the decode "runs" or why it does not, at the released geometry."""
    import jax.numpy as jnp

    from dots_jax.cli.decode import IMPLEMENTATIONS, refusal
    from dots_jax.config import DotsConfig
    from dots_jax.workload.loop import LoopSpec

    swa = DotsConfig.dots3_note_prev().swa
    reasons = {
        name: refusal(LoopSpec(swa, 1, 4, name), batch=1, num_pages=10, dtype=jnp.bfloat16) for name in IMPLEMENTATIONS
    }
    return {name: reason or "runs" for name, reason in reasons.items()}
