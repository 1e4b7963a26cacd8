"""What a suite is made of: cases with inputs, contenders and a check; suites are registered by name.

Another suite is a module with a function that returns its cases, and one line in ``SUITES``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from octavo.bench.timing import Contenders, Inputs


@dataclass(frozen=True)
class Case:
    """One shape of one suite.

    Args:
        group: cases summarized together, e.g. ``"published_small_k"``.
        case: what is run, e.g. ``"fp32 256x1024 k=8"``.
        bytes: the least the work must read and write.
        flops: the least multiplications and additions of its products, 0 for memory-bound work.
        make: returns one set of fresh random inputs on the GPU.
        contenders: what to time on such inputs; ``"octavo"`` is what a user gets with Octavo on, ``"aten"`` PyTorch's.
        check: called with the inputs and ``octavo``'s result; raises AssertionError with the difference found.
        taken: whether Octavo's own kernel serves the case, given the inputs.
        compiled: a function to time under torch.compile as ``"compile"``, Dynamo reset for each case.
        note: anything a reader of the results must know.
        input_bytes: of one set of inputs what the contender that reads least reads, for how many copies of them exceed
            the cache; all that ``make`` returns by default.
        by_events: time by CUDA events with the cache cleared instead of graph replay, and also report the memory
            that a call takes: for steps of many milliseconds.
    """

    group: str
    case: str
    bytes: int
    flops: int
    make: Callable[[], Inputs]
    contenders: Contenders
    check: Callable[[Inputs, Any], None]
    taken: Callable[[Inputs], bool]
    compiled: Callable[..., Any] | None = None
    note: str = ""
    input_bytes: int | None = None
    by_events: bool = False


SUITES = {
    "attention": "octavo.bench.attention_suite:cases",
    "block": "octavo.bench.block_suite:cases",
    "experts": "octavo.bench.experts_suite:cases",
    "gemm": "octavo.bench.dense_suite:cases",
    "grouped": "octavo.bench.grouped_suite:cases",
    "grouped-bf16": "octavo.bench.gemm_suite:cases",
    "grouped-fp8": "octavo.bench.gemm_suite:cases_fp8",
    "linear": "octavo.bench.linear_suite:cases",
    "moe-layer": "octavo.bench.moe_layer_suite:cases",
    "mx": "octavo.bench.mx_suite:cases",
    "quantize": "octavo.bench.quantize_suite:cases",
    "rmsnorm": "octavo.bench.rmsnorm_suite:cases",
    "scaled": "octavo.bench.scaled_suite:cases",
    "topk": "octavo.bench.topk_suite:cases",
}
"""Suite name to ``module:function``, which returns the list of cases."""


def cases(suite: str, force: bool = False) -> list[Case]:
    """The cases of a suite; with ``force``, Octavo's kernels also where no measurement says that they win.

    Raises:
        ValueError: for an unknown suite.
    """
    if suite not in SUITES:
        raise ValueError(f"unknown suite {suite!r}; choose from {', '.join(SUITES)}")
    module, _, function = SUITES[suite].partition(":")
    return getattr(importlib.import_module(module), function)(force)


def dtype_of(name: str) -> torch.dtype:
    """``"fp32"``, ``"bf16"`` or ``"fp16"`` as a dtype."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
