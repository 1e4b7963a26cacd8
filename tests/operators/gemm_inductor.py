"""Checks of dense products as choices of Inductor, on the CPU with Triton's interpreter.

TRITON_INTERPRET=1 python tests/operators/gemm_inductor.py offered,forced,measured,refused,off,handler,seam
TRITON_INTERPRET=1 python tests/operators/gemm_inductor.py cached forced|unforced|stock|other
"""

from __future__ import annotations

import os
import sys
import tempfile
from unittest import mock

import torch
import torch.nn.functional as F
from gemm_checks import compare
from torch._dynamo.utils import counters
from torch._inductor import config, select_algorithm
from torch._inductor.choices import InductorChoices
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V

from octavo import hardware
from octavo.operators import inductor, wins
from octavo.operators.gemm import compiled, dense

BF16 = torch.bfloat16
TUNED = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN"}


def inputs(m: int = 32, n: int = 48, k: int = 64) -> tuple[torch.Tensor, ...]:
    """Rows, a weight and a bias."""
    torch.manual_seed(0)
    return torch.randn(m, k).to(BF16), torch.randn(n, k).to(BF16), torch.randn(n).to(BF16)


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``aten::mm``."""
    return F.linear(x, w)


def biased(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``aten::addmm``; F.linear with a bias is no addmm on the CPU."""
    return torch.addmm(b, x, w.t())


def _code(function, *tensors: torch.Tensor, **options) -> tuple[torch.Tensor, str]:
    torch._dynamo.reset()
    run = torch.compile(function, fullgraph=True, dynamic=False, options=options or None)
    found, codes = run_and_get_code(run, *tensors)
    return found, "\n".join(codes)


def _check(got: torch.Tensor, want: torch.Tensor) -> None:
    compare(got, want, 45.0, "compiled")


def offered() -> None:
    """With autotuning ours is timed once beside PyTorch's, for mm and addmm, and rows may be unknown."""
    seen: dict[str, list[str]] = {}

    def note(timings, name, input_nodes, choices, *rest) -> None:
        seen[name] = [choice.choice.name for choice in choices if hasattr(choice, "choice")]

    select_algorithm.add_feedback_saver(note)
    compiled.turned(True, False)
    x, w, b = inputs()
    _check(_code(linear, x, w, **TUNED)[0], linear(x, w))
    _check(_code(biased, x, w, b, **TUNED)[0], biased(x, w, b))
    for name in ("mm", "addmm"):
        assert seen[name].count(f"octavo_{name}") == 1, seen
        assert name in seen[name] or f"bias_{name}" in seen[name], seen
    torch._dynamo.reset()
    seen.clear()
    run = torch.compile(linear, fullgraph=True, options=TUNED)
    for rows in (32, 20):
        some = x[:rows].clone()
        torch._dynamo.mark_dynamic(some, 0)
        _check(run(some, w), linear(some, w))
    assert seen["mm"].count("octavo_mm") == 1, seen
    assert compiled.counted()["inductor::mm"][0] == 2, compiled.counted()
    assert compiled.counted()["inductor::addmm"][0] == 1


def forced() -> None:
    """Without autotuning ``force`` puts ours in place of PyTorch's; switched off, the same graph runs PyTorch's."""
    compiled.turned(True, True)
    x, w, b = inputs()
    for function, tensors in ((linear, (x, w)), (biased, (x, w, b))):
        got, code = _code(function, *tensors)
        name = "octavo_mm" if function is linear else "octavo_addmm"
        assert f"extern_kernels.{name}(" in code, code
        _check(got, function(*tensors))
    # A row slice, whose rows are longer than K, and one that the kernel is not right for at run time.
    wide = torch.randn(32, 128).to(BF16)[:, :64]
    _check(_code(linear, wide, w)[0], linear(wide, w))
    torch._dynamo.reset()
    run = torch.compile(linear, fullgraph=True)
    run(x, w)
    compiled.turned(False, False)
    assert torch.equal(run(x, w), linear(x, w)), "the graph calls torch.mm once the operator is off"


def measured() -> None:
    """A table of wins decides: while compiling where rows are known, else at run time."""
    box = {"dtype": ["bfloat16"], "m": [8, 32], "n": [48, 48], "k": [64, 64]}
    table = {"mm": wins.Table((box,), "a test")}
    with mock.patch.object(wins, "tables", return_value=table):
        _measured()


def _measured() -> None:
    wins._decide.cache_clear()
    compiled.turned(True, False)
    x, w, b = inputs()
    assert "extern_kernels.octavo_mm(" in _code(linear, x, w)[1]
    assert "extern_kernels.octavo_addmm(" in _code(biased, x, w, b)[1]
    code = _code(linear, x[:4], w)[1]
    assert "octavo" not in code
    torch._dynamo.reset()
    run = torch.compile(linear, fullgraph=True)
    torch._dynamo.mark_dynamic(x, 0)
    few = x[:4].clone()
    with mock.patch.object(dense, "measured_mm", wraps=dense.measured_mm) as asked:
        results, codes = run_and_get_code(run, x, w)
        assert torch.equal(run(few, w), linear(few, w)), "too few rows: PyTorch's own"
    assert "extern_kernels.octavo_measured_mm(" in codes[0]
    _check(results, linear(x, w))
    assert [call.args[0].shape[0] for call in asked.call_args_list] == [32, 4]
    wins._decide.cache_clear()


