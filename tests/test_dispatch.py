"""Dispatch: order, reasons, forcing, laziness."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from octavo import dispatch, quantize, scaled_mm
from octavo.dispatch import Kernel, Verdict, explain, register, select, use_kernels
from octavo.formats import E4M3FN, MXFP8, Format


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> str:
    """An op of two kernels, best first: ``small`` serves numbers under 10, ``any`` serves all but negatives."""
    monkeypatch.setattr(dispatch, "_KERNELS", dict(dispatch._KERNELS))
    register(
        Kernel("count", "small", "builtins:float", lambda n: None if n < 10 else f"{n} is not under 10"),
        Kernel("count", "any", "builtins:str", lambda n: None if n >= 0 else "negative"),
    )
    return "count"


def test_first_kernel_that_serves_is_chosen(op: str) -> None:
    assert select(op, 3).name == "small"
    assert select(op, 30).name == "any"
    assert dispatch.run(op, 3) == 3.0
    assert dispatch.run(op, 30) == "30"


def test_explain_gives_every_reason_and_one_choice(op: str) -> None:
    assert explain(op, 30) == [Verdict("small", "30 is not under 10", False), Verdict("any", None, True)]
    assert explain(op, 3) == [Verdict("small", None, True), Verdict("any", None, False)]


def test_forced_kernel_is_used_and_the_others_say_why_not(op: str) -> None:
    with use_kernels(count="any"):
        assert select(op, 3).name == "any"
        assert explain(op, 3) == [
            Verdict("small", "use_kernels allows only 'any'", False),
            Verdict("any", None, True),
        ]
    assert select(op, 3).name == "small"


def test_forced_kernel_that_cannot_serve_is_an_error_with_reasons(op: str) -> None:
    with use_kernels(count="small"), pytest.raises(NotImplementedError) as error:
        select(op, 30)
    assert "'count'" in str(error.value)
    assert "30 is not under 10" in str(error.value)
    assert "use_kernels allows only 'small'" in str(error.value)


def test_forcing_nests_and_ends_with_an_error(op: str) -> None:
    with use_kernels(count="small"):
        with pytest.raises(RuntimeError, match="boom"), use_kernels(count="any"):
            raise RuntimeError("boom")
        assert select(op, 3).name == "small"
        with use_kernels(count="any"):
            assert select(op, 3).name == "any"
        assert select(op, 3).name == "small"


def test_forcing_reaches_other_threads(op: str) -> None:
    seen: list[str] = []
    with use_kernels(count="any"):
        thread = threading.Thread(target=lambda: seen.append(select(op, 3).name))
        thread.start()
        thread.join()
    assert seen == ["any"]


def test_unknown_names_are_explained(op: str) -> None:
    with (
        pytest.raises(ValueError, match=r"op 'count' has no kernel 'best'; it has small, any"),
        use_kernels(count="best"),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"unknown op 'nothing'; known ops: .*count.*scaled_mm"),
        use_kernels(nothing="a"),
    ):
        pass
    with pytest.raises(ValueError, match="unknown op 'nothing'"):
        explain("nothing")
    assert select(op, 3).name == "small"


def test_a_name_registers_once(op: str) -> None:
    with pytest.raises(ValueError, match="kernel 'any' of op 'count' is registered twice"):
        register(Kernel(op, "any", "builtins:str", lambda n: None))
    assert [k.name for k in dispatch.kernels(op)] == ["small", "any"]


def test_implementation_is_imported_at_first_use(op: str) -> None:
    sys.modules.pop("this", None)
    register(Kernel("lazy", "lazy", "this:s", lambda: None))
    assert explain("lazy")[0].chosen
    assert select("lazy").name == "lazy"
    assert "this" not in sys.modules
    assert isinstance(select("lazy").function, str)
    assert "this" in sys.modules


@pytest.mark.parametrize(
    "name", ["quantize", "quantize_both", "quantize_grouped", "scaled_mm", "scaled_grouped_mm", "grouped_mm"]
)
def test_every_op_has_a_reference_that_comes_last(name: str) -> None:
    assert dispatch.kernels(name)[-1].name == "reference"


def test_cpu_products_say_why_torch_does_not_serve() -> None:
    a = quantize(torch.ones(4, 32), Format(E4M3FN, "rowwise"))
    verdicts = {v.kernel: v for v in explain("scaled_mm", a, a, None, torch.bfloat16, False)}
    assert verdicts["torch"].reason == "no native FP8 product on cpu"
    assert verdicts["reference"].chosen


def test_forcing_a_product_that_cannot_run_fails_in_words() -> None:
    a = quantize(torch.ones(4, 32), MXFP8)
    with (
        use_kernels(scaled_mm="torch"),
        pytest.raises(NotImplementedError, match="torch: no native FP8 product on cpu"),
    ):
        scaled_mm(a, a)
