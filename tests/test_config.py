import dataclasses
import json
import math
from pathlib import Path

import pytest

from dots_jax.config import DotsConfig, LatentGeometry

FULL_LAYERS = (0, 1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45)
MINIMAL = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}

# The released model's keys, as in its config.json; the layer pattern comes from the published list of full layers.
RELEASED = {
    "hidden_size": 5120,
    "num_hidden_layers": 46,
    "max_position_embeddings": 524288,
    "rms_norm_eps": 1e-05,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1024,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_theta": 80000000.0,
    "attention_gate_type": "headwise",
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 64,
    "swa_q_lora_rank": 1024,
    "swa_kv_lora_rank": 1024,
    "swa_qk_nope_head_dim": 192,
    "swa_qk_rope_head_dim": 64,
    "swa_v_head_dim": 128,
    "swa_rope_theta": 50000,
    "swa_attention_gate_type": "headwise",
    "sliding_window_size": 513,
    "apply_mla_qkv_lora_rescale": True,
    "k_rope_only_layernorm": True,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "layer_types": ["full_attention" if i in FULL_LAYERS else "sliding_attention" for i in range(46)],
}


def test_released_model_numbers():
    config = DotsConfig.dots3_note_prev()
    assert (config.swa.num_heads, config.full.num_heads) == (64, 128)
    assert (config.swa.latent_dim, config.full.latent_dim) == (1088, 576)
    assert (config.swa.window, config.full.window) == (513, None)
    assert config.swa.softmax_scale == 0.0625
    assert config.full.softmax_scale == pytest.approx(0.0721688, abs=1e-7)
    assert (config.swa.rope_theta, config.full.rope_theta) == (5e4, 8e7)
    assert [i for i in range(46) if not config.is_sliding(i)] == list(FULL_LAYERS)
    assert len(config.sliding_layers) == 33
    assert config.q_rescale(config.swa) == config.kv_rescale(config.swa) == pytest.approx(2.2360680, abs=1e-7)
    assert config.kv_rescale(config.full) == pytest.approx(3.1622777, abs=1e-7)
    assert config.index_topk == 2048


def test_released_keys_give_the_built_in_configuration():
    assert DotsConfig.from_hf(RELEASED) == DotsConfig.dots3_note_prev()


def test_the_shared_released_file_says_the_same_where_it_is_at_hand():
    file = Path(__file__).parents[2] / "shared/data/dots3_note_prev_config.json"
    if file.exists():  # the same keys are in RELEASED, so nothing goes untested without it
        assert DotsConfig.from_hf(file) == DotsConfig.dots3_note_prev()


def test_class_defaults_are_not_the_released_model():
    config = DotsConfig.from_hf(MINIMAL)
    assert config.hidden_size == 2560
    assert config.full == LatentGeometry(64, 512, 512, 128, 64, 128, 5e4)
    assert config.swa == LatentGeometry(32, 512, 512, 128, 64, 128, 5e4, window=512)
    assert config.swa.latent_dim == 576
    assert config.swa.qk_head_dim == 192
    assert config.index_topk is None
    assert config.kv_rescale(config.swa) == math.sqrt(5)


def test_reads_a_file_a_directory_and_a_dictionary(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RELEASED))
    expected = DotsConfig.from_hf(RELEASED)
    assert DotsConfig.from_hf(tmp_path) == DotsConfig.from_hf(str(tmp_path / "config.json")) == expected
    assert hash(DotsConfig.from_hf(tmp_path)) == hash(expected)


def test_swa_rope_theta_inherits_when_null_or_absent():
    assert DotsConfig.from_hf({**MINIMAL, "rope_theta": 123.0}).swa.rope_theta == 123.0
    assert DotsConfig.from_hf({**MINIMAL, "rope_theta": 123.0, "swa_rope_theta": None}).swa.rope_theta == 123.0
    assert DotsConfig.from_hf({**MINIMAL, "rope_theta": 123.0, "swa_rope_theta": 7}).swa.rope_theta == 7.0


