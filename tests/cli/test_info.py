import json

import jax
import pytest

from dots_jax.cli import main
from dots_jax.config import DotsConfig


def test_json_has_geometry_sizes_and_machine(capsys):
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["geometry"]["layers"] == {"sliding": 33, "full": 13}
    assert facts["geometry"]["sliding layers"]["latent_dim"] == 1088
    assert facts["geometry"]["sliding layers"]["window"] == 513
    assert facts["geometry"]["full layers"]["latent_dim"] == 576
    assert facts["sizes"]["bytes a token and layer"] == {"sliding": 2176, "full": 1152}
    assert facts["sizes"]["pages a request (sliding)"] == {"1 queries a step": 9, "4 queries a step": 10}
    assert facts["sizes"]["cache MiB at 32768"]["sliding"] == 39.4
    assert facts["machine"]["versions"]["jax"] == jax.__version__
    assert facts["machine"]["implementation xla"] == "runs"


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says why the GPU kernel cannot run on a CPU")
def test_says_why_the_gpu_kernel_cannot_run(capsys):
    main(["info", "--json"])
    reason = json.loads(capsys.readouterr().out)["machine"]["implementation mosaic_gpu"]
    assert reason != "runs"
    assert "mosaic_gpu" in reason


def test_text_is_a_line_for_each_fact(capsys):
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == ["geometry", "sizes", "machine"]
    assert any("latent_dim 1088" in line for line in lines)


def test_other_models(capsys, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}))
    assert main(["info", "--json", "--config", str(file)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["geometry"]["sliding layers"]["latent_dim"] == DotsConfig.from_hf(file).swa.latent_dim == 576
    assert "cache MiB at 524288" not in facts["sizes"]


def test_bad_config_is_exit_code_2(capsys, tmp_path):
    assert main(["info", "--config", str(tmp_path / "absent")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dots-jax info: error: --config: No such file or directory")
    assert error.count("\n") == 1
