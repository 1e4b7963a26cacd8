"""The suites of experts: what they name, and their calls and checks on small sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo import formats, quantize, quantize_grouped
from octavo.bench import (
    cases,
    experts_suite,
    grouped_suite,
    grouped_tuning,
    moe_layer_suite,
    published,
    routings,
    stock_moe,
)
from octavo.bench.cases import Case
from octavo.matmul import candidates as product_candidates
from octavo.matmul import launch_tables, reference
from octavo.quantize import alignment, grouped
from octavo.quantize import candidates as quantize_candidates

SUITES = {"grouped": grouped_suite, "experts": experts_suite, "moe-layer": moe_layer_suite}
SMALL = {
    "DeepSeek-MoE-16B": (1536, 64, 32, 32),
    "DeepSeek-V3 EP8": (640, 96, 64, 4),
    "DeepSeek-V3 EP32": (512, 96, 64, 8),
    "Llama4 16E": (512, 64, 96, 8),
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suites of a few hundred rows on the CPU."""
    monkeypatch.setattr(routings, "DEVICE", "cpu")
    monkeypatch.setattr(published, "EXPERTS", SMALL)
    layers = {
        name: (64, 64, replace(mixture, ffn_dim=32, experts=16, active=min(4, mixture.active)))
        for name, (_, _, mixture) in moe_layer_suite.LAYERS.items()
    }
    monkeypatch.setattr(moe_layer_suite, "LAYERS", layers)
    monkeypatch.setattr(moe_layer_suite, "_layer", moe_layer_suite._layer.__wrapped__)


def of_group(found: list[Case]) -> list[Case]:
    """The first even, and the first uneven, case of each group."""
    picked: dict[tuple[str, str, str], Case] = {}
    for case in found:
        kind = next((w for w in ("output", "grad_input", "grad_weight") if w in case.case), "")
        uneven = "" if "uniform" in case.case or "even" in case.case else "uneven"
        picked.setdefault((case.group, kind, uneven), case)
    return list(picked.values())


@pytest.mark.parametrize("routing", routings.ROUTINGS)
@pytest.mark.parametrize("shape", published.EXPERTS.values(), ids=published.EXPERTS)
def test_sizes_of_experts_add_up(routing: str, shape: tuple[int, int, int, int]) -> None:
    rows, _, _, experts = shape
    found = routings.sizes(routing, rows, experts)
    assert len(found) == experts
    assert min(found) >= 0
    assert sum(found) == (rows - routings.TAIL if routing == "ragged" else rows)
    assert stock_moe.fits(found) == (routing != "ragged")
    assert (0 in found) == (routing == "empty")
    if routing == "skewed":
        assert max(found) > 2 * rows / experts
        assert found == routings.sizes(routing, rows, experts)


def test_an_unknown_routing_is_named() -> None:
    with pytest.raises(ValueError, match="unknown routing 'flat'; choose from uniform, skewed"):
        routings.sizes("flat", 64, 4)


def test_choices_of_a_router_have_the_sizes_and_no_expert_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routings, "DEVICE", "cpu")
    sizes = (10, 3, 0, 8, 9)
    found = routings.indices(sizes, 16, 2)
    assert found.shape == (16, 2)
    assert tuple((found == e).sum() for e in range(5)) == sizes
    assert (found == -1).sum() == 2
    assert not (found[:, 0] == found[:, 1]).logical_and(found[:, 0] >= 0).any()
    with pytest.raises(ValueError, match="no choices of 2 experts"):
        routings.indices((17, 1), 16, 2)


