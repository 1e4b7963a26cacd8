"""A static model of a kernel's main loop: a bound that counting instructions gives, never a time.

Everything is counted for one wave (warp) and one pass of the loop, as issued: masked lanes count, both sides of
a branch count, and neither caches, latencies, bank conflicts nor waits exist. Matrix cycles are how long one wave
keeps its SIMD's matrix core busy.

Sources. Cycles of AMD's matrix instructions: AMD, "Matrix Core Programming on AMD CDNA3 and CDNA4 architecture"
(ROCm blogs, 2025), the table of section 3; they agree with the peak rates of the CDNA3 and CDNA4 white papers.
Eight waves a SIMD, 512 vector registers a lane in granules of 8, shared by VGPRs and AGPRs, 4 SIMDs a compute
unit: CDNA3 and CDNA4 ISA documents. Hopper: NVIDIA H100 architecture white paper (dense FLOPs a clock and SM of
4096 for 16 bits and 8192 for FP8) and the CUDA programming guide's table of compute capability 9.0.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.check.compile import LDS_LIMIT, CompiledKernel
from octavo.check.inspect import Code, Instruction

# (M, N, K) and operand type: cycles of one instruction.
_MFMA_CYCLES = {
    ((32, 32, 8), "16"): 32,
    ((16, 16, 16), "16"): 16,
    ((32, 32, 16), "16"): 32,
    ((16, 16, 32), "16"): 16,
    ((32, 32, 16), "fp8"): 32,
    ((16, 16, 32), "fp8"): 16,
    ((32, 32, 2), "f32"): 64,
    ((16, 16, 4), "f32"): 32,
    ((32, 32, 64), "f8f6f4"): 64,
    ((16, 16, 128), "f8f6f4"): 32,
}
_F8F6F4_HALF_BELOW_8_BITS = 2  # FP6 and FP4 operands on both sides take half the cycles.
_MFMA = re.compile(r"v_mfma_(?:scale_)?f32_(\d+)x(\d+)x(\d+)_?(\w+?)(?:_1k|_e64)?$")
_MFMA_TYPES = {"f16": "16", "bf16": "16", "f32": "f32", "f8f6f4": "f8f6f4"}
_MFMA_TYPES |= {f"{a}_{b}": "fp8" for a in ("fp8", "bf8") for b in ("fp8", "bf8")}
_EIGHT_BIT_FORMATS = ("0", "1")  # cbsz and blgp: 0 FP8, 1 BF8, 2 FP6, 3 BF6, 4 FP4; 0 is not written.

_HOPPER = re.compile(r"(?:wgmma\.mma_async|mma)\.sync\.\S*?m(\d+)n(\d+)k(\d+)\S*")
_HOPPER_FLOPS_A_CYCLE = {16: 4096, 8: 8192}

WAVE = {"gfx942": 64, "gfx950": 64, "sm_90": 32}
HOPPER_SHARED_LIMIT = 227 * 1024
_HOPPER_SHARED_SM, _HOPPER_SHARED_RESERVED = 228 * 1024, 1024
_HOPPER_REGISTERS, _HOPPER_WARPS = 65536, 64


def shared_limit(target: str) -> int:
    """Largest LDS (shared memory) of a program, in bytes."""
    return LDS_LIMIT.get(target, HOPPER_SHARED_LIMIT)


@dataclass(frozen=True)
class LoopModel:
    """Counts of one wave in one pass of the main loop (the whole kernel if `loop` is None): a bound, never a time.

    `matrix_cycles` is None where a matrix instruction's cycles are not in the published tables. `flops_per_byte`
    relates matrix FLOPs to bytes of global memory, None without either. `occupancy` is waves a SIMD that
    registers, LDS and the program's waves leave room for.
    """

    loop: str | None
    instructions: int
    matrix_instructions: dict[str, int]
    matrix_cycles: int | None
    flops: int
    lds_bytes: int
    global_bytes: int
    flops_per_byte: float | None
    occupancy: float


def model(kernel: CompiledKernel, code: Code) -> LoopModel:
    """The static model of `kernel`, whose text is `code`."""
    matrix = [matrix_cost(i, kernel.target) for i in code.main if i.is_matrix]
    cycles = [c for _, c in matrix]
    flops = sum(f for f, _ in matrix)
    lanes = WAVE[kernel.target]
    moved = lanes * sum(global_bytes(i) for i in code.main)
    return LoopModel(
        loop=code.main_label,
        instructions=len(code.main),
        matrix_instructions=dict(Counter(i.mnemonic for i in code.main if i.is_matrix)),
        matrix_cycles=None if None in cycles else sum(c for c in cycles if c is not None),
        flops=flops,
        lds_bytes=lanes * sum(lds_bytes(i) for i in code.main),
        global_bytes=moved,
        flops_per_byte=round(flops / moved, 2) if flops and moved else None,
        occupancy=occupancy(kernel),
    )


# ---- matrix instructions ----------------------------------------------------------------------------------


def matrix_cost(instruction: Instruction, target: str) -> tuple[int, int | None]:
    """(FLOPs of one wave, cycles or None if no published table has it) of a matrix instruction."""
    if target == "sm_90":
        return _hopper_cost(instruction)
    match = _MFMA.match(instruction.mnemonic)
    if match is None:
        return 0, None
    shape = (int(match[1]), int(match[2]), int(match[3]))
    kind = _MFMA_TYPES.get(match[4], match[4])
    cycles = _MFMA_CYCLES.get((shape, kind))
    if cycles is not None and kind == "f8f6f4" and not _has_eight_bit_operand(instruction.operands):
        cycles //= _F8F6F4_HALF_BELOW_8_BITS
    return 2 * shape[0] * shape[1] * shape[2], cycles


def _has_eight_bit_operand(operands: str) -> bool:
    formats = dict(re.findall(r"\b(cbsz|blgp):(\d)", operands))
    return any(formats.get(name, "0") in _EIGHT_BIT_FORMATS for name in ("cbsz", "blgp"))


def _hopper_cost(instruction: Instruction) -> tuple[int, int | None]:
    match = _HOPPER.match(instruction.mnemonic)
    if match is None:
        return 0, None
    flops = 2 * int(match[1]) * int(match[2]) * int(match[3])
    types = instruction.mnemonic[match.end(3) - match.start() :]
    bits = 8 if "e4m3" in types or "e5m2" in types else 16
    cycles = flops // _HOPPER_FLOPS_A_CYCLE[bits]
    if instruction.mnemonic.startswith("wgmma"):
        return flops // 4, cycles  # A warpgroup is four warps on the four matrix cores of the SM.
    return flops, 4 * cycles


# ---- memory -----------------------------------------------------------------------------------------------

_AMD_BITS = re.compile(r"_[biuf](8|16|32|64|96|128)")  # The first one: in ds_read_b64_tr_b8 what is read.
_AMD_NAMES = {"byte": 1, "short": 2, "dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "_x2": 8}
_LDS = re.compile(r"ds_(?!bpermute|permute|swizzle|nop)")


def _amd_width(mnemonic: str) -> int:
    bits = _AMD_BITS.search(mnemonic)
    if bits:
        return int(bits[1]) // 8
    return next((width for name, width in _AMD_NAMES.items() if name in mnemonic), 4)


def _ptx_width(mnemonic: str) -> int:
    vector = re.search(r"\.v(\d)", mnemonic)
    width = re.search(r"\.[busf](\d+)$", mnemonic)
    return (int(vector[1]) if vector else 1) * (int(width[1]) // 8 if width else 4)


def _cp_async_width(operands: str) -> int:
    size = re.search(r"\]\s*,\s*\[[^]]*\]\s*,\s*(0x[0-9a-fA-F]+|\d+)", operands)
    return int(size[1], 0) if size else 0


def global_bytes(instruction: Instruction) -> int:
    """Bytes of global memory that a lane moves; tensor-memory copies (`cp.async.bulk`) count as 0."""
    name = instruction.mnemonic
    if not instruction.is_global_memory:
        return 0
    if name.startswith("cp.async"):
        return _cp_async_width(instruction.operands)
    return _ptx_width(name) if "." in name else _amd_width(name)


def lds_bytes(instruction: Instruction) -> int:
    """Bytes of LDS (shared memory) that a lane moves, direct-to-LDS loads included; not what `wgmma` reads."""
    name = instruction.mnemonic
    if _LDS.match(name):
        return _amd_width(name) * (2 if re.match(r"ds_(?:read|write|load|store)_?2", name) else 1)
    if name.startswith("buffer_load") and re.search(r"\blds\b", instruction.operands):
        return _amd_width(name)
    if name.startswith("global_load_lds"):
        return _amd_width(name)
    if name.startswith("cp.async"):
        return _cp_async_width(instruction.operands)
    tiles = re.match(r"(?:ldmatrix|stmatrix)\.\S*\.x(\d)", name)
    if tiles:
        return 4 * int(tiles[1])
    return _ptx_width(name) if re.match(r"(?:ld|st|atom|red)\S*\.shared", name) else 0


# ---- occupancy --------------------------------------------------------------------------------------------


def registers(kernel: CompiledKernel) -> int:
    """Vector registers a lane is given: on AMD VGPRs (AGPRs start at a multiple of 4) and AGPRs of one file."""
    if kernel.target == "sm_90" or kernel.agprs == 0:
        return kernel.vgprs
    return -(-kernel.vgprs // 4) * 4 + kernel.agprs


def register_waves(kernel: CompiledKernel) -> int:
    """Waves a SIMD (warps a scheduler) that the registers leave room for."""
    if kernel.target == "sm_90":
        per_warp = -(-max(registers(kernel), 1) * 32 // 256) * 256
        return min(_HOPPER_WARPS, _HOPPER_REGISTERS // per_warp) // 4
    return min(8, 512 // (-(-max(registers(kernel), 1) // 8) * 8))


def occupancy(kernel: CompiledKernel) -> float:
    """Waves a SIMD (warps a scheduler) at most: registers, LDS, and that a program starts whole or not at all.

    The granules in which LDS is handed out are ignored, so this too is an upper bound.
    """
    programs = 4 * register_waves(kernel) // kernel.num_warps
    if kernel.target == "sm_90":
        programs = min(programs, _HOPPER_SHARED_SM // (kernel.lds_bytes + _HOPPER_SHARED_RESERVED), 32)
    elif kernel.lds_bytes:
        programs = min(programs, LDS_LIMIT[kernel.target] // kernel.lds_bytes)
    return programs * kernel.num_warps / 4


def unlisted(instructions: Iterable[Instruction], target: str) -> list[str]:
    """Matrix instructions whose cycles no published table gives."""
    return sorted({i.mnemonic for i in instructions if i.is_matrix and matrix_cost(i, target)[1] is None})
