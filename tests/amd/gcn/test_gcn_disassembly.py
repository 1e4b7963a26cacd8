"""The assembly text that is executed is the code object: LLVM's disassembler agrees, instruction for instruction."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from gcn_helpers import both_targets

triton = pytest.importorskip("triton", reason="compiling kernels needs Triton")

import gcn_triton_kernels as kernels  # noqa: E402
from test_gcn_kernels import FP8, ScaledProduct, compile_quantize  # noqa: E402
from test_gcn_sabotage import compile_product  # noqa: E402

from octavo.check.compile import compile_kernel  # noqa: E402
from octavo.check.gcn.asm import parse  # noqa: E402

OBJDUMP = next((p for v in range(30, 18, -1) if (p := shutil.which(f"llvm-objdump-{v}"))), None)
pytestmark = [
    pytest.mark.amd,
    pytest.mark.skipif(OBJDUMP is None, reason="needs llvm-objdump of LLVM 19 or newer (Debian: llvm-22)"),
]
BRANCH = re.compile(r"s_c?branch")


def disassemble(code: Any, folder: Path) -> list[tuple[int, str, str]]:
    """(address, instruction, branch target as offset from the entry or "") without padding."""
    path = folder / "code.hsaco"
    path.write_bytes(code.binary)
    assert OBJDUMP is not None
    out = subprocess.run(
        [OBJDUMP, "-d", f"--mcpu={code.target}", path], capture_output=True, text=True, check=True
    )
    found = []
    for line in out.stdout.splitlines():
        match = re.match(r"\s+(\S.*?)\s*// ([0-9A-F]+): [0-9A-F ]+(?:<(\S+?)(?:\+(0x[0-9a-f]+))?>)?", line)
        if match and not match[1].startswith("s_nop"):
            found.append((int(match[2], 16), match[1], (match[4] or "0x0") if match[3] else ""))
    return found


def normal(text: str) -> str:
    """One spelling: whitespace, and constants as numbers (the two printers differ in 0x1 and 1)."""
    text = re.sub(r"\s+", " ", text.strip())
    return re.sub(r"\b0x[0-9a-f]+\b|(?<![\w.\[:])-?\d+\b(?![.\w])", lambda m: str(int(m[0], 0)), text)


def check(code: Any, folder: Path) -> int:
    program = parse(code.asm)
    listing = disassemble(code, folder)
    start = listing[0][0]
    place = {}  # instruction index -> position among the instructions that are not s_nop
    text = []
    for index, instruction in enumerate(program.instructions):
        place[index] = len(text)
        if instruction.name != "s_nop":
            text.append(instruction)
    assert len(text) == len(listing)
    addresses = [address - start for address, _, _ in listing]
    for instruction, (_, line, target) in zip(text, listing, strict=True):
        if BRANCH.match(instruction.name):
            assert line.split()[0] == instruction.name
            landing = place[program.labels[instruction.operands[0].text]]
            # A label may stand before padding: the first instruction at or after the address counts.
            assert next(i for i, a in enumerate(addresses) if a >= int(target, 16)) == landing
        else:
            assert normal(line) == normal(instruction.text)
    return len(text)


@both_targets
@pytest.mark.parametrize("kernel", ["quantize", "product", "attention", "integers", "sort"])
def test_disassembly_agrees(kernel: str, target: str, tmp_path: Path) -> None:
    if kernel == "quantize":
        code = compile_quantize(target, "bf16", FP8[target][0], FP8[target][2])
    elif kernel == "product":
        code, _ = compile_product(target, 3)
    elif kernel == "attention":
        types = dict.fromkeys("qkv", "*bf16") | {"out": "*fp32", "L": "i32", "scale": "fp32"}
        code = compile_kernel(
            kernels.attention, target, types, {"BM": 64, "BN": 32, "D": 64}, divisible=[*"qkv"]
        )
    elif kernel == "integers":
        types = {"x": "*i32", "y": "*i32", "out": "*i32", "n": "i32"}
        code = compile_kernel(kernels.integers, target, types, {"BLOCK": 1024})
    else:
        code = compile_kernel(kernels.sort_rows, target, {"x": "*fp32", "out": "*fp32"}, {"BLOCK": 256})
    assert check(code, tmp_path) > 100


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_scaled_products_agree(fmt: str, tmp_path: Path) -> None:
    assert check(ScaledProduct(fmt).code, tmp_path) > 100