def test_plain_steps_make_the_codes_of_a_recipe() -> None:
    """What stands for PyTorch in the suites is no strawman: the same numbers as ours."""
    row = formats.Format(formats.E4M3FN, "rowwise", "power_of_two")
    x = torch.randn(96, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    offs = torch.tensor([32, 32, 80, 96], dtype=torch.int32)
    data, scale = stock_moe.quantize_columns(x, offs)
    ours = quantize_grouped(x, offs, row, transpose=True)
    assert torch.equal(data.float(), ours.data[:, :96].float())
    assert torch.equal(scale, ours.scale.flatten())
    data, scale = stock_moe.quantize_rows(x)
    assert torch.equal(data.float(), quantize(x, row).data.float())


@pytest.mark.parametrize("suite", SUITES)
def test_suites_of_experts_name_their_cases_without_a_gpu(suite: str) -> None:
    found = cases.cases(suite)
    names = [(case.group, case.case) for case in found]
    assert len(set(names)) == len(names)
    assert names == [(case.group, case.case) for case in SUITES[suite].small_cases()]
    for case in found:
        assert case.bytes > 0
        assert {"octavo", "aten"} <= set(case.contenders)
    assert json.dumps(names)


def test_flops_are_those_of_the_issue() -> None:
    (case,) = [
        c for c in cases.cases("grouped")
        if (c.group, c.case) == ("product, rowwise, fast", "DeepSeek-V3 EP8 uniform output")
    ]  # fmt: skip
    assert case.flops == 2 * 65536 * 7168 * 2048
    (case,) = [c for c in cases.cases("experts") if c.case.startswith("DeepSeek-V3 EP8 uniform")][:1]
    assert case.flops == 18 * 65536 * 7168 * 2048


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("suite", SUITES)
def test_every_kind_of_case_runs_and_passes_its_check(suite: str) -> None:
    torch.manual_seed(0)
    for case in of_group(SUITES[suite].cases()):
        inputs = case.make()
        case.check(inputs, case.contenders["octavo"](*inputs))
        if "octavo_cached" in case.contenders:
            for a, b in zip(
                case.contenders["octavo_cached"](*inputs), case.contenders["octavo"](*inputs), strict=True
            ):
                assert torch.equal(a, b), case.case


def _spoiled(result: Any, amount: float) -> Any:
    first = result if isinstance(result, torch.Tensor) else result[0]
    first = first.float() + amount * first.float().abs().max() if first.dtype.is_floating_point else first
    return first if isinstance(result, torch.Tensor) else (first, *result[1:])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("suite", SUITES)
def test_a_wrong_result_is_found(suite: str) -> None:
    for case in of_group(SUITES[suite].cases()):
        inputs = case.make()
        with pytest.raises(AssertionError):
            case.check(inputs, _spoiled(case.contenders["octavo"](*inputs), 0.5))


@pytest.mark.usefixtures("small")
def test_a_case_holds_no_inputs() -> None:
    """A suite's list of cases lives as long as the run: what a case made must not live with it."""
    import gc
    import weakref

    for case in (grouped_suite.cases()[0], experts_suite.cases()[0]):
        inputs = case.make()
        case.contenders["octavo"](*inputs)
        if "octavo_cached" in case.contenders:
            case.contenders["octavo_cached"](*inputs)
        watched = [weakref.ref(t) for t in inputs]
        del inputs
        gc.collect()
        assert [w() for w in watched] == [None] * len(watched)


@pytest.mark.parametrize("suite", SUITES)
def test_small_cases_have_inputs(suite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sizes fit each other, at the widths of the published models."""
    monkeypatch.setattr(routings, "DEVICE", "meta")
    monkeypatch.setattr(routings, "ends", lambda sizes: torch.tensor(sizes))
    monkeypatch.setattr(routings, "indices", lambda *arguments: checked(*arguments))

    def checked(sizes: tuple[int, ...], tokens: int, choices: int) -> torch.Tensor:
        assert sum(sizes) == tokens * choices
        assert max(sizes) <= tokens
        return torch.empty(tokens, choices, device="meta")

    for case in SUITES[suite].cases() + SUITES[suite].small_cases():
        if not case.group.startswith("product, "):
            case.make()


@pytest.mark.usefixtures("small")
def test_spaces_of_experts_know_what_is_wrong() -> None:
    """Inputs of every space, the reference's result on them, and one that is not."""
    found = list(grouped_tuning.spaces())
    assert {space.name for space in found} == set(product_candidates.GROUPED) | set(
        quantize_candidates.GROUPED
    )
    for space in found:
        assert space.candidates
        inputs = space.make()[0]
        if space.room == "matmul":
            a, b, offs = inputs
            right = reference.scaled_grouped_mm(a, b, offs, None, torch.bfloat16, False)
            wrong = right.roll(1, -1)
        else:
            fmt = grouped_tuning.GROUPS[space.name]
            right = grouped.quantize_groups(inputs[0], inputs[1], fmt, True, alignment(fmt))
            wrong = right[0].view(torch.uint8).roll(1, -1).view(right[0].dtype), right[1]
        assert space.wrong(inputs, right) is None, space.name
        assert space.wrong(inputs, wrong) is not None, space.name


@pytest.mark.parametrize("arch", ["sm_90", "gfx942", "gfx950"])
def test_candidates_of_experts_belong_to_the_tables(arch: str) -> None:
    products = launch_tables.load(arch).products
    for name, configs in product_candidates.GROUPED.items():
        assert any(name.replace(word, "") in products for word in ("", "fast ")), name
        assert all(isinstance(launch_tables.entry(config)["tile"], list) for config in configs)