def refused() -> None:
    """What the kernels are not right for compiles as stock, with the reason."""
    compiled.turned(True, True)
    x, w, b = inputs()
    before = len(compiled.counted()["inductor::mm"][1])
    cases = {
        "not all bfloat16": (linear, (x.float(), w.float())),
        "not row-major or the second not column-major": (torch.mm, (x, w.t().contiguous())),
        "multiples of 16 bytes": (linear, (x[:, :60].contiguous(), w[:, :60].contiguous())),
        "beta or alpha is not 1": (lambda b, x, w: torch.addmm(b, x, w.t(), alpha=2), (b, x, w)),
    }
    for reason, (function, tensors) in cases.items():
        got, code = _code(function, *tensors)
        assert "octavo" not in code, reason
        assert torch.equal(got, function(*tensors)), reason
        found = [words for _, refused in compiled.counted().values() for words in refused]
        assert any(reason in words for words in found), (reason, found)
    assert len(compiled.counted()["inductor::mm"][1]) > before
    with config.patch(cpp_wrapper=True):
        product = inductor.Product(
            "mm", False, x.device, BF16, (32, 48, 64), ((64, 1), (1, 64)), blocked="so"
        )
    assert compiled.decide(product) == inductor.Answer(reason="so")


def off() -> None:
    """Nothing changes until asked for, nor after: handler, configuration and cache key are PyTorch's."""
    stock = config.save_config_portable(ignore_private_configs=False)
    assert stock["inductor_choices_class"] is None
    compiled.turned(True, False)
    assert config.inductor_choices_class is not None
    x, w, _ = inputs()
    # Nothing is measured here, so nothing is offered.
    assert "octavo" not in _code(linear, x, w)[1]
    reason = f"not measured on {hardware.architecture(x.device)}"
    assert compiled.counted()["inductor::mm"] == (0, {reason: 1})
    compiled.turned(False, False)
    assert config.save_config_portable(ignore_private_configs=False) == stock
    compiled.reset()
    assert "octavo" not in _code(linear, x, w, **TUNED)[1]
    assert compiled.counted()["inductor::mm"] == (0, {})


def seam() -> None:
    """Another Inductor: one reason, nothing offered, nothing broken."""
    stock = InductorChoices._finalize_template_configs
    del InductorChoices._finalize_template_configs
    inductor.why_no_choices.cache_clear()
    found = inductor.why_no_choices()
    assert found is not None
    assert f"PyTorch {torch.__version__} has another seam" in found
    compiled.turned(True, True)
    assert compiled.counted()["inductor::mm"] == (0, {found: 1})
    assert config.inductor_choices_class is None
    InductorChoices._finalize_template_configs = stock  # type: ignore[method-assign]
    with mock.patch.object(InductorChoices, "_finalize_template_configs", lambda self, choices: choices):
        inductor.why_no_choices.cache_clear()
        assert "hands choices on as ('self', 'choices')" in str(inductor.why_no_choices())
    inductor.why_no_choices.cache_clear()
    assert inductor.why_no_choices() is None


class Own(InductorChoices):
    """A user's own."""

    calls = 0

    def _finalize_template_configs(self, *args, **kwargs):
        Own.calls += 1
        return super()._finalize_template_configs(*args, **kwargs)

    def uuid(self) -> str:
        """Its part of the cache key."""
        return "own"


def handler() -> None:
    """A handler of the user's own keeps what it does, and its part of the cache key."""
    config.inductor_choices_class = Own
    compiled.turned(True, True)
    compiled.turned(True, True)
    x, w, _ = inputs()
    assert "extern_kernels.octavo_mm(" in _code(linear, x, w)[1]
    assert Own.calls == 1
    assert V.choices.uuid() == f"{compiled.key(True)}:own"
    compiled.turned(False, False)
    assert config.inductor_choices_class is Own
    config.inductor_choices_class = None
    V.set_choices_handler(InductorChoices())


def cached(way: str) -> None:
    """One process of several that share a cache folder: whether its graph was found there."""
    if way == "other":
        compiled.__version__ = "0.0.0"  # type: ignore[misc]
    if way != "stock":
        compiled.turned(True, way != "unforced")
    x, w, _ = inputs()
    torch._dynamo.reset()
    _check(torch.compile(linear, fullgraph=True)(x, w), linear(x, w))
    print("hit" if counters["inductor"]["fxgraph_cache_hit"] else "miss")


if __name__ == "__main__":
    from octavo.check.interpreter import install

    install()
    with tempfile.TemporaryDirectory() as folder:
        for group in sys.argv[1].split(","):
            # Some checks put tables in place that the cache key does not know of: no graph of theirs may stay.
            if group != "cached":
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{group}"
            globals()[group](*sys.argv[2:])
            compiled.turned(False, False)
            compiled.reset()
    print(sys.argv[1], "passed")
