import argparse
import importlib.metadata
import json

import jax
import pytest

from dots_jax.cli import kernel_report
from dots_jax.cli.errors import ArgumentError
from pallas_kernels.report import registry, toolchain
from pallas_kernels.report.compile import Entry
from pallas_kernels.report.parse import Figures
from pallas_kernels.report.variant import Variant

FIGURES = Figures(
    kernels=1,
    registers=234,
    stack_bytes=0,
    spill_bytes=0,
    smem_bytes=228352,
    tensor_core_instructions=8,
    bulk_copies=3,
    cluster_stores=0,
    barrier_instructions=4,
    local_memory_instructions=0,
    instructions=100,
    tensor_core_shapes={"HGMMA.64x64x16.F32.BF16": 8},
)
NAMES = ("one", "two")


def parse(*words):
    parser = argparse.ArgumentParser()
    kernel_report.add_parser(parser.add_subparsers(dest="command"))
    return parser.parse_args(["kernel-report", *words])


def run(*words):
    arguments = parse(*words)
    return arguments.run(arguments)


@pytest.fixture
def fake_compiler(monkeypatch):
    """Replaces the compiler, so that the command itself is tested where no toolchain is installed."""
    faults: dict[str, tuple[str, ...]] = {}
    variants = [Variant("decode", name, jax.numpy.sin, ()) for name in NAMES]

    def compile_variants(pairs, architecture, **_):
        for _, variant in reversed(pairs):  # finishing out of order, as several compilers do
            bad = faults.get(variant.name, ())
            figures = None if bad else FIGURES
            yield Entry(variant.kernel, variant.name, architecture, figures, 4.0, 0.5, bad)

    monkeypatch.setattr(registry, "kernel_modules", lambda: ("somewhere",))
    monkeypatch.setattr(registry, "load_variants", lambda module: variants)
    monkeypatch.setattr(toolchain, "missing_packages", lambda: ())
    monkeypatch.setattr(toolchain, "version_mismatch", lambda: None)
    monkeypatch.setattr(kernel_report, "compile_variants", compile_variants)
    return faults


def test_json_has_the_promised_keys_in_the_order_of_the_variants(fake_compiler, capsys):
    assert run("--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [entry["variant"] for entry in report] == list(NAMES)
    assert report[0] | {"kernel": "decode", "arch": "sm_90a", "registers": 234, "spill_bytes": 0} == report[0]
    assert report[0] | {"smem_bytes": 228352, "tensor_core_instructions": 8, "compile_s": 4.0} == report[0]
    assert report[0] | {"jax_version": jax.__version__, "bulk_copies": 3, "faults": []} == report[0]


def test_a_fault_is_exit_code_1_and_one_line(fake_compiler, capsys):
    fake_compiler["two"] = ("spills 12 bytes of registers",)
    assert run() == 1
    out = capsys.readouterr().out
    assert "decode/two: spills 12 bytes of registers\n" in out
    assert "234" in out
    assert run("--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report[1]["registers"] is None
    assert report[1]["faults"] == ["spills 12 bytes of registers"]


def test_equal_arguments_are_listed_once(fake_compiler, monkeypatch, capsys):
    ids, rows = jax.ShapeDtypeStruct((2,), "int32"), jax.ShapeDtypeStruct((4, 8), "float32")
    variants = [Variant("move", "layers", jax.numpy.sin, (ids, rows, rows, rows, ids))]
    monkeypatch.setattr(registry, "load_variants", lambda module: variants)
    assert run("--list") == 0
    assert capsys.readouterr().out == "move/layers: int32[2], 3 x float32[4, 8], int32[2]\n"


def test_variants_can_be_chosen_and_listed(fake_compiler, capsys):
    assert run("--variant", "t*", "--list") == 0
    assert capsys.readouterr().out == "decode/two: \n"
    assert run("--kernel", "decode", "--list", "--json") == 0
    assert [entry["variant"] for entry in json.loads(capsys.readouterr().out)] == list(NAMES)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--arch", "sm_80"), r"'sm_80' is not supported, only sm_90a"),
        (("--variant", "three"), r"no variant matches; there are: decode/one, decode/two"),
        (("--jobs", "0"), r"--jobs must be at least 1, got 0"),
        (("--timeout", "0"), r"--timeout must be positive, got 0"),
        (("--module", "no.such.module"), r"--module no.such.module cannot be imported"),
    ],
)
def test_bad_arguments(fake_compiler, words, message):
    with pytest.raises(ArgumentError, match=message):
        run(*words)


def test_missing_packages_are_named_with_the_command_that_installs_them(fake_compiler, monkeypatch):
    monkeypatch.setattr(toolchain, "missing_packages", lambda: ("jax-cuda13-plugin", "nvidia-cuda-nvdisasm"))
    with pytest.raises(ArgumentError) as caught:
        run()
    assert str(caught.value) == (
        "jax-cuda13-plugin, nvidia-cuda-nvdisasm not installed: pip install '.[kernel-report]' in a clone of dots-jax"
    )


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        ("0.11.2", "jax-cuda13-plugin 0.11.2 does not fit jaxlib 0.12.0.1: pip install 'jax-cuda13-plugin==0.12.0.1'"),
        ("0.12.0", None),
        (None, None),
    ],
)
def test_a_plugin_of_another_release_is_named_with_the_command_that_replaces_it(monkeypatch, plugin, message):
    def version(name):
        if (found := {"jax-cuda13-plugin": plugin, "jaxlib": "0.12.0.1"}[name]) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(toolchain.importlib.metadata, "version", version)
    assert toolchain.version_mismatch() == message


def test_missing_packages_looks_for_modules_and_tools(monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "_PLUGINS", ("no_such_parent.plugin",))
    monkeypatch.setattr(toolchain, "_DEFAULT_TOOLKIT", tmp_path / "absent")
    monkeypatch.setattr(toolchain.sys, "path", [str(tmp_path)])
    monkeypatch.setenv("PATH", str(tmp_path))
    for key in ("CUDA_PATH", "CUDA_ROOT"):
        monkeypatch.delenv(key, raising=False)
    home = tmp_path / "toolkit"
    monkeypatch.setenv("CUDA_HOME", str(home))
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "ptxas").touch()
    wheel = tmp_path / "nvidia" / "cu13" / "bin"
    wheel.mkdir(parents=True)
    (wheel / "nvdisasm").touch()
    assert toolchain.missing_packages() == ("jax-cuda13-plugin",)
    (wheel / "nvdisasm").unlink()
    assert toolchain.missing_packages() == ("jax-cuda13-plugin", "nvidia-cuda-nvdisasm")


@pytest.mark.parametrize("module", ["json", "dots_jax.cli.errors"])
def test_a_module_without_variants_is_refused_by_name(module):
    with pytest.raises(ArgumentError, match=f"--module {module} has no function variants"):
        run("--module", module, "--list")


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_compiled(fake_compiler, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match=r"--keep .*file/below: Not a directory"):
        run("--keep", str(tmp_path / "file" / "below"))
