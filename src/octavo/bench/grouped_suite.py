"""Grouped products of experts: each product alone and with its quantization, then forward and backward together.

Shapes are :data:`octavo.bench.published.EXPERTS`, routings :mod:`octavo.bench.routings`. Contenders:

* ``octavo``: what dispatch chooses; ``octavo_triton`` and ``octavo_torch`` name the kernel of the FP8 product;
* ``aten``: ``torch._grouped_mm`` in BF16;
* ``torch_fp8``: ``torch._scaled_grouped_mm`` on the same quantized operands; ``torch_fp8_compile`` with quantization
  by compiled PyTorch steps, where the sizes are multiples of 16 (:mod:`octavo.bench.stock_moe`).

``product`` cases get quantized operands and are checked against the reference on these; the others quantize x, g and
the weights inside what is timed. ``octavo_cached`` is a step inside ``octavo.accumulate()`` whose weights are
quantized already.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

import octavo
from octavo.bench import published, routings, stock_moe
from octavo.bench.agreement import same_bits, sqnr_db
from octavo.bench.cases import Case
from octavo.bench.timing import Contender, Contenders, Inputs
from octavo.formats import Format, ScaledTensor
from octavo.matmul import reference, scaled_grouped_mm
from octavo.quantize import alignment, quantize, quantize_grouped
from octavo.training.recipes import PRODUCTS, Product, Recipe

RECIPES = (
    ("rowwise", "default"), ("rowwise", "all"), ("blockwise", "default"), ("rowwise_with_gw_hp", "default"),
    ("tensorwise", "all"), ("mxfp8", "default"),
)  # fmt: skip
PRODUCT_DB, FAST_DB = 50.0, 30.0
"""Least agreement of a product with the reference on the same operands (numerics.md: fast accumulation falls to
37 dB with outliers)."""
FLOORS = {"output": 24.0, "grad_input": 22.0, "grad_weight": 22.0}
"""Least agreement with BF16 in dB, of results that are quantized (numerics.md: 27, 25 and 24 against float64)."""


by_triton = functools.partial(octavo.use_kernels, scaled_grouped_mm="triton")
"""The context in which grouped FP8 products run on the Triton kernel, also where dispatch prefers PyTorch's own."""


@dataclass(frozen=True)
class Layer:
    """One layer of experts x [M, K] by w [G, N, K], with the rows of each expert."""

    name: str
    routing: str
    rows: int
    k: int
    n: int
    experts: int

    @property
    def sizes(self) -> tuple[int, ...]:
        return routings.sizes(self.routing, self.rows, self.experts)

    @property
    def live(self) -> int:
        """Rows of experts."""
        return sum(self.sizes)

    @property
    def flops(self) -> int:
        return 2 * self.live * self.k * self.n

    @property
    def words(self) -> str:
        return f"{self.name} {self.routing}"

    def make(self) -> Inputs:
        """x [M, K], w [G, N, K], g [M, N] in bfloat16 and int32 ends."""
        x = torch.randn(self.rows, self.k, device=routings.DEVICE, dtype=torch.bfloat16)
        w = torch.randn(self.experts, self.n, self.k, device=routings.DEVICE, dtype=torch.bfloat16)
        g = torch.randn(self.rows, self.n, device=routings.DEVICE, dtype=torch.bfloat16)
        return x, w.mul_(self.k**-0.5), g, routings.ends(self.sizes)


def layers(rows_an_expert: int | None = None) -> list[Layer]:
    """Every shape in every routing, even routings first; with ``rows_an_expert`` at so few rows."""
    found = []
    for routing in routings.ROUTINGS:
        for name, (rows, k, n, experts) in published.EXPERTS.items():
            few = rows if rows_an_expert is None else rows_an_expert * experts
            found.append(Layer(name, routing, few, k, n, experts))
    return found


# ---- one product --------------------------------------------------------------------------------------------


