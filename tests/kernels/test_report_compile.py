import dataclasses

import jax
import jax.numpy as jnp
import pytest
import report_probe

from pallas_kernels.report import registry, toolchain
from pallas_kernels.report.compile import compile_variants, judge
from pallas_kernels.report.parse import Figures
from pallas_kernels.report.target import SMEM_LIMIT_BYTES, UnsupportedArchitectureError, target_config
from pallas_kernels.report.variant import Variant

needs_toolchain = pytest.mark.skipif(
    bool(toolchain.missing_packages()),
    reason="compiling for a GPU needs the kernel-report extra, which the main environment leaves out; "
    "`make kernel-report` runs this file in an environment that has it",
)

GOOD = Figures(
    kernels=1,
    registers=234,
    stack_bytes=0,
    spill_bytes=0,
    smem_bytes=SMEM_LIMIT_BYTES,
    tensor_core_instructions=8,
    bulk_copies=3,
    cluster_stores=16,
    barrier_instructions=4,
    local_memory_instructions=0,
    instructions=100,
    tensor_core_shapes={},
)
SHAPE = jax.ShapeDtypeStruct((8,), jnp.float32)


def make_variant(**changes):
    fields = {"kernel": "k", "name": "v", "function": jnp.sin, "arguments": (SHAPE,), "expects_cluster_stores": True}
    return Variant(**(fields | changes))


def test_good_figures_have_no_fault():
    assert judge(make_variant(), GOOD) == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spill_bytes": 12}, "spills 12 bytes"),
        ({"smem_bytes": SMEM_LIMIT_BYTES + 1}, "needs 232,449 bytes of shared memory, the limit is 232,448"),
        ({"tensor_core_instructions": 0}, "no tensor-core instruction"),
        ({"bulk_copies": 0}, "no bulk copy"),
        ({"cluster_stores": 0}, "no store to another block"),
    ],
)
def test_each_bad_figure_is_one_fault(changes, message):
    (fault,) = judge(make_variant(), dataclasses.replace(GOOD, **changes))
    assert message in fault


def test_expectations_can_be_switched_off():
    figures = dataclasses.replace(GOOD, tensor_core_instructions=0, bulk_copies=0, cluster_stores=0)
    relaxed = make_variant(expects_tensor_cores=False, expects_bulk_copies=False, expects_cluster_stores=False)
    assert judge(relaxed, figures) == ()


def test_variant_refuses_names_that_are_no_file_names_and_arguments_that_are_no_shapes():
    with pytest.raises(ValueError, match=r"name must be letters.*'a/b'"):
        make_variant(name="a/b")
    with pytest.raises(TypeError, match=r"k/v: argument 1 must be a jax.ShapeDtypeStruct, got int"):
        make_variant(arguments=(SHAPE, 3))


def test_target_states_the_limit_and_other_architectures_are_refused():
    assert f"shared_memory_per_block_optin: {SMEM_LIMIT_BYTES}" in target_config("sm_90a")
    with pytest.raises(UnsupportedArchitectureError, match=r"'sm_100a' is not supported, only sm_90a: .*tcgen05"):
        target_config("sm_100a")


def test_select_by_pattern():
    pairs = [("m", make_variant(name=name)) for name in ("h64-s1", "h64-s4", "h8-s1")]
    names = [variant.name for _, variant in registry.select(pairs, ("k",), ("h64-*", "h8-s1"))]
    assert names == ["h64-s1", "h64-s4", "h8-s1"]
    assert [variant.name for _, variant in registry.select(pairs, (), ("*-s4",))] == ["h64-s4"]
    assert registry.select(pairs, ("other",)) == []


def test_every_kernel_folder_with_variants_is_found_and_its_names_are_unique():
    for module in registry.kernel_modules():
        kernel = module.split(".")[-2]
        variants = registry.load_variants(module)
        assert variants
        assert {variant.kernel for variant in variants} == {kernel}


def test_duplicate_names_are_refused(monkeypatch):
    monkeypatch.setattr(report_probe, "variants", lambda: [make_variant(), make_variant()])
    with pytest.raises(ValueError, match="report_probe lists k/v twice"):
        registry.load_variants("report_probe")


@needs_toolchain
def test_known_kernels_give_known_code(tmp_path):
    names = ("product", "exchange", "crowded", "too-big", "no-kernel", "aborts")
    pairs = registry.select(
        [("report_probe", variant) for variant in registry.load_variants("report_probe")], (), names
    )
    entries = {entry.variant: entry for entry in compile_variants(pairs, "sm_90a", jobs=2, keep=tmp_path)}

    product = entries["product"]
    assert product.faults == ()
    assert product.figures is not None
    assert product.figures.tensor_core_shapes == {"HGMMA.64x64x16.F32.BF16": 4}
    assert product.figures.bulk_copies == 3
    assert product.figures.smem_bytes == 3 * 64 * 64 * 2 + 2 * 8  # three tiles and two barriers
    assert product.compile_s is not None
    assert list((tmp_path / "probe.product").glob("*.ptx"))

    assert entries["exchange"].faults == ()
    assert entries["exchange"].figures is not None
    assert entries["exchange"].figures.cluster_stores > 0
    assert "spills" in entries["crowded"].faults[0]
    assert "exceeds available shared memory" in entries["too-big"].faults[0]
    assert "no Mosaic GPU kernel" in entries["no-kernel"].faults[0]
    assert "signal 6" in entries["aborts"].faults[0]


@needs_toolchain
@pytest.mark.parametrize("plan", ["column-split", "swapped"])
def test_the_public_function_compiled_for_a_hopper_gpu_is_the_kernel(plan):
    pairs = [("report_probe", v) for v in registry.load_variants("report_probe") if v.name == f"dispatch-{plan}"]
    (entry,) = compile_variants(pairs, "sm_90a")
    assert entry.faults == ()
    assert entry.figures is not None
    assert entry.figures.kernels == 1


@needs_toolchain
def test_a_compiler_that_hangs_is_stopped():
    (pair,) = [("report_probe", v) for v in registry.load_variants("report_probe") if v.name == "product"]
    (entry,) = compile_variants([pair], "sm_90a", timeout_s=0.01)
    assert entry.faults == ("failed to compile: still compiling after 0.01 s",)
