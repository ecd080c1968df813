"""Reads what the assembler, the disassembler and Mosaic GPU wrote while a kernel was compiled.

The texts are those that `MOSAIC_GPU_DUMP_TO` leaves behind, one set of files for each kernel in the compiled function:
`*.ptxas` (the assembler's verbose report), `*.sass` or `*.sass_ctrl` (machine code), `*.mlir-passes.log` and
`*.resources.txt` (the launch and its shared memory).
"""

import collections
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_REGISTERS = re.compile(r"Used (\d+) registers")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_SCRATCH = re.compile(r"smem_scratch_bytes=(\d+)")
_LAUNCH_SMEM = re.compile(r"dynamic_shared_memory_size (%[\w.\-]+)")
_CONSTANT = re.compile(r"(%[\w.\-]+) = (?:arith|llvm\.mlir)\.constant\(?\s?(\d+) : (?:i32|index)")
# An instruction follows its address comment and perhaps a predicate; `sass_ctrl` files put scheduling bits in front.
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")

TENSOR_CORE = ("HGMMA", "QGMMA", "IGMMA", "BGMMA")
BULK_COPY = ("UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED")
CLUSTER_STORE = ("STAS",)
BARRIER = ("SYNCS",)
LOCAL_MEMORY = ("LDL", "STL")


class ReportFormatError(ValueError):
    """A compiler's report does not contain what it was expected to."""


@dataclass(frozen=True)
class Figures:
    """What one compiled function needs of one multiprocessor, and which special instructions it has.

    Instruction counts are static: instructions in the code, not executions. Over several kernels in one function,
    registers, stack and shared memory are the largest, spills and instructions the sum.
    """

    kernels: int
    registers: int
    stack_bytes: int
    spill_bytes: int
    smem_bytes: int
    tensor_core_instructions: int
    bulk_copies: int
    cluster_stores: int
    barrier_instructions: int
    local_memory_instructions: int
    instructions: int
    tensor_core_shapes: Mapping[str, int]


def parse_ptxas(text: str) -> tuple[int, int, int]:
    """Registers, stack bytes and spill bytes (stores and loads together) of the kernels in an assembler's report.

    Device functions that the assembler did not inline are listed too; the largest frame counts, and all spills.

    Raises:
      ReportFormatError: there is no register count or no spill line; a changed format must not pass as "no spills".
    """
    registers = [int(count) for count in _REGISTERS.findall(text)]
    frames = [(int(stack), int(stores) + int(loads)) for stack, stores, loads in _FRAME.findall(text)]
    if not registers or not frames:
        raise ReportFormatError("the ptxas report names no register count or no spill bytes")
    return max(registers), max(stack for stack, _ in frames), sum(spill for _, spill in frames)


def count_opcodes(sass: str) -> collections.Counter[str]:
    """Occurrences of every opcode with its modifiers, `HGMMA.64x64x16.F32.BF16` for example, in disassembled code."""
    return collections.Counter(_INSTRUCTION.findall(sass))


def count_family(opcodes: Mapping[str, int], families: Iterable[str]) -> int:
    """Instructions whose opcode, modifiers aside, is one of `families`."""
    wanted = frozenset(families)
    return sum(count for opcode, count in opcodes.items() if opcode.split(".")[0] in wanted)


def parse_launch_smem(lines: Iterable[str]) -> int | None:
    """Dynamic shared memory bytes of the first launch in MLIR text, barriers included; None without a launch."""
    constants: dict[str, int] = {}
    for line in lines:
        if match := _CONSTANT.search(line):
            constants[match[1]] = int(match[2])
        if (match := _LAUNCH_SMEM.search(line)) and match[1] in constants:
            return constants[match[1]]
    return None


def parse_resources(text: str) -> int:
    """Shared memory bytes for buffers (barriers aside) in Mosaic's resource summary.

    Raises:
      ReportFormatError: the summary names none.
    """
    if not (match := _SCRATCH.search(text)):
        raise ReportFormatError("the resource summary names no smem_scratch_bytes")
    return int(match[1])


def read_dump(folder: Path) -> Figures:
    """The figures of the function whose kernels were dumped into `folder`.

    Raises:
      ReportFormatError: a file is missing or not understood.
    """
    names = sorted(path.name.removesuffix(".ptxas") for path in folder.glob("*.ptxas"))
    if not names:
        raise ReportFormatError("no Mosaic GPU kernel was compiled: there is no ptxas report")
    frames, smem = [], []
    opcodes: collections.Counter[str] = collections.Counter()
    for name in names:
        frames.append(parse_ptxas((folder / f"{name}.ptxas").read_text()))
        smem.append(_read_smem(folder, name))
        opcodes += count_opcodes(_read_sass(folder, name))
    if not opcodes:
        raise ReportFormatError("no instruction was recognised in the disassembly")
    return Figures(
        kernels=len(names),
        registers=max(registers for registers, _, _ in frames),
        stack_bytes=max(stack for _, stack, _ in frames),
        spill_bytes=sum(spill for _, _, spill in frames),
        smem_bytes=max(smem),
        tensor_core_instructions=count_family(opcodes, TENSOR_CORE),
        bulk_copies=count_family(opcodes, BULK_COPY),
        cluster_stores=count_family(opcodes, CLUSTER_STORE),
        barrier_instructions=count_family(opcodes, BARRIER),
        local_memory_instructions=count_family(opcodes, LOCAL_MEMORY),
        instructions=sum(opcodes.values()),
        tensor_core_shapes={op: n for op, n in sorted(opcodes.items()) if count_family({op: 1}, TENSOR_CORE)},
    )


def _read_sass(folder: Path, name: str) -> str:
    for suffix in (".sass", ".sass_ctrl"):
        if (path := folder / f"{name}{suffix}").is_file():
            return path.read_text()
    raise ReportFormatError(f"no disassembly of {name}: is nvdisasm installed?")


def _read_smem(folder: Path, name: str) -> int:
    """The launch's size where the pass log shows it, else the size of the buffers alone."""
    if (path := folder / f"{name}.mlir-passes.log").is_file():
        with path.open(errors="replace") as lines:
            if (size := parse_launch_smem(lines)) is not None:
                return size
    if not (path := folder / f"{name}.resources.txt").is_file():
        raise ReportFormatError(f"neither a launch nor a resource summary of {name}")
    return parse_resources(path.read_text())