def _sides(name: str, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The operands ``a`` and ``b`` of a product in 16 bits, with the contraction where they have it."""
    x, w, g, _ = inputs
    return {"output": (x, w), "grad_input": (g, w), "grad_weight": (g, x)}[name]


def operands(name: str, product: Product, inputs: Inputs) -> tuple[ScaledTensor, ScaledTensor]:
    """The operands of a product of a layer's inputs, quantized."""
    a, b = _sides(name, inputs)
    offs = inputs[3]
    if name == "grad_weight":
        align = alignment(product.a, product.b)
        return (
            quantize_grouped(a, offs, product.a, transpose=True, align=align),
            quantize_grouped(b, offs, product.b, transpose=True, align=align),
        )
    return quantize_grouped(a, offs, product.a), quantize(b, product.b, transpose=name == "grad_input")


def _multiply(
    name: str, fast: bool, sides: tuple[ScaledTensor, ScaledTensor], offs: torch.Tensor
) -> torch.Tensor:
    a, b = sides
    return scaled_grouped_mm(a, b, None if name == "grad_weight" else offs, fast_accum=fast)


def bf16_product(name: str, inputs: Inputs) -> torch.Tensor:
    """The product of a layer's inputs by ``torch._grouped_mm``."""
    x, w, g, offs = inputs
    if name == "output":
        return stock_moe.bf16_grouped(x, w, offs)
    if name == "grad_input":
        return stock_moe.bf16_grouped(g, w.mT, offs)
    return stock_moe.bf16_over_groups(g, x, offs)


def _product_case(layer: Layer, name: str, recipe: str, fast: bool) -> Case:
    """One product of quantized operands."""

    def make() -> Inputs:
        inputs = layer.make()
        product = octavo.get_recipe(recipe).product(name, inputs[0].device)
        assert product is not None
        return *operands(name, product, inputs), *inputs

    def call(a: ScaledTensor, b: ScaledTensor, *inputs: Any) -> torch.Tensor:
        return _multiply(name, fast, (a, b), inputs[3])

    def stock(a: ScaledTensor, b: ScaledTensor, *inputs: Any) -> torch.Tensor:
        offs = inputs[3] if a.group_ends is None else a.group_ends
        right = b.scale.squeeze(-1) if b.ndim == 3 else b.scale.flatten()
        return stock_moe.fp8_product((a.data, a.scale.flatten()), (b.data, right), offs, fast=fast)

    def check(inputs: Inputs, result: Any) -> None:
        a, b, *rest = inputs
        offs = rest[3] if a.group_ends is None else a.group_ends
        wanted = reference.scaled_grouped_mm(a, b, offs, None, torch.bfloat16, False)
        agrees(result, wanted, FAST_DB if fast else PRODUCT_DB, name)
        exact_zeros(name, layer, result)

    contenders: Contenders = {
        "octavo": Contender(call),
        "aten": Contender(lambda _a, _b, *inputs: bf16_product(name, inputs)),
    }
    contenders["octavo_triton"] = Contender(call, by_triton)
    contenders["octavo_torch"] = Contender(
        call, functools.partial(octavo.use_kernels, scaled_grouped_mm="torch")
    )
    if recipe == "rowwise":
        contenders["torch_fp8"] = Contender(stock)
    return Case(
        group=f"product, {recipe}{', fast' if fast else ''}",
        case=f"{layer.words} {name}",
        bytes=layer.rows * (layer.k + layer.n) + layer.experts * layer.k * layer.n * 2,
        flops=layer.flops,
        make=make,
        contenders=contenders,
        check=check,
        taken=lambda inputs: True,
    )


def agrees(found: torch.Tensor, wanted: torch.Tensor, floor: float, what: str) -> None:
    """AssertionError unless the two agree to ``floor`` dB."""
    db = sqnr_db(found, wanted)
    assert db >= floor, f"{what}: {db:.1f} dB, {floor} are needed"


def exact_zeros(name: str, layer: Layer, found: torch.Tensor) -> None:
    """AssertionError unless rows past the last end, and gradients of empty experts, are zero."""
    if name == "grad_weight":
        idle = [e for e, size in enumerate(layer.sizes) if size == 0]
        assert not found[idle].any(), f"the gradient of an expert without rows, of {idle}, is not zero"
    else:
        assert not found[layer.live :].any(), f"{name}: rows past the last end are not zero"


def _quantized_case(layer: Layer, name: str, recipe: str, fast: bool) -> Case:
    """One product of 16-bit tensors, quantization included."""

    def call(*inputs: Any) -> torch.Tensor:
        product = octavo.get_recipe(recipe).product(name, inputs[0].device)
        assert product is not None
        return _multiply(name, fast, operands(name, product, inputs), inputs[3])

    def stock(*inputs: Any) -> torch.Tensor:
        a, b = _sides(name, inputs)
        offs = inputs[3]
        if name == "grad_weight":
            sides = stock_moe.quantize_columns(a, offs), stock_moe.quantize_columns(b, offs)
        else:
            right = b.mT.contiguous() if name == "grad_input" else b
            sides = stock_moe.quantize_rows(a), stock_moe.quantize_rows(right)
        return stock_moe.fp8_product(*sides, offs, fast=fast)

    def check(inputs: Inputs, result: Any) -> None:
        rows = slice(None) if name == "grad_weight" else slice(layer.live)
        agrees(result[rows], bf16_product(name, inputs)[rows], FLOORS[name], name)
        exact_zeros(name, layer, result)

    contenders: Contenders = {
        "octavo": Contender(call),
        "aten": Contender(lambda *inputs: bf16_product(name, inputs)),
    }
    if recipe == "rowwise" and stock_moe.fits(layer.sizes):
        contenders["torch_fp8_compile"] = Contender(stock_moe.compiled(stock))
    return Case(
        group=f"product and quantization, {recipe}{', fast' if fast else ''}",
        case=f"{layer.words} {name}",
        bytes=2 * (layer.rows * (layer.k + layer.n) + layer.experts * layer.k * layer.n),
        flops=layer.flops,
        make=layer.make,
        contenders=contenders,
        check=check,
        taken=lambda inputs: True,
    )


# ---- forward and backward -----------------------------------------------------------------------------------


def train(product: Any, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, offs: torch.Tensor) -> Any:
    """(output, gradient of x, gradient of w) of a function ``product(x, w, offs)``."""
    x, w = x.detach().requires_grad_(), w if w.requires_grad else w.detach().requires_grad_()
    out = product(x, w, offs)
    return out.detach(), *torch.autograd.grad(out, (x, w), g)


def _ours(recipe: Recipe, x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return octavo.grouped_mm(x, w.mT, offs, recipe=recipe)


@contextlib.contextmanager
def _kept(step: Any, layer: Layer, held: list[weakref.ref[torch.Tensor]]) -> Iterator[None]:
    """Inside ``accumulate()``, with the weights of the last inputs quantized already by a step on few rows."""
    few = replace(layer, rows=16 * layer.experts, routing="uniform")
    with octavo.accumulate():
        for reference_to_w in held:
            x, g = (
                torch.zeros(few.rows, n, device=routings.DEVICE, dtype=torch.bfloat16) for n in (few.k, few.n)
            )
            step(x, reference_to_w(), g, routings.ends(few.sizes))
        yield


def _step_case(layer: Layer, recipe: str, fast: str) -> Case:
    step = functools.partial(train, functools.partial(_ours, octavo.get_recipe(recipe, fast_accum=fast)))
    plain = functools.partial(train, stock_moe.bf16_grouped)
    held: list[weakref.ref[torch.Tensor]] = []

    def make() -> Inputs:
        x, w, g, offs = layer.make()
        # The weight cache knows parameters alone.
        w = torch.nn.Parameter(w)
        held[:] = [weakref.ref(w)]
        return x, w, g, offs

    def check(inputs: Inputs, result: Any) -> None:
        for name, found, wanted in zip(PRODUCTS, result, plain(*inputs), strict=True):
            rows = slice(None) if name == "grad_weight" else slice(layer.live)
            agrees(found[rows], wanted[rows], FLOORS[name], name)
            exact_zeros(name, layer, found)

    contenders: Contenders = {
        "octavo": Contender(step),
        "octavo_cached": Contender(step, functools.partial(_kept, step, layer, held)),
        "aten": Contender(plain),
    }
    if recipe == "rowwise" and fast == "default":
        contenders["octavo_triton"] = Contender(step, by_triton)
    if recipe == "rowwise" and fast == "default" and stock_moe.fits(layer.sizes):
        stock = functools.partial(train, stock_moe.compiled(stock_moe.fp8_grouped))
        contenders["torch_fp8_compile"] = Contender(stock)
    return Case(
        group=f"forward and backward, {recipe}{', fast everywhere' if fast == 'all' else ''}",
        case=layer.words,
        bytes=2 * (3 * layer.rows * (layer.k + layer.n) + 3 * layer.experts * layer.k * layer.n),
        flops=3 * layer.flops,
        make=make,
        contenders=contenders,
        check=check,
        taken=lambda inputs: True,
        by_events=True,
    )


# ---- quantization alone -------------------------------------------------------------------------------------


def _columns_case(layer: Layer) -> Case:
    """Scales for each column of each group: the transposed copy of x that a weight gradient contracts over."""

    def formats(x: torch.Tensor) -> Format:
        product = octavo.get_recipe("rowwise").product("grad_weight", x.device)
        assert product is not None
        return product.b

    def call(x: torch.Tensor, _w: Any, _g: Any, offs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = quantize_grouped(x, offs, formats(x), transpose=True)
        return found.data, found.scale

    def plain(x: torch.Tensor, _w: Any, _g: Any, offs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return stock_moe.quantize_columns(x, offs)

    def check(inputs: Inputs, result: Any) -> None:
        data, scale = plain(*inputs)
        problem = same_bits((result[0][:, : layer.rows].contiguous(), result[1].flatten()), (data, scale))
        assert problem is None, problem

    return Case(
        group="columnwise quantization",
        case=layer.words,
        bytes=5 * layer.rows * layer.k,
        flops=0,
        make=layer.make,
        contenders={
            "octavo": Contender(call),
            "aten": Contender(plain),
            "compile": Contender(stock_moe.compiled(plain)),
        },
        check=check,
        taken=lambda inputs: True,
        note="an amax of each column of each group comes first: 2 reads of 2 bytes and a write of 1 an element",
    )


def _cases(found: list[Layer]) -> list[Case]:
    even = [layer for layer in found if layer.routing == "uniform"]
    skewed = [layer for layer in found if layer.routing == "skewed"]
    rest = [layer for layer in found if layer.routing in ("empty", "ragged")]
    main = RECIPES[:2]
    # What matters most comes first: a run may be cut short.
    return [
        *(_step_case(layer, *recipe) for recipe in main for layer in even),
        *(
            _product_case(layer, name, "rowwise", fast)
            for layer in even
            for name in PRODUCTS
            for fast in (True, False)
        ),
        *(_step_case(layer, *recipe) for recipe in main for layer in skewed),
        *(_columns_case(layer) for layer in even + skewed),
        *(_step_case(layer, "blockwise", "default") for layer in even),
        *(_quantized_case(layer, name, "rowwise", True) for layer in even for name in PRODUCTS),
        *(_product_case(layer, name, "blockwise", False) for layer in even for name in PRODUCTS),
        *(_step_case(layer, *RECIPES[0]) for layer in rest),
        *(_product_case(layer, name, "rowwise", True) for layer in skewed for name in PRODUCTS),
        *(_step_case(layer, *recipe) for recipe in RECIPES[3:] for layer in even),
        *(_step_case(layer, "blockwise", "default") for layer in skewed + rest),
    ]


def cases(force: bool = False) -> list[Case]:
    """Every product and step, the most telling first; ``force`` changes nothing here."""
    return _cases(layers())


def small_cases() -> list[Case]:
    """The same kernels on 192 rows an expert: what compiles them all without the memory of the suite."""
    return _cases(layers(192))