def test_sparse_layers_are_full_layers_by_another_name():
    renamed = [kind.replace("full_attention", "deepseek_sparse_attention") for kind in RELEASED["layer_types"]]
    config = DotsConfig.from_hf({**RELEASED, "layer_types": renamed})
    released = DotsConfig.dots3_note_prev()
    assert [config.is_sliding(i) for i in range(46)] == [released.is_sliding(i) for i in range(46)]
    assert config.geometry(0) == released.full
    assert config.geometry(2) == released.swa


def test_draft_layer_slides_and_unknown_layers_are_refused():
    config = DotsConfig.dots3_note_prev()
    assert config.is_sliding(46)
    for layer in (-1, 47):
        with pytest.raises(IndexError, match=rf"expected 0\.\.46, got {layer}"):
            config.is_sliding(layer)


def test_rescale_off_is_one():
    config = DotsConfig.from_hf({**RELEASED, "apply_mla_qkv_lora_rescale": False})
    assert config.q_rescale(config.full) == config.kv_rescale(config.swa) == 1.0


def test_rope_base_from_rope_parameters():
    config = DotsConfig.from_hf({**MINIMAL, "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}})
    assert config.full.rope_theta == config.swa.rope_theta == 9.0


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("swa_kv_lora_rank", 0, "at least 1"),
        ("kv_lora_rank", "512", "whole number"),
        ("q_lora_rank", None, "whole number"),
        ("num_attention_heads", True, "whole number"),
        ("swa_qk_rope_head_dim", 63, "even number"),
        ("swa_num_key_value_heads", 8, "expected 64"),
        ("sliding_window_size", -1, "at least 1"),
        ("sliding_window_size", None, "whole number"),
        ("rope_theta", float("nan"), "finite number above 0"),
        ("rope_theta", 10**400, "finite number above 0"),
        ("swa_rope_theta", -5, "finite number above 0"),
        ("attention_gate_type", "rowwise", "headwise, elementwise"),
        ("swa_attention_gate_type", None, "headwise, elementwise"),
        ("rms_norm_eps", 0, "finite number above 0"),
        ("apply_mla_qkv_lora_rescale", 1, "true or false"),
        ("layer_types", None, "a list"),
        ("layer_types", ["sliding_attention"], "expected 46 entries"),
        ("index_topk", None, "whole number"),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}, "scaling is not applied"),
        ("rope_scaling", "linear", "scaling is not applied"),
    ],
)
def test_errors_name_the_field_the_expected_and_the_given(field, value, expected):
    with pytest.raises(ValueError, match=f"^{field}: expected .*") as caught:
        DotsConfig.from_hf({**RELEASED, field: value})
    assert expected in str(caught.value)
    shown = len(value) if isinstance(value, list) else value
    assert repr(shown) in str(caught.value)


def test_unknown_layer_type_is_named_with_its_index():
    types = [*RELEASED["layer_types"]]
    types[3] = "linear_attention"
    with pytest.raises(ValueError, match=r"^layer_types\[3\]: expected one of .*, got 'linear_attention'$"):
        DotsConfig.from_hf({**RELEASED, "layer_types": types})


def test_files_that_are_not_a_json_object(tmp_path):
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: expected JSON: Expecting"):
        DotsConfig.from_hf(file)
    file.write_text("[]")
    with pytest.raises(ValueError, match="expected a JSON object, got list"):
        DotsConfig.from_hf(file)
    with pytest.raises(FileNotFoundError):
        DotsConfig.from_hf(tmp_path / "absent.json")


def test_geometry_checks_itself():
    with pytest.raises(ValueError, match="window: expected a whole number of at least 1, got 0"):
        dataclasses.replace(DotsConfig.dots3_note_prev().swa, window=0)


def test_layer_types_given_as_a_list_hash():
    config = DotsConfig.dots3_note_prev()
    listed = dataclasses.replace(config, layer_types=list(config.layer_types))
    assert (listed, hash(listed)) == (config, hash(config))
