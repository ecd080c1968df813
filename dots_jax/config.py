"""Geometry of the Dots hybrid models, and how it is read from a Hugging Face `config.json`.

A model has two kinds of attention layer, both latent (MLA): *sliding* layers see a window of the context, *full* layers
see all of it, and each kind has ranks, head counts, rotary base and gate of its own. The numbers of the released model
are those of `DotsConfig.dots3_note_prev()`; keys absent from a file take the model class's own defaults, which are not
the released model's.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, cast, get_args

Gate = Literal["headwise", "elementwise"]

SLIDING = "sliding_attention"
# Hugging Face renames full attention when the sparse indexer is on, so code asks only whether a layer slides.
LAYER_TYPES = (SLIDING, "full_attention", "deepseek_sparse_attention")


def _whole(field: str, value: object, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{field}: expected a whole number of at least {least}, got {value!r}")
    return value


def _positive(field: str, value: object) -> float:
    try:
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    except OverflowError:  # an int that no float holds
        good = False
    if not good:
        raise ValueError(f"{field}: expected a finite number above 0, got {value!r}")
    return float(cast(float, value))


def _flag(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{field}: expected true or false, got {value!r}")
    return value


def _gate(field: str, value: object) -> Gate:
    if value not in get_args(Gate):
        raise ValueError(f"{field}: expected one of {', '.join(get_args(Gate))}, got {value!r}")
    return cast(Gate, value)


@dataclasses.dataclass(frozen=True)
class LatentGeometry:
    """Sizes of one kind of latent attention layer; hashable, so it can be a static argument.

    Attributes:
      num_heads: query heads H (MLA has as many key heads before absorption and one after it).
      q_lora_rank: width of the compressed query.
      kv_lora_rank: R, width of the compressed key/value, which is also the first R columns of a cache row.
      qk_nope_head_dim: N, per-head query/key columns without rotary position.
      qk_rope_head_dim: r, the rotary columns (even); the last r columns of a cache row.
      v_head_dim: V, per-head value columns.
      rope_theta: rotary base.
      window: tokens that a query sees, counting its own (513 in the released model), or None for all.
      gate: `"headwise"` (one gate per head) or `"elementwise"` (one per value column).
    """

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_theta: float
    window: int | None = None
    gate: Gate = "headwise"

    def __post_init__(self):
        for name in ("num_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            _whole(name, getattr(self, name))
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim: expected an even number, got {self.qk_rope_head_dim}")
        object.__setattr__(self, "rope_theta", _positive("rope_theta", self.rope_theta))
        if self.window is not None:
            _whole("window", self.window)
        _gate("gate", self.gate)

    @property
    def latent_dim(self) -> int:
        """Columns of a cache row, R + r."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Columns of one query head before absorption, N + r."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """(N + r)^-1/2: absorption widens the query but leaves its scores, hence their scale, unchanged."""
        return self.qk_head_dim**-0.5


