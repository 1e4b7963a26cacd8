"""Boxes of products from results of their suites: rows, neighbours, what a loss takes away, and who reads them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import hardware
from octavo.bench import cases, gemm_wins, wins_table
from octavo.operators import wins
from octavo.operators.gemm import mixed


def _case(case: str, ratio: float, group: str = "published", **more: float) -> dict[str, Any]:
    ms = {"octavo": 1.0, "aten": ratio, **more}
    return {"group": group, "case": case, "ms": ms, "checked": True, "taken": True}


def _content(suite: str, *entries: dict[str, Any]) -> dict[str, Any]:
    machine = {"gpu": "NVIDIA H200", "architecture": "sm_90"}
    return {"suite": suite, "date": "2026-01-02", "machine": machine, "cases": list(entries)}


def _boxes(suite: str, *entries: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return gemm_wins.boxes([_content(suite, *entries)], wins_table.is_win)


def _line(n: int, k: int, ratios: dict[int, float]) -> list[dict[str, Any]]:
    return [_case(f"bf16 M={m} N={n} K={k}", ratio) for m, ratio in ratios.items()]


def test_neighbouring_rows_that_won_make_a_box_and_large_ones_have_no_end() -> None:
    found = _boxes("gemm", *_line(4096, 4096, {1: 2.0, 16: 2.0, 64: 0.9, 256: 1.5, 1024: 1.01, 4096: 1.5}))
    rows = [box["m"] for box in found["mm"]]
    assert rows == [[1, 16], [256, 256], [4096, gemm_wins.UNLIMITED]]
    # A few rows are no sign of many.
    assert _boxes("gemm", *_line(4096, 4096, {1: 2.0, 16: 2.0}))["mm"][0]["m"] == [1, 16]


def test_two_lines_speak_for_what_lies_between_unless_it_lost() -> None:
    both = [*_line(4096, 4096, {1: 2.0, 64: 2.0}), *_line(8192, 8192, {16: 2.0, 64: 2.0, 256: 2.0})]
    between = {"dtype": ["bfloat16"], "m": [16, 64], "n": [4096, 8192], "k": [4096, 8192]}
    assert between in _boxes("gemm", *both)["mm"]
    lost = _boxes("gemm", *both, *_line(6144, 4096, {16: 0.5}))["mm"]
    assert between not in lost
    assert len(lost) == 2
    far = [*_line(1024, 4096, {64: 2.0}), *_line(8192, 4096, {64: 2.0})]
    assert len(_boxes("gemm", *far)["mm"]) == 2


def test_no_box_holds_a_measured_loss() -> None:
    sizes = itertools.product((1024, 2048, 4096), (2048, 4096), (1, 16, 256, 4096))
    entries = [
        _case(f"bf16 M={m} N={n} K={k}", 2.0 if (i * 7) % 5 else 0.5) for i, (n, k, m) in enumerate(sizes)
    ]
    lost = [gemm_wins.point("gemm", entry) for entry in entries if entry["ms"]["aten"] < 1]
    found = _boxes("gemm", *entries)["mm"]
    assert lost
    assert found
    assert not any(gemm_wins.holds(box, place, place) for box, place in itertools.product(found, lost))


def test_a_product_that_is_no_faster_than_decoding_first_is_not_taken() -> None:
    case = "M=16 N=4096 K=4096"
    assert _boxes("mx", _case(case, 9.0, "bf16_x_mxfp4", decode_first=2.0))["mixed_mm"]
    assert not _boxes("mx", _case(case, 9.0, "bf16_x_mxfp4", decode_first=1.0))["mixed_mm"]
    # The plain BF16 product is another work: a loss to it takes nothing away.
    assert _boxes("mx", _case(case, 9.0, "mxfp4", bf16=0.5))["scaled_mm"]


def test_skewed_and_even_groups_of_one_size_must_both_win() -> None:
    even, skewed = "rows 8x512 K=4096 N=4096", "rows 1024,512,256,128,2048,64,63,1 K=4096 N=4096"
    assert gemm_wins.point("grouped-bf16", _case(even, 1)) == gemm_wins.point(
        "grouped-bf16", _case(skewed, 1)
    )
    box = {
        "form": ["rows"], "dtype": ["bfloat16"], "m": [4096, gemm_wins.UNLIMITED],
        "n": [4096, 4096], "k": [4096, 4096], "groups": [8, 8],
    }  # fmt: skip
    assert _boxes("grouped-bf16", _case(even, 2.0)) == {"grouped_mm": [box]}
    assert _boxes("grouped-bf16", _case(even, 2.0), _case(skewed, 0.9)) == {"grouped_mm": []}


@pytest.mark.parametrize("suite", gemm_wins.SUITES)
def test_the_names_of_every_case_are_read(suite: str) -> None:
    for case in cases.cases(suite):
        place = gemm_wins.point(suite, {"group": case.group, "case": case.case})
        assert place.operator in gemm_wins.OPERATORS[suite]
        assert case.flops == 2 * place.m * place.n * place.k
    with pytest.raises(ValueError, match="is no case of the suite"):
        gemm_wins.point(suite, {"group": "routers", "case": "fp32 8x8 k=2"})


def _table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *contents: dict[str, Any]) -> None:
    for i, content in enumerate(contents):
        (tmp_path / f"{content['suite']}-{i}.json").write_text(json.dumps(content))
    monkeypatch.setenv("OCTAVO_WINS", str(tmp_path / "own"))
    wins_table.write(tmp_path, tmp_path / "own")
    monkeypatch.setattr(hardware, "architecture", lambda device: "sm_90")
    wins.reload()


def test_the_operators_read_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.operators.gemm import dense, fp8, grouped

    grouped_name = "rows 4x16 K=64 N=48"
    _table(
        tmp_path, monkeypatch, _content("gemm", _case("bf16 M=16 N=48 K=64", 2.0)),
        _content("scaled", _case("e4m3 M=16 N=48 K=64", 2.0, "rowwise_fast")),
        _content("grouped-bf16", _case(grouped_name, 2.0, "uniform")),
        _content("grouped-fp8", _case(grouped_name, 2.0, "uniform_fast")),
        _content("mx", _case("M=16 N=48 K=64", 2.0, "bf16_x_mxfp8")),
        # What is no result of a suite lies beside them.
        {"suite": "gemm-notes"},
    )  # fmt: skip
    x, w = torch.empty(16, 64, dtype=torch.bfloat16), torch.empty(4, 48, 64, dtype=torch.bfloat16)
    offs = torch.tensor([16, 32, 48, 64], dtype=torch.int32)
    many = torch.empty(64, 64, dtype=torch.bfloat16)
    try:
        assert dense.measured_mm(x, w[0].t()) is None
        assert dense.measured_addmm(x[0], x, w[0].t()) is None
        assert dense.measured_mm(x[:8], w[0].t()) == wins.NOT_A_WIN
        assert fp8.measured(x, w[0].t(), ("rowwise", "rowwise"), True) is None
        assert fp8.measured(x, w[0].t(), ("rowwise", "rowwise"), False) == wins.NOT_A_WIN
        assert grouped.measured_grouped(many, w.mT, offs) is None
        assert grouped.measured_grouped(many, w[:3].mT, offs[:3]) == wins.NOT_A_WIN
        eight, narrow = many.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
        assert grouped.measured_scaled(eight, narrow.mT, x, x, offs, use_fast_accum=True) is None
        assert grouped.measured_scaled(eight, narrow.mT, x, x, offs) == wins.NOT_A_WIN
        assert wins.is_won_anywhere("mm")
    finally:
        wins.reload()


def test_narrow_weights_are_decoded_first_where_the_kernel_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo import quantize
    from octavo.formats import MXFP8

    weight = quantize(torch.randn(48, 64), MXFP8)
    x = torch.empty(16, 64, dtype=torch.bfloat16)
    try:
        assert mixed.measured(x, weight) is None, "nothing names mixed_mm: the plan decides"
        _table(tmp_path, monkeypatch, _content("mx", _case("M=16 N=48 K=64", 2.0, "bf16_x_mxfp8")))
        assert mixed.measured(x, weight) is None
        assert mixed.measured(x[:1], weight) == wins.NOT_A_WIN
    finally:
        wins.reload()
