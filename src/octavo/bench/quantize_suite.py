"""Quantization of bfloat16 in every format and direction, beside PyTorch's own steps, eager and compiled.

``bytes`` counts what each case must move: 2 read and 1 written an element in one direction, 1 more for the second;
formats whose scale spans a whole dimension that no program holds read twice.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from octavo.bench.agreement import same_bits
from octavo.bench.cases import Case
from octavo.bench.launch_tuning import DENSE
from octavo.bench.timing import Contender, Inputs
from octavo.formats import Format
from octavo.fused import reference

SHAPES = ((8192, 4096), (8192, 14336), (28672, 4096), (8191, 4095))
BYTES = {
    "row": 3, "tensorwise": 5, "column^T": 5, "tensorwise both": 6, "rowwise both": 6, "1x128": 3, "1x128^T": 3,
    "1x128 both": 4, "128x128": 3, "128x128 both": 4, "mxfp8": 3, "mxfp8^T": 3, "mxfp8 both": 4, "mxfp4": 2.5,
    "mxfp4 both": 3,
}  # fmt: skip
"""Bytes an element, scales not counted."""


def _octavo(x: torch.Tensor, fmt: Format | None, turned: Format | None) -> tuple[Any, ...]:
    from octavo.quantize import quantize, quantize_both

    if fmt is not None and turned is not None:
        a, b = quantize_both(x, fmt, turned)
        return a.data, a.scale, b.data, b.scale
    chosen = fmt or turned
    assert chosen is not None
    one = quantize(x, chosen, transpose=fmt is None)
    nothing = (None, None)
    return (*nothing, one.data, one.scale) if fmt is None else (one.data, one.scale, *nothing)


def _steps(x: torch.Tensor, fmt: Format | None, turned: Format | None) -> tuple[Any, ...]:
    return *reference.quantize_optional(x, fmt), *reference.quantize_optional(x, turned, transpose=True)


def _case(name: str, shape: tuple[int, int]) -> Case:
    fmt, turned = DENSE[name]
    steps = functools.partial(_steps, fmt=fmt, turned=turned)

    def check(inputs: Inputs, result: Any) -> None:
        problem = same_bits(result, steps(*inputs))
        assert problem is None, problem

    return Case(
        group=name,
        case=f"bf16 {shape[0]}x{shape[1]}",
        bytes=int(BYTES[name] * shape[0] * shape[1]),
        flops=0,
        make=lambda: (torch.randn(*shape, device="cuda").bfloat16(),),
        contenders={
            "octavo": Contender(functools.partial(_octavo, fmt=fmt, turned=turned)),
            "aten": Contender(steps),
        },
        check=check,
        taken=lambda inputs: True,
        compiled=steps,
    )


def cases(force: bool = False) -> list[Case]:
    """Every format and direction on every shape that it takes; ``force`` changes nothing here."""
    packs = {name: max(f.element.packed for f in pair if f) for name, pair in DENSE.items()}
    return [
        _case(name, shape)
        for name in DENSE
        for shape in SHAPES
        if all(size % packs[name] == 0 for size in shape)
    ]