@dataclasses.dataclass(frozen=True)
class DotsConfig:
    """What the attention layers of a Dots hybrid model need to know; hashable.

    Attributes:
      hidden_size: width of the residual stream.
      num_hidden_layers: decoder layers, without the draft (MTP) layers.
      layer_types: one name per layer; ask `is_sliding` rather than comparing names.
      swa: geometry of the sliding layers, window included.
      full: geometry of the others, `window=None`.
      rms_norm_eps: epsilon of every RMS norm.
      max_position_embeddings: longest context, tokens.
      apply_mla_qkv_lora_rescale: whether compressed queries and keys are multiplied by `q_rescale` and `kv_rescale`.
      k_rope_only_layernorm: whether the shared rotary key has an RMS norm of its own.
      num_nextn_predict_layers: draft layers after the last decoder layer; they have the sliding geometry.
      index_n_heads, index_head_dim, index_topk: the full layers' sparse indexer; all None when there is none.
    """

    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]
    swa: LatentGeometry
    full: LatentGeometry
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 8192
    apply_mla_qkv_lora_rescale: bool = True
    k_rope_only_layernorm: bool = True
    num_nextn_predict_layers: int = 1
    index_n_heads: int | None = None
    index_head_dim: int | None = None
    index_topk: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "layer_types", tuple(self.layer_types))  # a list would not hash
        for name in ("hidden_size", "num_hidden_layers", "max_position_embeddings"):
            _whole(name, getattr(self, name))
        _whole("num_nextn_predict_layers", self.num_nextn_predict_layers, least=0)
        _positive("rms_norm_eps", self.rms_norm_eps)
        _flag("apply_mla_qkv_lora_rescale", self.apply_mla_qkv_lora_rescale)
        _flag("k_rope_only_layernorm", self.k_rope_only_layernorm)
        if len(self.layer_types) != self.num_hidden_layers:
            wanted = f"{self.num_hidden_layers} entries (num_hidden_layers)"
            raise ValueError(f"layer_types: expected {wanted}, got {len(self.layer_types)}")
        for i, kind in enumerate(self.layer_types):
            if kind not in LAYER_TYPES:
                raise ValueError(f"layer_types[{i}]: expected one of {', '.join(LAYER_TYPES)}, got {kind!r}")
        if self.swa.window is None:
            raise ValueError("swa.window: expected a whole number of at least 1, got None")
        if self.full.window is not None:
            raise ValueError(f"full.window: expected None, got {self.full.window}")
        index = {name: getattr(self, name) for name in ("index_n_heads", "index_head_dim", "index_topk")}
        if any(value is not None for value in index.values()):
            for name, value in index.items():
                _whole(name, value)

    @classmethod
    def from_hf(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> Self:
        """Reads a configuration from this machine; nothing is downloaded.

        Args:
          source: a `config.json`, a directory that holds one, or its parsed contents. Keys that attention does not need
            are ignored; absent ones take the model class's defaults (`layer_types` has none).

        Raises:
          ValueError: a field is missing or has a value that cannot be used; the message names it, what was expected and
            what came.
          FileNotFoundError: there is no such file.
        """
        return cls(**_fields_from_hf(source if isinstance(source, Mapping) else _load(Path(source))))

    @classmethod
    def dots3_note_prev(cls) -> Self:
        """The released model `dots-studio/dots3-note-prev`."""
        full_layers = {0, *range(1, 46, 4)}
        return cls(
            hidden_size=5120,
            num_hidden_layers=46,
            layer_types=tuple("full_attention" if i in full_layers else SLIDING for i in range(46)),
            swa=LatentGeometry(64, 1024, 1024, 192, 64, 128, 5e4, window=513),
            full=LatentGeometry(128, 1024, 512, 128, 64, 128, 8e7),
            max_position_embeddings=524288,
            index_n_heads=64,
            index_head_dim=128,
            index_topk=2048,
        )

    def is_sliding(self, layer: int) -> bool:
        """Whether a layer slides; the draft layers, numbered after the last decoder layer, do.

        Raises:
          IndexError: there is no such layer.
        """
        if not 0 <= layer < self.num_hidden_layers + self.num_nextn_predict_layers:
            raise IndexError(
                f"layer: expected 0..{self.num_hidden_layers + self.num_nextn_predict_layers - 1}, got {layer}"
            )
        return layer >= self.num_hidden_layers or self.layer_types[layer] == SLIDING

    def geometry(self, layer: int) -> LatentGeometry:
        """The geometry of one layer (`IndexError` when there is no such layer)."""
        return self.swa if self.is_sliding(layer) else self.full

    @property
    def sliding_layers(self) -> tuple[int, ...]:
        """Indices of the decoder layers that slide."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == SLIDING)

    def q_rescale(self, geometry: LatentGeometry) -> float:
        """Factor on the normed compressed query, (hidden / q_lora_rank)^1/2, or 1 when rescaling is off."""
        return math.sqrt(self.hidden_size / geometry.q_lora_rank) if self.apply_mla_qkv_lora_rescale else 1.0

    def kv_rescale(self, geometry: LatentGeometry) -> float:
        """Factor on the normed compressed key/value, (hidden / kv_lora_rank)^1/2, or 1 when rescaling is off."""
        return math.sqrt(self.hidden_size / geometry.kv_lora_rank) if self.apply_mla_qkv_lora_rescale else 1.0


def _load(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: expected JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(data).__name__}")
    return data


# Ranks and head sizes of the model class, common to both kinds of layer; heads differ.
_RANK_DEFAULTS = {
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def _geometry_from_hf(hf: Mapping[str, Any], prefix: str, heads: int, theta: object, window: int | None):
    num_heads = _whole(f"{prefix}num_attention_heads", hf.get(f"{prefix}num_attention_heads", heads))
    kv_heads = hf.get(f"{prefix}num_key_value_heads")
    if kv_heads is not None and kv_heads != num_heads:
        raise ValueError(
            f"{prefix}num_key_value_heads: expected {num_heads} (as many as query heads), got {kv_heads!r}"
        )
    ranks = {name: _whole(prefix + name, hf.get(prefix + name, size)) for name, size in _RANK_DEFAULTS.items()}
    if ranks["qk_rope_head_dim"] % 2:
        raise ValueError(f"{prefix}qk_rope_head_dim: expected an even number, got {ranks['qk_rope_head_dim']}")
    return LatentGeometry(
        num_heads=num_heads,
        **ranks,
        rope_theta=_positive(f"{prefix}rope_theta", theta),
        window=window,
        gate=_gate(f"{prefix}attention_gate_type", hf.get(f"{prefix}attention_gate_type", "headwise")),
    )


def _rope_theta(hf: Mapping[str, Any]) -> object:
    """The full layers' rotary base, after refusing the frequency scalings that the layers do not apply."""
    for field in ("rope_scaling", "rope_parameters"):
        scaling = hf.get(field)
        if scaling is None:
            continue
        if not isinstance(scaling, Mapping) or scaling.get("rope_type", scaling.get("type", "default")) != "default":
            raise ValueError(
                f"{field}: expected null or the default type, since scaling is not applied, got {scaling!r}"
            )
    return hf.get("rope_theta", (hf.get("rope_parameters") or {}).get("rope_theta", 5e4))


def _fields_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    theta = _rope_theta(hf)
    swa_theta = hf.get("swa_rope_theta")
    window = _whole("sliding_window_size", hf.get("sliding_window_size", 512))
    layer_types = hf.get("layer_types")
    if not isinstance(layer_types, list | tuple):
        raise ValueError(f"layer_types: expected a list with one name per layer, got {layer_types!r}")
    full = _geometry_from_hf(hf, "", 64, theta, None)
    swa = _geometry_from_hf(hf, "swa_", 32, theta if swa_theta is None else swa_theta, window)
    defaults = {
        "hidden_size": 2560,
        "num_hidden_layers": 30,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "apply_mla_qkv_lora_rescale": True,
        "k_rope_only_layernorm": True,
        "num_nextn_predict_layers": 1,
        "index_n_heads": None,
        "index_head_dim": None,
        "index_topk": None,
    }
    plain = {name: hf.get(name, default) for name, default in defaults.items()}
    return {**plain, "layer_types": tuple(layer_types), "swa": swa, "full": full}
