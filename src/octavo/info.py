"""What this machine can do, and why dispatch would choose what it chooses: ``octavo info``, ``octavo explain``.

Both ask the real dispatch with fake tensors (shapes without memory), so they need no GPU to speak of one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import octavo.operators.rms_norm  # noqa: F401 (registers its kernels)
from octavo import dispatch, hardware
from octavo.dispatch import Verdict
from octavo.formats import ELEMENTS, GRANULARITIES, MXFP4, MXFP8, Format
from octavo.quantize import alignment, quantize
from octavo.training.recipes import PRODUCTS, RECIPES, get_recipe

OPS = (
    "quantize",
    "quantize_both",
    "quantize_grouped",
    "scaled_mm",
    "scaled_grouped_mm",
    "grouped_mm",
    "mm",
    "rms_norm",
)
SHAPES = {
    "quantize": "MxK",
    "quantize_both": "MxK",
    "quantize_grouped": "MxK G",
    "scaled_mm": "MxK NxK",
    "scaled_grouped_mm": "MxK GxNxK",
    "grouped_mm": "MxK GxNxK",
    "mm": "MxK NxK",
    "rms_norm": "MxN",
}
HIGH_PRECISION = ("grouped_mm", "mm", "rms_norm")
"""Ops of operands that no recipe quantizes."""
_SAMPLE = {1: (4096, 4096), 2: (4096, 4096), 3: (8, 4096, 4096)}


def info() -> dict[str, Any]:
    """Versions, devices, formats, recipes, and for each device every kernel with the reason it cannot serve.

    ``providers`` says of each optional kernel language why it cannot be used, or None: it is imported for that.

    Kernels are asked about 4096 x 4096 operands of the ``rowwise`` recipe.
    """
    devices = hardware.devices()
    return {
        "versions": hardware.versions(),
        "providers": {"flydsl": hardware.why_no_flydsl()},
        "devices": devices,
        "formats": {
            "elements": {e.name: {"max": e.max, "smallest": e.min_subnormal} for e in ELEMENTS.values()},
            "granularities": list(GRANULARITIES),
            "mx": [MXFP8.key, MXFP4.key],
        },
        "recipes": {r.name: list(r.quantized_products) for r in RECIPES.values()},
        "kernels": {
            str(d["device"]): {
                op: [{"kernel": v.kernel, "reason": v.reason, "chosen": v.chosen} for v in verdicts]
                for op in OPS
                for verdicts in [explain(op, _sample_shapes(op), device=str(d["device"]))]
            }
            for d in devices
        },
    }


def _sample_shapes(op: str) -> list[tuple[int, ...]]:
    return [(8,) if part == "G" else _SAMPLE[len(part.split("x"))] for part in SHAPES[op].split()]


def parse_shape(text: str) -> tuple[int, ...]:
    """``"8192x4096"`` as (8192, 4096).

    Raises:
        ValueError: if it is not whole numbers joined by x.
    """
    parts = text.lower().split("x")
    if not all(part.isdigit() for part in parts):
        raise ValueError(f"{text!r} is no shape: write whole numbers joined by x, e.g. 8192x4096")
    return tuple(int(part) for part in parts)


def explain(
    op: str,
    shapes: Sequence[tuple[int, ...]],
    *,
    recipe: str = "rowwise",
    product: str = "output",
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    arch: str | None = None,
) -> list[Verdict]:
    """The verdict of every kernel of ``op`` on operands of these shapes.

    Args:
        op: one of :data:`OPS`.
        shapes: as :data:`SHAPES` says for the op.
        recipe, product: whose formats to quantize by.
        dtype: of high-precision operands and of the output.
        device: the tensors' device; it need not exist if ``arch`` is given.
        arch: answer as a GPU of that architecture would, e.g. ``"gfx942"``.

    Raises:
        ValueError: for an unknown op, recipe or product, or shapes that do not fit the op.
    """
    with _asked(op, shapes, recipe, product, dtype, device, arch) as arguments:
        return dispatch.explain(op, *arguments)


def explain_operators(
    op: str,
    shapes: Sequence[tuple[int, ...]],
    *,
    recipe: str = "rowwise",
    product: str = "output",
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    arch: str | None = None,
) -> list[tuple[str, str | None]]:
    """As ``explain``, for PyTorch's operators that do the same: (overload, why it stays PyTorch's, or None).

    Empty for an op that no operator of PyTorch's does.
    """
    from octavo.operators.gemm.explain import verdicts

    with _asked(op, shapes, recipe, product, dtype, device, arch) as arguments:
        return verdicts(op, arguments)


@contextlib.contextmanager
def _asked(
    op: str,
    shapes: Sequence[tuple[int, ...]],
    recipe: str,
    product: str,
    dtype: torch.dtype,
    device: str,
    arch: str | None,
) -> Iterator[tuple[Any, ...]]:
    """The arguments of the op's kernels as fake tensors, on the architecture that is asked about."""
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}; use one of {', '.join(OPS)}")
    _check_shapes(op, shapes)
    if product not in PRODUCTS:
        raise ValueError(f"unknown product {product!r}; use one of {', '.join(PRODUCTS)}")
    assumed = hardware.assume_architecture(arch) if arch else contextlib.nullcontext()
    with assumed, FakeTensorMode():
        place = torch.device("cuda" if arch else device)
        formats = get_recipe(recipe).product(product, place)
        if formats is None and op not in HIGH_PRECISION:
            raise ValueError(f"recipe {recipe!r} runs {product!r} in high precision: no kernel to explain")
        pair = (formats.a, formats.b) if formats else (MXFP8, MXFP8)
        fast = bool(formats and formats.fast_accum)
        yield _arguments(op, shapes, pair, fast, dtype, place)


def _check_shapes(op: str, shapes: Sequence[tuple[int, ...]]) -> None:
    wanted = [1 if part == "G" else len(part.split("x")) for part in SHAPES[op].split()]
    if [len(shape) for shape in shapes] != wanted:
        got = " ".join("x".join(map(str, shape)) for shape in shapes) or "none"
        raise ValueError(f"{op} takes shapes {SHAPES[op]}; got {got}")


def _arguments(
    op: str,
    shapes: Sequence[tuple[int, ...]],
    formats: tuple[Format, Format],
    fast_accum: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Any, ...]:
    """The arguments that the op's kernels take, made of fake tensors."""
    x = torch.empty(shapes[0], dtype=dtype, device=device)
    if op == "rms_norm":
        return x, [shapes[0][1]], torch.empty(shapes[0][1], dtype=dtype, device=device), None
    if op == "quantize":
        return x, formats[0], False
    if op == "quantize_both":
        return x, *formats
    if op == "mm":
        return x, torch.empty(shapes[1], dtype=dtype, device=device)
    groups = shapes[1][0]
    offs = torch.empty(groups, dtype=torch.int32, device=device)
    if op == "quantize_grouped":
        return x, offs, formats[0], True, alignment(*formats)
    w = torch.empty(shapes[1], dtype=dtype, device=device)
    if op == "grouped_mm":
        return x, w, offs, None
    operands = (quantize(x, formats[0]), quantize(w, formats[1]))
    tail = (None, dtype, fast_accum)
    return (*operands, *tail) if op == "scaled_mm" else (*operands, offs, *tail)
