"""Launches recorded without a GPU are those that a GPU would get."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from octavo import hardware  # noqa: E402
from octavo.check import catalog, rooms  # noqa: E402
from octavo.check.launches import recording, specialize  # noqa: E402

pytestmark = [
    pytest.mark.amd,
    pytest.mark.skipif(hardware.interpreted(), reason="the interpreter launches nothing"),
]


@triton.jit(do_not_specialize=("tokens",), do_not_specialize_on_alignment=("loose",))
def kernel(
    x, y, none, n, one, odd, tokens, loose, wide, flag, eps, BLOCK: tl.constexpr, KIND: tl.constexpr = "a"
):
    pass


def _arguments() -> tuple[object, ...]:
    x = torch.zeros(64, dtype=torch.bfloat16)
    return (x, x[1:], None, 4096, 1, 7, 1, 32, 2**40, True, 1e-6)


def test_a_launch_is_specialized_as_triton_does() -> None:
    launch = specialize(
        kernel, _arguments(), {"BLOCK": 128, "num_warps": 8, "num_stages": 3, "waves_per_eu": 2}
    )
    assert launch.signature == {
        "x": "*bf16", "y": "*bf16", "n": "i32", "odd": "i32", "tokens": "i32", "loose": "i32", "wide": "i64",
        "flag": "i1", "eps": "fp32",
    }  # fmt: skip
    assert launch.constexprs == {"none": None, "one": 1, "BLOCK": 128, "KIND": "a"}
    assert launch.divisible == ("x", "n", "wide")
    case = launch.case("words", "tests", "general")
    assert (case.name, case.num_warps, case.num_stages) == ("kernel [words]", 8, 3)
    assert case.options == {"waves_per_eu": 2}


def test_triton_agrees_on_types_constants_and_alignment() -> None:
    """Triton's own argument binder, which launches use, given the same arguments."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget("hip", "gfx942", 64))
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    _, specialization, _ = binder(*_arguments(), BLOCK=128)
    found = {p.name: (kind, value) for p, (kind, value) in zip(kernel.params, specialization, strict=True)}
    launch = specialize(kernel, _arguments(), {"BLOCK": 128})
    for name, (kind, value) in found.items():
        if name in launch.constexprs:
            assert kind == "constexpr", name
        else:
            assert launch.signature[name] == kind.replace("u1", "i1"), name
            assert ("D" in str(value)) == (name in launch.divisible), name


def test_recording_notes_launches_for_the_target_and_puts_everything_back() -> None:
    run, architecture = triton.runtime.jit.JITFunction.run, hardware.architecture
    with recording("gfx950") as launches:
        assert hardware.architecture("cpu") == "gfx950"
        kernel[(4,)](*_arguments(), BLOCK=64)
    assert [launch.constexprs["BLOCK"] for launch in launches] == [64]
    assert (triton.runtime.jit.JITFunction.run, hardware.architecture) == (run, architecture)


def test_a_tensor_descriptor_is_typed_by_its_element_and_box() -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    arguments = list(_arguments())
    arguments[0] = TensorDescriptor.from_tensor(torch.zeros(64, 256, dtype=torch.bfloat16), [16, 64])
    launch = specialize(kernel, tuple(arguments), {"BLOCK": 128})
    assert launch.signature["x"] == "tensordesc<bf16[16, 64]>"
    assert "x" not in launch.divisible


def test_an_argument_that_no_kernel_takes_is_an_error() -> None:
    arguments = list(_arguments())
    arguments[3] = "4096"
    with pytest.raises(TypeError, match="'n' was given a str"):
        specialize(kernel, tuple(arguments), {"BLOCK": 128})


@pytest.mark.parametrize("target", ["gfx942", "gfx950", "sm_90"])
def test_recorded_cases_are_distinct_and_come_out_the_same_twice(target: str) -> None:
    cases = rooms.compile_cases(target)
    assert len({case.name for case in cases}) == len(cases)
    assert [case.name for case in rooms.compile_cases(target)] == [case.name for case in cases]
    native = "e4m3fnuz" if target == "gfx942" else "e4m3fn"
    elements = {
        c.constexprs.get("ELEMENT") for c in cases if c.kind == "quantize fp8" and c.kernel == "quantize_rows"
    }
    assert elements <= {native}


def test_a_kernel_with_cases_of_its_own_is_not_recorded() -> None:
    entries = catalog.entries("gfx942")
    own = {(e.case.kernel, e.case.room) for e in entries if e.module != catalog.RECORDED}
    recorded = {(e.case.kernel, e.case.room) for e in entries if e.module == catalog.RECORDED}
    assert own
    assert not own & recorded
    assert ("scaled_mm_tiles", "gemm") in recorded, "another room's configurations of a kernel are recorded"
