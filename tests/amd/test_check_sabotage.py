"""Real kernels pass, and one wrong in each way is caught by name: compiled by Triton, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

tl = pytest.importorskip("triton.language")
import check_kernels as kernels  # noqa: E402

from octavo.check import budget, model, store  # noqa: E402
from octavo.check.checks import check  # noqa: E402
from octavo.check.compile import CompiledKernel  # noqa: E402
from octavo.check.expectations import ALWAYS, EXPECTATIONS, expect  # noqa: E402
from octavo.check.inspect import Code, Instruction, read_code  # noqa: E402
from octavo.check.report import CaseReport  # noqa: E402
from octavo.compile_cases import KINDS, CompileCase  # noqa: E402

pytestmark = pytest.mark.amd

SMALL = (64, 32, 64)  # 64 rows: Hopper has FP8 matrix instructions for warpgroups alone.
TRITON = ".".join(__import__("triton").__version__.split(".")[:2])
RELEASE = tuple(int(part) for part in TRITON.split("."))


@pytest.fixture(scope="module", autouse=True)
def _store(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(store.FOLDER_VARIABLE, str(tmp_path_factory.mktemp("compiled")))
        yield


def _report(case: CompileCase, target: str) -> CaseReport:
    kernel = store.compile_case(case, target)
    return check(case, target, kernel, TRITON, {TRITON: {case.name: budget.measure(kernel)}})


def _failures(case: CompileCase, target: str) -> str:
    return "\n".join(map(str, _report(case, target).failures))


def _right_cases() -> list[tuple[str, CompileCase]]:
    cases = []
    for target in ("gfx942", "gfx950", "sm_90"):
        cases += [(target, kernels.quantize_case(target)), (target, kernels.product_case(target, tile=SMALL))]
        cases += [(target, kernels.product_case(target, "product bf16", tile=SMALL))]
    cases += [
        ("gfx950", kernels.mx_case("gfx950")),
        ("gfx950", kernels.mx_case("gfx950", "e2m1", "product mxfp4")),
    ]
    return cases


@pytest.mark.parametrize(
    ("target", "case"), _right_cases(), ids=lambda v: v if isinstance(v, str) else v.name
)
def test_a_right_kernel_passes_and_its_occupancy_agrees_with_llvm(target: str, case: CompileCase) -> None:
    report = _report(case, target)
    assert not report.failures
    if not (target == "gfx950" and RELEASE < (3, 9)):
        assert not report.limits
    assert report.main_loop is not None
    assert report.main_loop.loop is not None
    assert bool(report.main_loop.flops) == case.kind.startswith("product")
    if target != "sm_90":
        kernel = store.compile_case(case, target)
        assert model.register_waves(kernel) == kernel.occupancy


def test_the_ocp_type_on_gfx942_is_caught() -> None:
    case = kernels.quantize_case("gfx942", tl.float8e4nv, 448.0)
    failures = _failures(case, "gfx942")
    assert "needed a hardware cast to fnuz FP8" in failures
    assert "needed no a software FP8 cast" in failures
    assert "needed no the literal 448.0" in failures


def test_a_fnuz_kernel_that_scales_to_448_is_caught() -> None:
    case = kernels.quantize_case("gfx942", limit=448.0)
    report = _report(case, "gfx942")
    assert [f.check for f in report.failures] == ["forbidden instruction"]
    assert "448.0" in str(report.failures[0])


@pytest.mark.parametrize("target", ["gfx950", "sm_90"])
def test_an_ocp_kernel_that_scales_to_240_is_caught(target: str) -> None:
    assert "needed no the literal 240.0" in _failures(kernels.quantize_case(target, limit=240.0), target)


@pytest.mark.skipif(RELEASE < (3, 9), reason="older Triton ends the process on fnuz types for gfx950")
@pytest.mark.parametrize("element", ["float8e4b8", "float8e5b16"])
def test_a_fnuz_type_on_gfx950_is_caught(element: str) -> None:
    failures = _failures(kernels.quantize_case("gfx950", getattr(tl, element), 192.0), "gfx950")
    assert "needed a hardware cast to OCP FP8" in failures
    assert "needed no a software FP8 cast" in failures


def test_e5m2_on_gfx942_is_caught() -> None:
    assert "needed a hardware cast" in _failures(
        kernels.quantize_case("gfx942", tl.float8e5, 57344.0), "gfx942"
    )


@pytest.mark.parametrize("target", ["gfx942", "gfx950", "sm_90"])
def test_an_fp8_product_that_multiplies_in_16_bits_is_caught(target: str) -> None:
    failures = _failures(kernels.product_case(target, decode=True, tile=SMALL), target)
    assert "needed no a matrix instruction of 16-bit operands" in failures
    assert "in the main loop" in failures


def test_rows_too_few_for_a_warpgroup_multiply_in_16_bits_on_hopper() -> None:
    case = kernels.product_case("sm_90", tile=(32, 32, 64))
    assert "needed no a matrix instruction of 16-bit operands" in _failures(case, "sm_90")


def test_ocp_operands_on_gfx942_are_caught() -> None:
    failures = _failures(kernels.product_case("gfx942", element=tl.float8e4nv, tile=SMALL), "gfx942")
    assert "needed v_mfma_f32_*_fp8_fp8 (or bf8) in the main loop" in failures
    assert "f16" in failures


def test_an_mx_product_without_scaled_matrix_instructions_is_caught() -> None:
    case = replace(kernels.product_case("gfx950", tile=SMALL), kind="product mxfp8")
    assert "needed v_mfma_scale_f32_*_f8f6f4" in _failures(case, "gfx950")
    fp8_as_fp4 = replace(kernels.mx_case("gfx950"), kind="product mxfp4")
    assert "with an FP4 operand" in _failures(fp8_as_fp4, "gfx950")


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_spills_are_caught(target: str) -> None:
    report = _report(kernels.spilling_case(target), target)
    assert {f.check for f in report.failures} == {"spills", "scratch"}


def test_lds_beyond_the_compute_unit_is_caught() -> None:
    case = replace(kernels.product_case("gfx942", "product bf16", tile=(64, 64, 128)), num_stages=4)
    failures = _failures(case, "gfx942")
    assert "LDS: found" in failures
    assert "needed at most 65536" in failures


@pytest.mark.parametrize(
    ("resource", "by", "bound"),
    [("registers", -8, "at most"), ("lds_bytes", -1, "at most"), ("occupancy", 1, "at least")],
)
def test_a_budget_overrun_is_caught(resource: str, by: int, bound: str) -> None:
    case = kernels.product_case("gfx942", tile=SMALL)
    kernel = store.compile_case(case, "gfx942")
    tight = budget.measure(kernel)
    tight[resource] += by
    report = check(case, "gfx942", kernel, TRITON, {TRITON: {case.name: tight}})
    assert [f.check for f in report.failures] == [f"budget of {resource}"]
    assert bound in str(report.failures[0])


def test_a_case_without_a_budget_fails_and_a_release_without_any_is_a_limit() -> None:
    case = kernels.quantize_case("gfx942")
    kernel = store.compile_case(case, "gfx942")
    assert [f.check for f in check(case, "gfx942", kernel, TRITON, {TRITON: {}}).failures] == ["budget"]
    other = check(case, "gfx942", kernel, TRITON, {"3.5": {}})
    assert other.ok
    assert [f.check for f in other.limits] == ["budget"]


def test_software_casts_on_gfx950_are_a_known_limit_of_old_triton_alone() -> None:
    code = _code(store.compile_case(kernels.quantize_case("gfx942", tl.float8e4nv, 448.0), "gfx942"))
    old = expect(code, "quantize fp8", "gfx950", (3, 6))
    assert [f.status for f in old if f.status != "pass"] == ["limit", "limit"]
    assert "Triton before 3.9" in str(old[0])
    new = expect(code, "quantize fp8", "gfx950", (3, 9))
    assert [f.status for f in new if f.status != "pass"] == ["fail", "fail"]


def test_the_mis_executed_packed_fma_is_caught_on_gfx950_alone() -> None:
    def status(operands: str, target: str) -> set[str]:
        found = (Instruction("v_pk_fma_f32", operands),)
        return {f.status for f in expect(Code(found, (), found, None), "general", target, (3, 9))}

    bad = "v[0:1], v[2:3], v[4:5], v[0:1] op_sel:[0,1,0]"
    assert status(bad, "gfx950") == {"fail"}
    assert status(bad, "gfx942") == set()
    assert status("v[0:1], v[2:3], v[4:5], v[0:1] op_sel_hi:[0,1,0]", "gfx950") == {"pass"}


def test_a_kind_that_a_target_lacks_fails_with_those_it_has() -> None:
    report = check(
        replace(kernels.product_case("gfx942", tile=SMALL), kind="product mxfp8"), "gfx942",
        store.compile_case(kernels.product_case("gfx942", tile=SMALL), "gfx942"), TRITON, {},
    )  # fmt: skip
    assert "kind 'product mxfp8'" in str(report.failures[0])
    assert "product fp8" in str(report.failures[0])


def test_every_kind_has_expectations_somewhere_and_no_unknown_kind_does() -> None:
    listed = {kind for kinds in EXPECTATIONS.values() for kind in kinds}
    assert listed == set(KINDS)
    assert set(ALWAYS) == set(EXPECTATIONS)
    with pytest.raises(ValueError, match="kind 'quantise' is none of"):
        replace(kernels.quantize_case("gfx942"), kind="quantise")


def _code(kernel: CompiledKernel) -> Code:
    return read_code(kernel.asm, kernel.name)
