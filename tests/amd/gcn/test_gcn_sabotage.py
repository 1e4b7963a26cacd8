"""Each way of breaking a correct kernel that was named must be caught, by results or by a reported race."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from gcn_helpers import both_targets

triton = pytest.importorskip("triton", reason="compiling kernels needs Triton")

import gcn_triton_kernels as kernels  # noqa: E402
from test_gcn_kernels import (  # noqa: E402
    BF16,
    FP8,
    MX,
    ScaledProduct,
    compile_quantize,
    product_error,
    reference_rows,
    rows_with_ties,
    run,
)

from octavo.check.compile import compile_kernel  # noqa: E402
from octavo.check.gcn import lanes, launch, mfma  # noqa: E402

pytestmark = pytest.mark.amd
GOOD = 2.0**-22


def without_line(code: Any, pattern: str, which: int) -> Any | None:
    """The kernel without the `which`-th line that matches; None when there are fewer."""
    lines = code.asm.split("\n")
    found = [i for i, line in enumerate(lines) if re.match(pattern, line)]
    if which >= len(found):
        return None
    del lines[found[which]]
    return dataclasses.replace(code, asm="\n".join(lines))


def compile_product(target: str, stages: int) -> tuple[Any, list[Any]]:
    types = {"a": "*bf16", "b": "*bf16", "c": "*fp32"} | dict.fromkeys(
        ("M", "N", "K", "stride_an", "stride_bn"), "i32"
    )
    constants = {"BM": 64, "BN": 64, "BK": 64, "stride_ak": 1, "stride_bk": 1}
    code = compile_kernel(kernels.matmul, target, types, constants, divisible=list(types), num_stages=stages)
    a, b = np.random.default_rng(0).standard_normal((2, 64, 256)).astype(BF16)
    return code, [a, b, np.zeros((64, 64), np.float32), 64, 64, 256, 256, 256]


def quantize_case(target: str) -> tuple[Any, list[Any]]:
    name, dtype, largest = FP8[target]
    x = rows_with_ties(dtype, largest, np.random.default_rng(1), 8, BF16)
    return compile_quantize(target, "bf16", name, largest), [
        x,
        np.zeros(x.shape, dtype),
        np.zeros(8, np.float32),
        1024,
    ]


CASES = {
    "quantize": (quantize_case, (8,)),
    "product, 2 stages": (lambda target: compile_product(target, 2), (1, 1)),
    "product, 3 stages": (lambda target: compile_product(target, 3), (1, 1)),
}


@both_targets
@pytest.mark.parametrize("case", CASES)
def test_dropped_waits_are_reported(target: str, case: str) -> None:
    """Every s_waitcnt, one at a time. Compilers place a few that another one on every path makes redundant (after the
    argument preload, before a barrier, in the last pipeline stage); dropping those changes nothing."""
    make, grid = CASES[case]
    code, args = make(target)
    assert not launch(code, grid, args).races
    caught, missed, which = 0, [], 0
    while (broken := without_line(code, r"\ts_waitcnt", which)) is not None:
        if launch(broken, grid, args).races:
            caught += 1
        else:
            missed.append(which)
        which += 1
    assert caught >= 3
    assert len(missed) <= which // 6, f"{caught} of {which} caught, not {missed}"


@both_targets
@pytest.mark.parametrize("case", CASES)
def test_dropped_barriers_are_reported(target: str, case: str) -> None:
    make, grid = CASES[case]
    code, args = make(target)
    results: list[set[str]] = []
    while (broken := without_line(code, r"\ts_barrier", len(results))) is not None:
        results.append({r.kind for r in launch(broken, grid, args).races})
    caught = results.count({"lds"})
    # Some barriers of a software pipeline order nothing that their neighbours do not order already.
    assert caught >= 1
    assert results.count(set()) == len(results) - caught <= len(results) // 2


@pytest.mark.parametrize("fmt", MX)
def test_swapped_scale_bytes_change_the_product(fmt: str) -> None:
    """op_sel and op_sel_hi exchanged in the text: byte 1 becomes byte 2."""
    product = ScaledProduct(fmt)
    lists = re.compile(r"(v_mfma_scale.*?) op_sel:\[(\d),(\d),0\] op_sel_hi:\[(\d),(\d),0\]")
    edited, count = lists.subn(r"\1 op_sel:[\4,\5,0] op_sel_hi:[\2,\3,0]", product.code.asm)
    assert count > 0
    assert product.error() < GOOD
    assert product.error(dataclasses.replace(product.code, asm=edited)) > 0.01


def test_wrong_scale_byte_in_the_table_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    product = ScaledProduct("e4m3")
    monkeypatch.setattr(mfma, "scale_byte", lambda op_sel, op_sel_hi: 0)
    assert product.error() > 0.01


@both_targets
def test_result_lane_map_off_by_one(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, args = compile_product(target, 2)
    run(code, (1, 1), *args)
    assert product_error(args[2], args[0], args[1]) < GOOD
    right = mfma.result_layout
    monkeypatch.setattr(mfma, "result_layout", lambda size: tuple(np.roll(x, 1, axis=1) for x in right(size)))
    run(code, (1, 1), *args)
    assert product_error(args[2], args[0], args[1]) > 0.01


@both_targets
def test_reduction_lane_map_off_by_one(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, (x, q, scale, n) = quantize_case(target)
    right = lanes.DPP_SOURCES["row_shr"]
    monkeypatch.setitem(lanes.DPP_SOURCES, "row_shr", lambda amount: right(amount + 1))
    run(code, (8,), x, q, scale, n)
    _, dtype, largest = FP8[target]
    want, want_scale = reference_rows(x, dtype, largest)
    assert (scale != want_scale).any()
    assert (q.view(np.uint8) != want.view(np.uint8)).any()


def test_448_on_gfx942() -> None:
    """The OCP maximum with the fnuz format: everything above 240 collapses, which the reference must show."""
    name, dtype, largest = FP8["gfx942"]
    x = rows_with_ties(dtype, largest, np.random.default_rng(2), 8, BF16)
    q, scale = np.zeros(x.shape, dtype), np.zeros(8, np.float32)
    run(compile_quantize("gfx942", "bf16", name, 448.0), (8,), x, q, scale, 1024)
    want, want_scale = reference_rows(x, dtype, largest)
    assert (q.view(np.uint8) != want.view(np.uint8)).mean() > 0.3
    assert (scale != want_scale).any()
    decoded = q.astype(np.float32) * scale[:, None]
    worst = np.abs(decoded - x.astype(np.float32)).max(1) / np.maximum(
        np.abs(x.astype(np.float32)).max(1), 1e-30
    )
    assert worst.max() > 0.4  # the row's largest value comes back as 240/448 of itself
