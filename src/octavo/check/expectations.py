"""What compiled code must and must not contain, as data: one row an expectation, per kind and target.

A pattern is a regular expression searched in one instruction, `mnemonic operands`. The wrong format compiles
without a word into slow code, and sometimes into wrong code, so the text is what can be asserted:

- Triton casts float32 to an FP8 type that the target has no conversion for by comparing with a table of halfway
  points between subnormals; those float32 literals appear nowhere else.
- A product of FP8 operands that the target's matrix cores do not know is decoded and multiplied in 16 bits.
- gfx950 mis-executes `v_pk_fma_f32` with `op_sel:[0,1,0]`: the low lane's accumulation is at times not performed
  (ROCm/rocMLIR pull request 2459).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from octavo.check.inspect import Code, Instruction
from octavo.compile_cases import KINDS


@dataclass(frozen=True)
class Expectation:
    """An instruction that must (`need`) or must not be there.

    Args:
        what: the instruction in a reader's words; a failed check prints it.
        pattern: regular expression searched in `mnemonic operands`.
        need: whether it must be there, else it must not.
        loop: look in the main loop alone.
        since: Triton release (major, minor) from which it holds; before it, a `need` that is not met and a ban
            that is broken are known limits, told by `limit`, and no failures.
        limit: what older Triton releases do instead.
    """

    what: str
    pattern: str
    need: bool = True
    loop: bool = False
    since: tuple[int, int] = (0, 0)
    limit: str = ""


@dataclass(frozen=True)
class Finding:
    """The result of one check: `status` is pass, fail or limit (a known limit of the compiler, no failure)."""

    check: str
    status: str
    found: str
    needed: str

    def __str__(self) -> str:
        return f"{self.check}: found {self.found}; needed {self.needed}"


def _ban(what: str, pattern: str, **kwargs: object) -> Expectation:
    return Expectation(what, pattern, need=False, **kwargs)  # type: ignore[arg-type]


_LITERAL_448, _LITERAL_240 = r"\b0[xf]43e00000\b", r"\b0[xf]43700000\b"
# Odd multiples of half the smallest subnormal of e4m3fn, e4m3fnuz and e5m2fnuz, as float32.
_HALFWAY_POINTS = r"\b0x3(?:ba00000|c100000|c500000|b200000|b900000|bd00000|7a00000)\b"
_CAST = r"^v_cvt_(?:pk|sr)_(?:fp8|bf8)_f32"
_CAST_950 = r"^v_cvt_(?:scalef32_)?(?:pk|sr)_(?:fp8|bf8)_f32"
_MFMA_16 = r"^v_mfma_f32_\w*x\d+_?b?f16"
_MFMA_FP8 = r"^v_mfma_f32_\w+_(?:fp8|bf8)_(?:fp8|bf8)"
_MFMA_F8F6F4 = r"^v_mfma_f32_\w+_f8f6f4"
_MFMA_SCALE = r"^v_mfma_scale_f32_\w+_f8f6f4"
_HOPPER_16 = r"^(?:wgmma|mma)\S*\.b?f16"
_HOPPER_FP8 = r"^(?:wgmma|mma)\S*\.e(?:4m3|5m2)"
_SOFTWARE_ON_950 = "Triton before 3.9 casts to FP8 in software on gfx950: exact, and slower"

_NO_F16_MFMA = _ban("a matrix instruction of 16-bit operands (FP8 decoded first)", _MFMA_16)
_NO_F16_HOPPER = _ban("a matrix instruction of 16-bit operands (FP8 decoded first)", _HOPPER_16)
_NO_SOFTWARE_CAST = _ban("a software FP8 cast (its table of halfway points)", _HALFWAY_POINTS)
_NO_448 = _ban("the literal 448.0, the largest OCP e4m3fn, where fnuz ends at 240", _LITERAL_448)
_NO_240 = _ban("the literal 240.0, the largest fnuz e4m3, where OCP e4m3fn ends at 448", _LITERAL_240)
_NO_ERRATUM = _ban("v_pk_fma_f32 with op_sel:[0,1,0] (mis-executed)", r"^v_pk_fma_f32\b.*op_sel:\[0,1,0\]")

_BF16_PRODUCT = (Expectation("v_mfma_f32_*_bf16 or _f16 in the main loop", _MFMA_16, loop=True),)
_HOPPER_PRODUCT = (
    Expectation("wgmma or mma.sync of 16-bit operands in the main loop", _HOPPER_16, loop=True),
)

EXPECTATIONS: dict[str, dict[str, tuple[Expectation, ...]]] = {
    "gfx942": {
        "general": (),
        "quantize fp8": (
            Expectation("a hardware cast to fnuz FP8 (v_cvt_pk_fp8_f32, v_cvt_pk_bf8_f32)", _CAST),
            _NO_SOFTWARE_CAST,
            _NO_448,
        ),
        "quantize by integers": (_ban("a hardware cast (it makes fnuz codes on gfx942)", _CAST),),
        "product bf16": _BF16_PRODUCT,
        "product fp8": (
            Expectation("v_mfma_f32_*_fp8_fp8 (or bf8) in the main loop", _MFMA_FP8, loop=True),
            _NO_F16_MFMA,
        ),
        "product mx by bf16": _BF16_PRODUCT,
    },
    "gfx950": {
        "general": (),
        "quantize fp8": (
            Expectation(
                "a hardware cast to OCP FP8 (v_cvt_scalef32_pk_fp8_f32, v_cvt_pk_fp8_f32, or bf8)",
                _CAST_950,
                since=(3, 9),
                limit=_SOFTWARE_ON_950,
            ),
            replace(_NO_SOFTWARE_CAST, since=(3, 9), limit=_SOFTWARE_ON_950),
            _NO_240,
        ),
        "quantize by integers": (),
        "product bf16": _BF16_PRODUCT,
        "product fp8": (
            Expectation(
                "v_mfma_f32_*_f8f6f4 or _fp8_fp8 in the main loop", f"{_MFMA_F8F6F4}|{_MFMA_FP8}", loop=True
            ),
            _NO_F16_MFMA,
        ),
        "product mxfp8": (
            Expectation("v_mfma_scale_f32_*_f8f6f4 in the main loop", _MFMA_SCALE, loop=True),
            _NO_F16_MFMA,
        ),
        "product mxfp4": (
            Expectation(
                "v_mfma_scale_f32_*_f8f6f4 with an FP4 operand (cbsz:4 or blgp:4) in the main loop",
                _MFMA_SCALE + r"\b.*(?:cbsz|blgp):4",
                loop=True,
            ),
            _NO_F16_MFMA,
        ),
        "product mx by bf16": _BF16_PRODUCT,
    },
    "sm_90": {
        "general": (),
        "quantize fp8": (
            Expectation(
                "a hardware cast to FP8 (cvt.rn.satfinite.e4m3x2.f32 or e5m2x2)",
                r"^cvt\.rn\.satfinite\.e(?:4m3|5m2)x2\.f32",
            ),
            _NO_240,
        ),
        "quantize by integers": (),
        "product bf16": _HOPPER_PRODUCT,
        "product fp8": (
            Expectation("wgmma or mma.sync of e4m3 or e5m2 in the main loop", _HOPPER_FP8, loop=True),
            _NO_F16_HOPPER,
        ),
        "product mx by bf16": _HOPPER_PRODUCT,
    },
}
"""Per target and kind. A kind that a target lacks cannot be compiled there with its meaning, which fails."""

ALWAYS: dict[str, tuple[Expectation, ...]] = {"gfx942": (), "gfx950": (_NO_ERRATUM,), "sm_90": ()}
"""Per target, for every kind."""


def expect(code: Code, kind: str, target: str, triton: tuple[int, int]) -> list[Finding]:
    """Findings on the instructions of a kernel of `kind` compiled for `target` by Triton (major, minor)."""
    rows = EXPECTATIONS[target].get(kind)
    if rows is None:
        known = ", ".join(EXPECTATIONS[target])
        return [Finding("kind", "fail", f"kind {kind!r} ({KINDS[kind]}) on {target}", f"one of {known}")]
    return [_judge(row, code, triton) for row in (*rows, *ALWAYS[target])]


def _judge(row: Expectation, code: Code, triton: tuple[int, int]) -> Finding:
    where = code.main if row.loop else code.instructions
    hits = _matches(row.pattern, where)
    good = bool(hits) == row.need
    status = "pass" if good else "fail" if triton >= row.since else "limit"
    found = f"{len(hits)} ({hits[0].text[:90]})" if hits else "none"
    if not hits and row.need:
        found += f" among {_summary(where)}"
    needed = row.what if row.need else f"no {row.what}"
    if status == "limit":
        found += f" (known limit: {row.limit})"
    return Finding("instruction" if row.need else "forbidden instruction", status, found, needed)


def _matches(pattern: str, instructions: Iterable[Instruction]) -> list[Instruction]:
    compiled = re.compile(pattern)
    return [i for i in instructions if compiled.search(i.text)]


def _summary(instructions: Iterable[Instruction]) -> str:
    """The matrix and conversion instructions there, for the reader of a failed check."""
    names = sorted({i.mnemonic for i in instructions if i.is_matrix or re.match(r"(?:v_)?cvt", i.mnemonic)})
    return ", ".join(names[:6]) or "no matrix or conversion instruction"
