"""The Triton products: values in the interpreter, instructions and spills in compiled code, launch tables."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from octavo.check.compile import LDS_LIMIT, TARGETS, CompiledKernel, compile_kernel
from octavo.compile_cases import CompileCase
from octavo.matmul import launch_tables, triton_kernels

SOURCE = Path(__file__).parents[2] / "src"
PROGRAM = Path(__file__).with_name("interpreter_products.py")


def _interpret(extent: str, timeout: int) -> None:
    pytest.importorskip("ml_dtypes", reason="the interpreter needs ml_dtypes' conversions")
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), extent],
        capture_output=True, text=True, timeout=timeout, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    found = re.match(r"(\d+) products compared, 0 wrong", done.stdout)
    assert found, done.stdout
    assert int(found[1]) > 30, done.stdout


def test_products_equal_the_reference_in_the_interpreter() -> None:
    _interpret("quick", 600)


@pytest.mark.exhaustive
@pytest.mark.timeout(2400)
def test_every_pair_shape_and_grouping_in_the_interpreter() -> None:
    _interpret("full", 2400)


# ---- compiled code ------------------------------------------------------------------------------------------

# What the matrix instruction of each kind of product must be.
INSTRUCTIONS = {
    "gfx942": {
        "product fp8": r"v_mfma_f32_\d+x\d+x\d+_(fp8|bf8)_(fp8|bf8)",
        "product bf16": r"v_mfma_f32_\d+x\d+x\d+_bf16",
        "product mx by bf16": r"v_mfma_f32_\d+x\d+x\d+_bf16",
    },
    "gfx950": {
        "product fp8": r"v_mfma_f32_\d+x\d+x\d+_f8f6f4",
        "product bf16": r"v_mfma_f32_\d+x\d+x\d+_bf16",
        "product mxfp8": r"v_mfma_scale_f32_\d+x\d+x\d+_f8f6f4",
        "product mxfp4": r"v_mfma_scale_f32_\d+x\d+x\d+_f8f6f4",
    },
    "sm_90": {
        "product fp8": r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.(e4m3|e5m2)\.(e4m3|e5m2)",
        "product bf16": r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16",
        "product mx by bf16": r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16",
    },
}
QUICK = (
    ("gfx942", "grouped_rows_tiles", "e4m3fnuz 1x128 x e4m3fnuz 128x128, rows any"),
    ("gfx942", "grouped_columns_tiles", "e2m1 1x32 x e2m1 1x32, rows any"),
    ("gfx950", "scaled_mm_tiles", "e4m3fn 1x32 x e4m3fn 1x32, rows any"),
    ("gfx950", "grouped_columns_tiles", "e4m3fn 1x128 x e4m3fn 1x128, rows any"),
    ("sm_90", "grouped_rows_tiles", "e4m3fn 1x128 x e4m3fn 128x128, rows any"),
)


def _compile(case: CompileCase, target: str) -> CompiledKernel:
    return compile_kernel(
        case.function, target, case.signature, case.constexprs, divisible=case.divisible,
        num_warps=case.num_warps, num_stages=case.num_stages, fp_fusion=case.fp_fusion, options=case.options,
    )  # fmt: skip


def _check(case: CompileCase, target: str) -> list[str]:
    kernel = _compile(case, target)
    faults = []
    pattern = INSTRUCTIONS[target].get(case.kind)
    # Fewer rows than a warp group's instruction takes go to mma.sync, in 16 bits, on Hopper.
    small = target == "sm_90" and case.constexprs.get("BLOCK_M", 0) < 64
    if pattern and not small and not re.search(pattern, kernel.asm):
        faults.append(f"{case.name}: no {pattern}")
    # Scalar spills go to lanes of a vector register, never to memory; `octavo check` holds them to a budget.
    if kernel.vgpr_spills or kernel.scratch_bytes:
        faults.append(
            f"{case.name}: {kernel.vgpr_spills} registers spilled, {kernel.scratch_bytes} bytes scratch"
        )
    if kernel.lds_bytes > {**LDS_LIMIT, "sm_90": 227 * 1024}[target]:
        faults.append(f"{case.name}: {kernel.lds_bytes} bytes of shared memory")
    return faults


@pytest.mark.amd
@pytest.mark.parametrize(("target", "kernel", "configuration"), QUICK, ids=lambda x: str(x))
def test_compiles_to_the_matrix_instructions_without_spills(
    target: str, kernel: str, configuration: str
) -> None:
    cases = triton_kernels.compile_cases(target)
    found = [c for c in cases if (c.kernel, c.configuration) == (kernel, configuration)]
    assert len(found) == 1
    assert _check(found[0], target) == []


# ---- tables -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_tables_serve_every_product_and_cases_have_names_of_their_own(target: str) -> None:
    works = ("epilogue", "block", "blockrows", "mxfp8", "mxfp4", "mxmixed")
    wanted = [f"{form} {work}" for form in ("dense", "rows", "columns") for work in works]
    wanted += [f"{form} {work}" for form in ("rows", "columns") for work in ("plain", "wide")]
    for name in wanted:
        for rows in (0, 1, 16, 17, 10**7):
            config = launch_tables.lookup(target, rows, name)
            assert config.kind == "decode_first" or min(config.tile) >= 16
            if "block" in name:
                assert (config.kind, config.tile[2]) == ("block", 128)
    names = [case.name for case in triton_kernels.compile_cases(target)]
    assert len(set(names)) == len(names)


def test_unordered_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = '{"kind": "plain", "tile": [16, 16, 16], "up_to": 8}'
    (tmp_path / "odd.json").write_text(
        f'{{"processors": 1, "dies": 1, "products": {{"dense plain": [{entry}]}}}}'
    )
    monkeypatch.setattr(launch_tables, "TABLES", tmp_path)
    with pytest.raises(ValueError, match="must have no up_to"):
        launch_tables.load("odd")
