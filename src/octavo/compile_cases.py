"""How a kernels module says what `octavo check` shall compile.

A module that holds `@triton.jit` kernels (its name is `kernels` or ends in `_kernels`) may expose

    def compile_cases(target: str) -> list[CompileCase]

with `target` one of gfx942, gfx950 and sm_90. It yields every configuration that the module can launch on that
target by its committed tables: each element type, tile, number of warps and stages. Anything that is never
launched there (a fnuz cast on gfx950) is left out. This file imports neither Triton nor a room, so that rooms
may use it and `octavo check` may import rooms.

    def compile_cases(target: str) -> list[CompileCase]:
        element = "e4m3fnuz" if target == "gfx942" else "e4m3fn"
        return [
            CompileCase(
                kernel="quantize_rows", configuration=f"{element} bf16 {block}", room="quantize",
                kind="quantize fp8", function=quantize_rows,
                signature={"x": "*bf16", "data": "*u8", "scale": "*fp32", "M": "i32", "K": "i32"},
                constexprs={"ELEMENT": element, "BLOCK_K": block},
                divisible=("x", "data", "scale", "K"), num_warps=warps,
            )
            for block, warps in ((1024, 4), (4096, 8))
        ]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KINDS: dict[str, str] = {
    "general": "no matrix product and no cast to a narrow type: amax passes, norms, top-k, copies",
    "quantize fp8": "casts to FP8 with the target's own conversion instruction",
    "quantize by integers": "casts by integer arithmetic on purpose, where the target has no conversion of the element",
    "product bf16": "matrix product of 16-bit operands",
    "product fp8": "matrix product of FP8 operands with float32 scales",
    "product mxfp8": "matrix product of FP8 operands with e8m0 scales of 32 in the matrix instruction",
    "product mxfp4": "matrix product of FP4 operands with e8m0 scales of 32 in the matrix instruction",
    "product mx by bf16": "matrix product of MX operands decoded to 16 bits, where no matrix instruction takes them",
}
"""What a kernel is; `octavo.check.expectations` holds what its code must and must not contain, per target."""


@dataclass(frozen=True)
class CompileCase:
    """One kernel in one configuration, ready to be compiled without a GPU.

    Args:
        kernel: name to select it by (`octavo check --kernel`), usually the function's.
        configuration: a few words that tell it from the kernel's other cases on this target; part of the key of
            its committed budget, so keep it stable and free of numbers that do not matter.
        room: the package it serves: `quantize`, `matmul`, `topk`, ...
        kind: a key of `KINDS`.
        function: the `@triton.jit` function, or the `FlyKernel`.
        signature: Triton type of each run-time parameter: `"*bf16"`, `"*fp8e4nv"`, `"i32"`, ...
        constexprs: value of each compile-time parameter.
        divisible: parameters (pointers or sizes) that are multiples of 16 at the launches this stands for; Triton
            specialises on it and loads wide only then.
        num_warps: warps (waves of 64 on AMD, of 32 on NVIDIA) in a program.
        num_stages: of Triton's software pipeline; None for the target's default.
        fp_fusion: whether the launch lets a * b + c become one rounding (`enable_fp_fusion`).
        options: further backend options of the launch: `waves_per_eu`, `matrix_instr_nonkdim`, ...

    Raises:
        ValueError: for an unknown kind.
    """

    kernel: str
    configuration: str
    room: str
    kind: str
    function: Any = field(repr=False, compare=False)
    signature: Mapping[str, str] = field(repr=False, hash=False)
    constexprs: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)
    divisible: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int | None = None
    fp_fusion: bool = True
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"{self.name}: kind {self.kind!r} is none of {', '.join(map(repr, KINDS))}; "
                "add one to octavo.compile_cases.KINDS with its expectations in octavo.check.expectations"
            )

    @property
    def name(self) -> str:
        """`kernel [configuration]`, the key of the case in budgets and reports."""
        return f"{self.kernel} [{self.configuration}]"

    @property
    def language(self) -> str:
        """What the kernel is written in: "triton", or "flydsl" for an `octavo.flydsl.kernel.FlyKernel`."""
        return getattr(self.function, "language", "triton")
