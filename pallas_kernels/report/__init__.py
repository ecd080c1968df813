"""What the compiler makes of the kernels: registers, spills, shared memory and instructions, with no GPU present.

`Variant` says what to compile, `compile_variants` compiles it for an architecture, `parse` reads what the assembler and
the disassembler wrote, `judge` says which figures are not acceptable, `table` prints them.
"""

from pallas_kernels.report.variant import Variant

__all__ = ["Variant"]
