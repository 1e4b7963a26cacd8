"""The gemm operator: its kernels in Triton's interpreter, its overrides on the CPU, its gates and its tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.formats import MXFP4, MXFP8, Format
from octavo.operators.gemm import plan, reference, scaled

HERE = Path(__file__).parent


def run(script: str, *group: str) -> list[str]:
    """What a program of this folder prints, run with Triton's interpreter."""
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    pytest.importorskip("ml_dtypes", reason="the interpreter needs ml_dtypes' conversions")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", str(HERE / script), *group]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


@pytest.mark.parametrize(
    ("group", "count"),
    [
        pytest.param("mx", 16, marks=pytest.mark.slow),
        pytest.param("mixed", 15, marks=pytest.mark.slow),
        ("dense", 7),
        pytest.param("fp8", 12, marks=pytest.mark.slow),
        ("values", 8),
        ("first", 18),
        ("calls", 10),
    ],
)
def test_kernels_in_the_interpreter(group: str, count: int) -> None:
    assert run("gemm_checks.py", group) == [group, str(count)]


@pytest.mark.parametrize(
    "group",
    [
        "scaled",
        "grouped",
        "fp8_grouped",
        "compiled",
        pytest.param("inductor", marks=pytest.mark.slow),
        pytest.param("refusals", marks=pytest.mark.case("B48")),
        pytest.param("empty", marks=pytest.mark.case("B48")),
    ],
)
def test_overrides_on_the_cpu(group: str) -> None:
    assert run("gemm_registry.py", group) == [group, "passed"]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_dense_products_are_choices_of_inductor() -> None:
    groups = "offered,forced,measured,refused,off,handler,seam"
    assert run("gemm_inductor.py", groups)[-2:] == [groups, "passed"]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_compiled_graphs_are_found_only_where_the_same_choices_are_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    ways = {"forced": "miss", "forced again": "hit", "stock": "miss", "other": "miss"}
    for way, found in ways.items():
        assert run("gemm_inductor.py", "cached", way.split()[0])[-3] == found, way


