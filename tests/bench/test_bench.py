"""Suites, the runner and the results files, without timing anything."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from octavo.bench import cases, main, plot, published, report, timing
from octavo.bench.timing import Contender
from octavo.operators.rms_norm import plan as norm_plans
from octavo.operators.topk import plan as topk_plans


def _case(answer: float, **contenders: Contender) -> cases.Case:
    def check(inputs, result) -> None:
        assert torch.equal(result, inputs[0] * 2), "not doubled"

    return cases.Case(
        group="doubling",
        case="fp32 4",
        bytes=32,
        flops=0,
        make=lambda: (torch.ones(4),),
        contenders={
            "octavo": Contender(lambda x: x * answer),
            "aten": Contender(lambda x: x + x),
            **contenders,
        },
        check=check,
        taken=lambda inputs: True,
    )


@pytest.fixture
def _timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "copies", lambda size: 3)
    monkeypatch.setattr(
        timing, "replay_ms", lambda functions, sets, rounds: {n: float(len(sets)) for n in functions}
    )
    monkeypatch.setattr(timing, "events_ms", lambda functions, sets: dict.fromkeys(functions, 1.0))
    monkeypatch.setattr(main, "HOST_LIMIT_MS", 10.0)


@pytest.mark.usefixtures("_timed")
def test_a_case_is_checked_before_it_is_timed() -> None:
    with pytest.raises(AssertionError, match="not doubled"):
        main.run_case(_case(3.0), compile=False, host=False)
    entry = main.run_case(_case(2.0), compile=False, host=False)
    assert entry["ms"] == {"octavo": 3.0, "aten": 3.0}
    assert entry["checked"]
    assert entry["taken"]
    assert "host_us" not in entry


@pytest.mark.usefixtures("_timed")
def test_a_peer_that_cannot_run_is_skipped_with_its_reason() -> None:
    def broken(x):
        raise RuntimeError("rows of more than 64 KB\nand more")

    entry = main.run_case(_case(2.0, liger=Contender(broken)), compile=False, host=False)
    assert entry["skipped"] == {"liger": "rows of more than 64 KB"}
    assert set(entry["ms"]) == {"octavo", "aten"}


@pytest.mark.usefixtures("_timed")
def test_a_failing_case_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "cases", lambda suite, force: [_case(3.0), _case(2.0)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(report, "machine", lambda: {"gpu": "NVIDIA H200", "copy_gb_s": 4200})
    said = []
    with pytest.raises(
        RuntimeError, match="1 of 2 cases failed, the first is doubling fp32 4: AssertionError"
    ):
        main.run("topk", tmp_path, compile=False, host=False, progress=said.append)
    assert said[0].startswith("FAILED doubling")
    assert len(json.loads((tmp_path / "topk-h200.json").read_text())["cases"]) == 1


def test_results_file_and_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "versions", lambda: {"octavo": "0", "torch": "2.11", "peers": {}})
    entries = [
        {
            "group": "g",
            "case": f"c{i}",
            "ms": {"octavo": 0.01, "aten": 0.01 * r},
            "bytes": 21_000_000,
            "flops": 0,
            "taken": True,
        }
        for i, r in enumerate((2.0, 8.0))
    ]
    content = report.results(
        "topk", "octavo bench topk", "p", {"gpu": "NVIDIA H200", "copy_gb_s": 4200}, entries
    )
    path = report.write(content, tmp_path)
    assert path.name == "topk-h200.json"
    assert json.loads(path.read_text()) == content
    text = report.summary(content)
    assert "Geometric mean over aten: 4.00" in text
    assert "| c0 | yes | 10.0 us | 20.0 us | 50% | 2.00 |" in text


@pytest.mark.parametrize(
    ("gpu", "name"),
    [("NVIDIA H200", "h200"), ("AMD Instinct MI300X", "mi300x"), ("NVIDIA H100 80GB HBM3", "h100")],
)
def test_card_names(gpu: str, name: str) -> None:
    assert report.card_name(gpu) == name


def test_geomean() -> None:
    assert report.geomean([2.0, 8.0]) == pytest.approx(4.0)
    assert math.isnan(report.geomean([]))


def test_suites_hold_the_published_cases() -> None:
    topk = cases.cases("topk")
    norm = cases.cases("rmsnorm")
    count = lambda members, group: sum(case.group == group for case in members)  # noqa: E731
    assert count(topk, "published_small_k") == len(published.TOPK_SMALL_K) == 10
    assert count(topk, "published_radix") == len(published.TOPK_RADIX) == 23
    assert (
        count(norm, "published_forward") == count(norm, "published_backward") == len(published.RMS_NORM) == 22
    )
    for members in (topk, norm):
        names = [(case.group, case.case) for case in members]
        assert len(set(names)) == len(names)
        assert all(case.bytes > 0 for case in members)
    (row,) = [case for case in topk if case.case == "fp32 4096x4096 k=8"]
    assert row.bytes == 4096 * 4096 * 4 + 4096 * 8 * 12


def test_unknown_suite_is_named() -> None:
    known = ", ".join(sorted(cases.SUITES))
    with pytest.raises(ValueError, match=f"unknown suite 'sort'; choose from {known}"):
        cases.cases("sort")


def test_every_published_shape_has_a_topk_plan_that_covers_it() -> None:
    for m, n, k in (
        *published.TOPK_SMALL_K,
        *published.TOPK_RADIX,
        (1, 1, 1),
        (3, 257, 200),
        (1, 2**24, 2048),
    ):
        for itemsize in (2, 4):
            plan = topk_plans.choose(m, n, k, itemsize, 264)
            assert plan.kp >= k
            if isinstance(plan, topk_plans.ListPlan):
                assert plan.lanes * plan.kp * plan.blocks >= n
            elif isinstance(plan, topk_plans.ThresholdPlan):
                assert plan.chunk * plan.chunks >= n
                assert plan.chunks <= 32
                assert plan.cap >= plan.kp
                assert plan.chunk % plan.groups == 0
                assert plan.groups >= k
            else:
                assert plan.splits * plan.span >= n
                assert n - (plan.splits - 1) * plan.span >= k
                assert min(plan.groups, plan.cap) >= 2 * k


def test_no_shape_is_outside_the_plan_tables() -> None:
    sizes = sorted({2**e + d for e in range(21) for d in (-1, 0, 1) if 2**e + d > 0} & set(range(2**20 + 1)))
    for n in sizes:
        for m in (1, 64, 65, 512, 513, 2048, 2049, 10**6, 2**31):
            for itemsize in (2, 4):
                forward = norm_plans.choose_forward(m, n, itemsize, 264)
                if isinstance(forward, norm_plans.RowsPlan):
                    # A row's values stay in registers: 128 of 32 bits a thread at most.
                    assert forward.rows * forward.c * forward.chunks <= 128 * 32 * forward.num_warps
                assert not isinstance(norm_plans.choose_backward(m, n, itemsize, 264), norm_plans.LongPlan)
                for k in {1, min(n, 8), min(n, 32), min(n, 2048)}:
                    plan = topk_plans.choose(m, n, k, itemsize, 264)
                    if isinstance(plan, topk_plans.ThresholdPlan):
                        assert plan.chunk * plan.chunks <= 128 * 32 * plan.num_warps


def test_every_norm_shape_has_plans_that_cover_it() -> None:
    for _, m, n in (*published.RMS_NORM, ("", 1, 1), ("", 1, 2**20), ("", 65536, 128), ("", 5, 257)):
        for itemsize in (2, 4):
            for plan in (
                norm_plans.choose_forward(m, n, itemsize, 264),
                norm_plans.choose_backward(m, n, itemsize, 264),
            ):
                if isinstance(plan, norm_plans.RowsPlan):
                    assert plan.c * plan.chunks >= n
                    assert plan.c * (plan.chunks - 1) < n
                elif isinstance(plan, norm_plans.SplitPlan):
                    assert plan.splits * plan.span >= n
                    assert plan.span % plan.c == 0


@pytest.mark.parametrize("suite", ["quantize", "linear", "block"])
def test_dense_suites_name_their_cases_without_a_gpu(suite: str) -> None:
    members = cases.cases(suite)
    names = [(case.group, case.case) for case in members]
    assert names
    assert len(set(names)) == len(names)
    for case in members:
        assert case.bytes > 0
        assert {"octavo", "aten"} <= set(case.contenders)


def test_quantize_suite_counts_the_bytes_of_the_issue() -> None:
    found = {(case.group, case.case): case.bytes for case in cases.cases("quantize")}
    elements = 28672 * 4096
    wanted = {"row": 3, "1x128 both": 4, "column^T": 5, "tensorwise both": 6, "rowwise both": 6, "mxfp4": 2.5}
    for group, each in wanted.items():
        assert found[group, "bf16 28672x4096"] == each * elements
    assert ("mxfp4", "bf16 8191x4095") not in found


@pytest.mark.parametrize("name", ["row", "tensorwise both", "1x128^T", "mxfp8 both"])
def test_quantize_suite_checks_what_it_times(name: str) -> None:
    """Octavo's call and the plain steps agree, and a wrong code is found."""
    case = next(c for c in cases.cases("quantize") if c.group == name)
    x = torch.randn(64, 128).bfloat16()
    result = case.contenders["octavo"](x)
    case.check((x,), result)
    last = next(t for t in result if t is not None)
    last.view(torch.uint8)[0] ^= 1
    with pytest.raises(AssertionError, match=r"output [02]: .* differ"):
        case.check((x,), result)


@pytest.mark.usefixtures("_timed")
def test_compiled_contenders_are_left_out_on_request() -> None:
    case = _case(2.0, octavo_compile=Contender(lambda x: x * 2))
    assert "octavo_compile" not in main.run_case(case, compile=False, host=False)["ms"]
    assert "octavo_compile" in main.run_case(case, compile=True, host=False)["ms"]


def test_a_picture_of_the_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    entries = [
        {"group": "g", "case": "a", "ms": {"octavo": 1.0, "aten": 2.0, "torchao": 4.0}},
        {"group": "g", "case": "b", "ms": {"octavo": 1.0, "aten": 3.0}},
        {"group": "g", "case": "c", "ms": {"octavo": 1.0}},
    ]
    content = {
        "suite": "linear",
        "date": "2026-01-02T03",
        "machine": {"gpu": "NVIDIA H200"},
        "cases": entries,
    }
    labels, ratios = plot.bars(content)
    assert labels == ["g: a", "g: b"]
    assert ratios == {"octavo": [2.0, 3.0], "torchao": [0.5, 0.0]}
    path = plot.write(content, tmp_path / "linear.png")
    assert path is not None
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert plot.write({**content, "cases": []}, tmp_path / "none.png") is None
