"""Spaces of launch configurations for experts: grouped products and quantization by groups, on published shapes.

Products are of random codes with the scales of normal values; each candidate is compared with the reference on the same
operands before it is timed, like every space of :mod:`octavo.bench.launch_tuning`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from octavo import formats as F
from octavo.bench import published
from octavo.bench.agreement import same_bits, sqnr_db
from octavo.bench.grouped_suite import FAST_DB, Layer, operands
from octavo.bench.launch_tuning import B1, B128, ROW, SQNR_DB, Space
from octavo.bench.timing import Inputs
from octavo.matmul import candidates as product_candidates
from octavo.matmul import launch_tables as product_tables
from octavo.quantize import alignment, candidates
from octavo.training.recipes import Product

SHAPES = ("DeepSeek-V3 EP8", "DeepSeek-MoE-16B")
PRODUCTS = {
    "rows epilogue": ("output", Product(ROW, ROW)),
    "rows fast epilogue": ("output", Product(ROW, ROW, fast_accum=True)),
    "columns epilogue": ("grad_weight", Product(ROW, ROW)),
    "columns fast epilogue": ("grad_weight", Product(ROW, ROW, fast_accum=True)),
    "rows block": ("output", Product(B1, B128)),
    "columns blockrows": ("grad_weight", Product(B1, B1)),
}
"""By the name in the tables: which product of a layer, in which formats."""
GROUPS = {"groups row^T": ROW, "groups 1x128^T": B1, "groups mxfp8^T": F.MXFP8}


def layers() -> list[Layer]:
    """The shapes that are timed, with even groups: the kernels find their rows for any sizes."""
    return [
        Layer(name, "uniform", rows, k, n, experts)
        for name, (rows, k, n, experts) in published.EXPERTS.items()
        if name in SHAPES
    ]


def _product(name: str) -> Space:
    from octavo.matmul import reference, triton_launch

    which, product = PRODUCTS[name]

    def make() -> list[Inputs]:
        found = []
        for layer in layers():
            inputs = layer.make()
            a, b = operands(which, product, inputs)
            found.append((a, b, inputs[3] if a.group_ends is None else a.group_ends))
        return found

    def call(a: Any, b: Any, offs: torch.Tensor) -> torch.Tensor:
        return triton_launch.scaled_grouped_mm(a, b, offs, None, torch.bfloat16, product.fast_accum)

    def wrong(inputs: Inputs, found: Any) -> str | None:
        a, b, offs = inputs
        db = sqnr_db(found, reference.scaled_grouped_mm(a, b, offs, None, torch.bfloat16, False))
        return (
            None if db >= (FAST_DB if product.fast_accum else SQNR_DB) else f"{db:.1f} dB from the reference"
        )

    options = [{name: (config,)} for config in product_candidates.GROUPED[name]]
    return Space("matmul", name, make, call, wrong, options, product_tables.override)


def _groups(name: str) -> Space:
    from octavo.quantize import grouped, triton_launch

    fmt = GROUPS[name]
    align = alignment(fmt)

    def make() -> list[Inputs]:
        return [(x, offs) for x, _, _, offs in (layer.make() for layer in layers())]

    def call(x: torch.Tensor, offs: torch.Tensor) -> Any:
        return triton_launch.quantize_groups(x, offs, fmt, True, align)

    def wrong(inputs: Inputs, found: Any) -> str | None:
        x, offs = inputs
        return same_bits(found, grouped.quantize_groups(x, offs, fmt, True, align))

    return Space("quantize", name, make, call, wrong, candidates.GROUPED[name])


def spaces() -> Iterator[Space]:
    """Every space of experts, what PyTorch has the least of first."""
    for name in ("columns epilogue", "rows epilogue"):
        yield _product(name)
    for name in GROUPS:
        yield _groups(name)
    for name in ("columns fast epilogue", "rows fast epilogue", "rows block", "columns blockrows"):
        yield _product(name)