def test_swizzled_scales_lie_where_cublas_reads_them() -> None:
    """Code by code; and back, whatever the padding holds."""
    for rows, codes in ((1, 1), (128, 4), (130, 5), (300, 11)):
        plain = torch.randint(0, 255, (rows, codes), dtype=torch.uint8)
        flat = reference.swizzle(plain, padding=255)
        assert flat.numel() == reference.swizzled_size(rows, codes)
        tiles = -(-codes // 4)
        for r, j in ((0, 0), (rows - 1, codes - 1), (rows // 2, codes // 2), (rows // 3, codes - 1)):
            inner = r % 32 * 16 + r % 128 // 32 * 4 + j % 4
            assert flat[(r // 128 * tiles + j // 4) * 512 + inner] == plain[r, j]
        back = reference.unswizzle(flat, rows, codes)
        assert torch.equal(back.view(torch.uint8), plain)


def _call(
    m: int = 32, n: int = 48, k: int = 64, dtype: torch.dtype = torch.float8_e4m3fn, **changes: Any
) -> dict[str, Any]:
    pack = 2 if dtype is torch.float4_e2m1fn_x2 else 1
    call: dict[str, Any] = {
        "self": torch.empty(m, k // pack, dtype=dtype, device="meta"),
        "mat2": torch.empty(n, k // pack, dtype=dtype, device="meta").t(),
        "scale_a": [torch.empty(m, -(-k // 32), dtype=torch.float8_e8m0fnu, device="meta")],
        "scale_b": [torch.empty(n, -(-k // 32), dtype=torch.float8_e8m0fnu, device="meta")],
        "recipe_a": [3], "recipe_b": [3], "swizzle_a": [0], "swizzle_b": [0],
        "bias": None, "out_dtype": torch.bfloat16,
    }  # fmt: skip
    return call | changes


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (_call(recipe_a=[1]), "not BlockWise1x32"),
        (_call(recipe_a=[2, 0], scale_a=[_meta(1), _meta(1)]), "not BlockWise1x32"),
        (_call(scale_a=[_meta(32, 2, dtype=torch.float32)]), "not float8_e8m0fnu"),
        (_call(swizzle_a=[1]), "not as many scales as swizzled"),
        (_call(swizzle_a=[7]), "a swizzle is neither"),
        (_call(contraction_dim=[0, 1]), "contraction is not over"),
        (_call(n=40), "multiples of 16"),
        (_call(k=40), "multiples of 16"),
        (_call(m=0), "an extent is zero"),
        (_call(dtype=torch.float8_e5m2), "no two float8_e5m2"),
        (_call(out_dtype=None), "output is not"),
        (_call(out_dtype=torch.float32, bias=_meta(48, dtype=torch.float32)), "none beside float32"),
        (_call(bias=_meta(47)), "one value for each column"),
        (_call(bias=_meta(48, dtype=torch.float16)), "bias of the output's dtype"),
        (_call(dtype=torch.float4_e2m1fn_x2, use_fast_accum=True), "fast accumulation"),
        (_call(self=_meta(64, 32, dtype=torch.float8_e4m3fn).t()), "not row-major"),
        (_call(self=_meta(32, 64)), "not float8_e4m3fn"),
    ],
)
def test_what_the_kernels_are_not_right_for_is_refused(call: dict, reason: str) -> None:
    answer = scaled.why_not_v2(**call)
    assert answer is not None
    assert reason in answer


def test_what_they_are_right_for_is_refused_for_the_device_alone() -> None:
    for call in (_call(), _call(dtype=torch.float4_e2m1fn_x2), _call(m=1, bias=_meta(48))):
        answer = scaled.why_not_v2(**call)
        assert answer is not None
        assert "meta" in answer


def test_mx_products_are_served_unmeasured_where_pytorch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    call = _call()
    for arch, served in (("sm_90", True), ("gfx942", True), ("gfx950", False)):
        monkeypatch.setattr("octavo.hardware.architecture", lambda device, arch=arch: arch)
        assert (scaled.measured(call["self"], call["mat2"]) is None) is served


def test_plans_cover_every_row_count() -> None:
    block = Format(MXFP8.element, "128x128")
    works = {plan.work_of(a, b) for a, b in ((MXFP8, MXFP8), (MXFP4, MXFP4))}
    works |= {plan.work_of(None, b) for b in (MXFP8, MXFP4, block)} | {plan.DENSE}
    for arch in ("sm_90", "gfx950", "gfx942"):
        for work in works:
            for rows in (1, 16, 17, 64, 65, 4096, 10**6):
                chosen = plan.choose(arch, work, rows)
                assert (
                    chosen.kind == "decode_first" or chosen.tile[2] % (64 if work == plan.DENSE else 128) == 0
                )
                assert chosen.kind != "boxes" or work == plan.DENSE
                assert work != plan.DENSE or chosen.kind in ("tiles", "boxes")
                assert not work.endswith("block") or chosen.kind != "tiles" or chosen.tile[1:] <= (128, 128)
                assert chosen.kind != "native" or arch == "gfx950"


def test_the_owners_plans_stand_before_the_committed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = plan.Plan("boxes", (128, 64, 64), 8, 3, split=2)
    (tmp_path / "gemm-sm_90.json").write_text(json.dumps({plan.DENSE: [plan.entry(own)]}))
    monkeypatch.setenv("OCTAVO_TABLES", str(tmp_path))
    plan.reload()
    try:
        assert plan.choose("sm_90", plan.DENSE, 5) == own
        assert plan.choose("sm_90", "mxfp8", 5) == plan.tables()["sm_90"]["mxfp8"][0]
        assert plan.choose("gfx950", plan.DENSE, 5) == plan.tables()["gfx950"][plan.DENSE][0]
    finally:
        monkeypatch.undo()
        plan.reload()


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([{"up_to": 4}], "ordered by up_to"),
        ([{"up_to": 8}, {"up_to": 4}, {}], "ordered by up_to"),
        ([{"kind": "magic"}], "'magic' is none of tiles"),
    ],
)
def test_a_broken_table_is_named(lines: list, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        plan._plans("plans.json: sm_90, mxfp8", lines)


def test_splits_cover_the_contraction() -> None:
    for k in (1, 128, 1000, 4096):
        for tiles in (1, 64, 1000):
            parts, each = plan.splits(plan.Plan(tile=(16, 64, 128), split=8), tiles, k, 132)
            assert (parts - 1) * each < -(-k // 128) <= parts * each
            assert parts == 1 or tiles * parts <= 264
