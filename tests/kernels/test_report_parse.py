import pytest

from pallas_kernels.report import parse

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'decode_kernel' for 'sm_90a'
ptxas info    : Function properties for decode_kernel
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 234 registers, used 3 barriers, 16 bytes cumulative stack size, 1 bytes smem
ptxas info    : Compile time = 1402.331 ms
"""
CLEAN_PTXAS = PTXAS.replace("16 bytes stack", "0 bytes stack").replace("8 bytes spill", "0 bytes spill")
CLEAN_PTXAS = CLEAN_PTXAS.replace("4 bytes spill", "0 bytes spill")

# Both forms of listing, predicates and uniform predicates, an opcode that only begins like a wanted one, and a comment
# with an opcode's name that is not an instruction.
SASS = """\
\t.section\t.text.decode_kernel,"ax",@progbits
.L_x_1: // HGMMA
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
   -:-:4:Y:01        /*0520*/                   @UP2 SYNCS.EXCH.64 URZ, [UR16+0x6008], UR4
   -:-:-:Y:01        /*0570*/                   SYNCS.ARRIVE.TRANS64 RZ, [UR16+0x6000], R4
   -:2:-:Y:01        /*0590*/                   @UP5 UTMALDG.3D.MULTICAST [UR16], [UR6]
   -:2:-:Y:01        /*05a0*/                   @!UPT UBLKCP.S.G [UR16], [UR6], UR7
   -:1:-:Y:01        /*05b0*/                   @UP1 UTMASTG.3D [UR4], [UR10]
   -:1:-:Y:01        /*05c0*/                   @UP4 UTMACCTL.PF [UR12]
   -:-:-:Y:01        /*06e0*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4].tnspB, RZ, !UPT
   -:-:-:Y:01        /*07c0*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4].tnspB, R24
   -:-:-:Y:01        /*0800*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24, gsb0
   -:-:-:Y:01        /*0810*/                   QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24
   -:-:-:Y:01        /*10820*/                   @P2 STAS.64 [R4.64], R2
   -:-:-:Y:01        /*10830*/                   STL [R1], R2
   -:-:-:Y:01        /*10840*/                   @!P0 NANOSLEEP.SYNCS 0x989680
"""

PASSES = """\
// -----// IR Dump Before Canonicalizer //----- //
    %c132 = arith.constant 132 : index loc(#loc1)
    %kernel_1 = arith.constant 228352 : i32 loc(#loc14)
    %t = gpu.launch async [%a] blocks(%x) in (%c132) threads(%y) in (%c132) dynamic_shared_memory_size %kernel_1 {
    %kernel_1 = arith.constant 7 : i32 loc(#loc14)
"""


def test_ptxas_spills_are_loads_and_stores_together():
    assert parse.parse_ptxas(PTXAS) == (234, 16, 12)
    assert parse.parse_ptxas(CLEAN_PTXAS) == (234, 0, 0)


def test_ptxas_counts_functions_that_were_not_inlined():
    helper = "ptxas info    : Function properties for helper\n"
    helper += "    64 bytes stack frame, 0 bytes spill stores, 20 bytes spill loads\n"
    assert parse.parse_ptxas(CLEAN_PTXAS + helper) == (234, 64, 20)


@pytest.mark.parametrize("text", ["", "ptxas info    : Used 5 registers\n", "0 bytes stack frame, none spilled"])
def test_ptxas_of_unknown_format_is_refused_rather_than_read_as_clean(text):
    with pytest.raises(parse.ReportFormatError, match="register count or no spill"):
        parse.parse_ptxas(text)


def test_opcodes_with_and_without_predicates_and_scheduling_bits():
    opcodes = parse.count_opcodes(SASS)
    assert opcodes["HGMMA.64x64x16.F32.BF16"] == 2
    assert parse.count_family(opcodes, parse.TENSOR_CORE) == 4
    assert parse.count_family(opcodes, parse.BULK_COPY) == 3  # UTMACCTL prefetches a descriptor and copies nothing
    assert parse.count_family(opcodes, parse.CLUSTER_STORE) == 1
    assert parse.count_family(opcodes, parse.BARRIER) == 2  # NANOSLEEP.SYNCS is a wait, not a barrier instruction
    assert parse.count_family(opcodes, parse.LOCAL_MEMORY) == 1
    assert sum(opcodes.values()) == 15


def test_launch_size_is_the_first_launch_with_the_constant_before_it():
    assert parse.parse_launch_smem(PASSES.splitlines()) == 228352
    assert parse.parse_launch_smem(["no launch here"]) is None


def test_resources():
    assert parse.parse_resources("Resources(smem_scratch_bytes=24576, tmem_scratch_cols=0)") == 24576
    with pytest.raises(parse.ReportFormatError, match="smem_scratch_bytes"):
        parse.parse_resources("Resources()")


def write_kernel(folder, name, *, ptxas=CLEAN_PTXAS, sass: str | None = SASS, passes: str | None = PASSES):
    (folder / f"{name}.ptxas").write_text(ptxas)
    if sass is not None:
        (folder / f"{name}.sass_ctrl").write_text(sass)
    if passes is not None:
        (folder / f"{name}.mlir-passes.log").write_text(passes)


def test_dump_of_two_kernels_sums_instructions_and_takes_the_largest_frame(tmp_path):
    write_kernel(tmp_path, "decode_0")
    write_kernel(tmp_path, "combine_1", ptxas=PTXAS.replace("234", "40"), passes=None)
    (tmp_path / "combine_1.resources.txt").write_text("Resources(smem_scratch_bytes=1024)")
    figures = parse.read_dump(tmp_path)
    assert (figures.kernels, figures.registers, figures.stack_bytes, figures.spill_bytes) == (2, 234, 16, 12)
    assert figures.smem_bytes == 228352
    assert figures.tensor_core_instructions == 8
    assert figures.tensor_core_shapes == {
        "HGMMA.64x256x16.F32.BF16": 2,
        "HGMMA.64x64x16.F32.BF16": 4,
        "QGMMA.64x64x32.F32.E4M3.E4M3": 2,
    }


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "no Mosaic GPU kernel was compiled"),
        ({"sass": None}, "no disassembly"),
        ({"sass": "nothing known"}, "no instruction was recognised"),
        ({"passes": None}, "neither a launch nor a resource summary"),
    ],
)
def test_incomplete_dump_is_refused(tmp_path, files, message):
    if files is not None:
        write_kernel(tmp_path, "decode_0", **files)
    with pytest.raises(parse.ReportFormatError, match=message):
        parse.read_dump(tmp_path)
